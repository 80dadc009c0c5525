"""Payload in memory that the engine cannot touch, across wires: staged where it leaves, in place before it is told."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import neighbour
from fake_gpu import LAUNCH_FAILURE, DeviceBuffer, DeviceEnds, FakeGpus, device_ends
from gpunetio import QpType, verbs
from gpunetio.fabric.faults import Faults
from gpunetio.memory import HostMemory
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.memory.staging import SLOT_BYTES, SLOTS
from gpunetio.nic.memory.streams import PIECE
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    LOCAL_QP_OP,
    READ,
    REQ,
    REQ_ERR,
    RESP_SEND,
    SEND,
    WRITE,
    Queue,
    atomic,
    connect,
    data,
    error_of,
    raddr,
    reports_of,
    until,
)

KIB, MIB = 1 << 10, 1 << 20
FA = 0x12


@pytest.fixture(params=[False, True], ids=["lazy", "eager"])
def ends(request: pytest.FixtureRequest) -> Iterator[DeviceEnds]:
    """Two NICs, with a wire of this process."""
    with device_ends("soft0", "soft1", gpus=FakeGpus(eager=request.param)) as ends:
        yield ends


def streams(ends: DeviceEnds) -> list[Any]:
    """Of the NICs, in the order in which they had their first regions."""
    return [opened.row for opened in ends.gpus.streams]


def noise(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# --- order -----------------------------------------------------------------------------------------------------------


def test_nothing_is_acknowledged_before_it_is_in_place(ends):
    here, there = ends.host(0, 64 * KIB, 1), ends.device(1, 64 * KIB)
    (target,) = streams(ends)
    target["hangs"] = 1
    ends.a.post(WRITE, there.remote(), here.at())
    until(lambda: target["given"], "the copy")
    assert ends.a.done.none_for()
    target["hangs"] = 0
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(there.bytes, here.bytes)


@pytest.mark.parametrize("how", ["write", "atomic", "send"])
def test_the_flag_does_not_show_before_the_payload(ends, how):
    here, there, flag, old = ends.host(0, 64 * KIB, 1), ends.device(1, 64 * KIB), ends.host(1, 8), ends.host(0, 8)
    (target,) = streams(ends)
    target["hangs"] = 1
    ends.a.put(WRITE, there.remote(), here.at())
    if how == "write":
        ends.a.put(WRITE, flag.remote(), here.at(0, 8))
    elif how == "atomic":
        ends.a.put(FA, flag.remote(), atomic(1), old.at())
    else:
        ends.b.receive(flag.at(0, 8))
        ends.a.put(SEND, here.at(0, 8))
    ends.a.ring()
    until(lambda: target["given"], "the payload's copy")
    time.sleep(0.005)
    assert not flag.bytes.any() or np.array_equal(there.bytes, here.bytes)
    if not ends.gpus.eager:
        assert not flag.bytes.any()
    assert ends.b.arrived.poll() is None
    target["hangs"] = 0
    assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ]
    assert flag.bytes.any()
    assert np.array_equal(there.bytes, here.bytes)


def test_a_receive_completes_when_its_bytes_are_in_place(ends):
    here, there = ends.host(0, 64 * KIB, 1), ends.device(1, 64 * KIB)
    (target,) = streams(ends)
    target["hangs"] = 1
    ends.b.receive(there.at())
    ends.a.post(SEND, here.at())
    until(lambda: target["given"], "the copy")
    assert ends.b.arrived.none_for()
    target["hangs"] = 0
    assert ends.b.arrived.next().opcode == RESP_SEND
    assert np.array_equal(there.bytes, here.bytes)


def test_a_read_completes_when_its_bytes_are_in_place(ends):
    here, there, old = ends.device(0, 300 * KIB), ends.host(1, 300 * KIB, 5), ends.device(0, 64)
    (source,) = streams(ends)
    source["hangs"] = 1
    ends.a.post(READ, there.remote(), here.at())
    until(lambda: source["given"], "a copy")
    assert ends.a.done.none_for()
    source["hangs"] = 0
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(there.bytes, here.bytes)
    ends.a.post(FA, there.remote(8), atomic(1), old.at(8, 8))
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(old.bytes[8:16], here.bytes[8:16])


def test_a_read_sees_the_write_before_it(ends):
    here, there, back = ends.device(0, 64 * KIB, 7), ends.device(1, 64 * KIB), ends.device(0, 64 * KIB)
    ends.a.put(WRITE, there.remote(), here.at())
    ends.a.put(READ, there.remote(), back.at())
    ends.a.ring()
    assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ]
    assert np.array_equal(back.bytes, here.bytes)


# --- batches, slots --------------------------------------------------------------------------------------------------


def test_packets_go_to_the_gpu_in_large_pieces(ends):
    here, there = ends.host(0, 4 * MIB), ends.device(1, 4 * MIB)
    here.bytes[:] = noise(4 * MIB)
    ends.a.post(WRITE, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(there.bytes, here.bytes)
    assert 4 * MIB // PIECE <= streams(ends)[0]["given"] <= 128  # of 1024 packets or more


def test_packets_come_from_the_gpu_in_large_pieces(ends):
    here, there = ends.device(0, 4 * MIB), ends.host(1, 4 * MIB)
    here.bytes[:] = noise(4 * MIB)
    ends.a.post(WRITE, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(there.bytes, here.bytes)
    assert streams(ends)[0]["copied"] < 8 * MIB
    assert streams(ends)[0]["given"] <= 2 * 4 * MIB // SLOT_BYTES


def test_more_senders_than_slots(ends):
    count, nbytes = SLOTS + 8, 600 * KIB
    here, there = ends.device(0, nbytes), ends.host(1, count * nbytes)
    here.bytes[:] = noise(nbytes)
    pairs = [(Queue(ends.pds[0], 16, 0), Queue(ends.pds[1], 16, 0)) for _ in range(count)]
    for i, (a, b) in enumerate(pairs):
        connect(a, b, ack_timeout=18, retry_cnt=7)
        a.put(WRITE, there.remote(i * nbytes), here.at())
    for a, _ in pairs:
        a.ring()
    for i, (a, _) in enumerate(pairs):
        assert a.done.next().opcode == REQ
        assert np.array_equal(there.bytes[i * nbytes : (i + 1) * nbytes], here.bytes)


def test_those_whose_peers_are_silent_do_not_keep_the_slots(ends):
    here, there = ends.device(0, 2 * MIB, 1), ends.host(1, 2 * MIB)
    silent = [(Queue(ends.pds[0], 16, 0), Queue(ends.pds[1], 16, 0)) for _ in range(SLOTS + 1)]
    for a, b in silent:
        connect(a, b, ack_timeout=0)
        b.reset()
        a.put(WRITE, there.remote(), here.at())
        a.ring()
    time.sleep(0.02)
    ends.a.post(WRITE, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(there.bytes, here.bytes)


# --- wires of all kinds ----------------------------------------------------------------------------------------------


def talk(a: Queue, b: Queue, here: Any, there: Any, rounds: int = 4) -> None:
    """WRITEs, READs and SENDs of odd sizes, and their bytes."""
    for i in range(rounds):
        nbytes = [1, 4097, 70001, here.nbytes - 3][i % 4]
        here.bytes[:] = noise(here.nbytes, i)
        a.post(WRITE, there.remote(1), here.at(2, nbytes))
        assert a.done.next().opcode == REQ
        assert np.array_equal(there.bytes[1 : 1 + nbytes], here.bytes[2 : 2 + nbytes])
        there.bytes[:] = noise(there.nbytes, 100 + i)
        a.post(READ, there.remote(3), here.at(0, nbytes))
        assert a.done.next().opcode == REQ
        assert np.array_equal(here.bytes[:nbytes], there.bytes[3 : 3 + nbytes])
        b.receive(there.at())
        a.post(SEND, here.at(1, nbytes))
        assert a.done.next().opcode == REQ
        assert b.arrived.next().byte_cnt == nbytes
        assert np.array_equal(there.bytes[:nbytes], here.bytes[1 : 1 + nbytes])


@pytest.mark.parametrize("places", ["far to far", "far to host", "host to far"])
def test_lossy_wires(places):
    faults = Faults(loss=0.02, duplication=0.02, reordering=0.02, seed=3)
    source, target = places.split(" to ")
    with device_ends("soft0", "soft1", port=PortConfig(mtu=4200, faults=faults)) as ends:
        for queue in (ends.a, ends.b):
            queue.reset()
        connect(ends.a, ends.b, ack_timeout=14, retry_cnt=7)
        here = ends.device(0, 150 * KIB) if source == "far" else ends.host(0, 150 * KIB)
        there = ends.device(1, 150 * KIB) if target == "far" else ends.host(1, 150 * KIB)
        talk(ends.a, ends.b, here, there)
        names = ("packet_seq_err", "duplicate_request")
        assert any(nic.counters[name] for nic in (ends.a.nic, ends.b.nic) for name in names)


def test_udp():
    gpus = FakeGpus()
    ends = []
    for name in ("soft4", "soft5"):
        ctx = verbs.open(name, port=PortConfig(addresses=(neighbour.address(),), wire="udp"))
        gpus.serve(ctx)
        pd = ctx.create_pd()
        ends.append((ctx, Queue(pd), DeviceBuffer(gpus, pd, 100 * KIB)))
    (_, a, here), (_, b, there) = ends
    connect(a, b, ack_timeout=14, retry_cnt=7)
    talk(a, b, here, there)
    for ctx, *_ in ends:
        ctx.close()


def test_unreliable_connections():
    with device_ends("soft0", "soft1", qp_type=QpType.UC) as ends:
        here, there = ends.device(0, 100 * KIB, 1), ends.device(1, 100 * KIB)
        ends.a.post(WRITE, there.remote(), here.at())
        assert ends.a.done.next().opcode == REQ
        until(lambda: np.array_equal(here.bytes, there.bytes), "the bytes")
        here.bytes[:] = noise(here.nbytes)
        ends.b.receive(there.at())
        ends.a.post(SEND, here.at())
        assert ends.b.arrived.next().opcode == RESP_SEND
        assert np.array_equal(here.bytes, there.bytes)


def test_granted_memory_is_carried_to_a_gpu(monkeypatch):
    """Between processes, which these two take each other for; the granted payload goes straight to the staging ring."""
    monkeypatch.setattr(SoftNic, "join", lambda self, other: None)
    gpus, nbytes = FakeGpus(), 256 * KIB
    near, far = (verbs.open(f"soft{i}", port=PortConfig(addresses=(neighbour.address(),), mtu=9000)) for i in (6, 7))
    gpus.serve(far)
    pd, far_pd = near.create_pd(), far.create_pd()
    a, b = Queue(pd), Queue(far_pd)
    shared = HostMemory(nbytes, shared=True)
    shared.array[:] = noise(nbytes)
    region, there = pd.register(shared), DeviceBuffer(gpus, far_pd, nbytes)
    connect(a, b)
    until(lambda: any(peer.table.array.any() for peer in a.nic.grants._peers.values()), "the grant")
    a.post(WRITE, there.remote(), data(region.address, region.lkey, nbytes))
    assert a.done.next().opcode == REQ
    assert np.array_equal(there.bytes, shared.array)
    b.post(WRITE, raddr(region.address, region.rkey), there.at())
    assert b.done.next().opcode == REQ
    for ctx in (near, far):
        ctx.close()
    shared.close()


# --- errors, and taking away -----------------------------------------------------------------------------------------


def test_a_source_that_fails(ends):
    here, there = ends.device(0, 64 * KIB, 1), ends.host(1, 64 * KIB)
    streams(ends)[0]["query_error"] = LAUNCH_FAILURE
    ends.a.post(WRITE, there.remote(), here.at())
    assert error_of(ends.a.done.next()) == (LOCAL_QP_OP, Reason.COPY_FAILED)
    assert "CUDA_ERROR_LAUNCH_FAILED" in next(reports_of(ends.a.nic, ends.a.qp.qpn)).message


def test_a_read_of_memory_that_fails(ends):
    here, there = ends.host(0, 64 * KIB, 1), ends.device(1, 64 * KIB)
    streams(ends)[0]["copy_error"] = LAUNCH_FAILURE
    ends.a.post(READ, there.remote(), here.at())
    assert error_of(ends.a.done.next())[1] == Reason.NAK_REMOTE_OPERATION
    assert next(reports_of(ends.b.nic, ends.b.qp.qpn)).reason == Reason.COPY_FAILED


@pytest.mark.parametrize("operation", [WRITE, SEND, READ])
def test_a_target_that_fails_later(ends, operation):
    """What had been acknowledged before stays so; the first request whose bytes are not in place fails."""
    here, there = (ends.host(0, 64 * KIB, 1), ends.device(1, 64 * KIB)) if operation != READ else (
        ends.device(0, 64 * KIB), ends.host(1, 64 * KIB, 1))
    (row,) = streams(ends)
    ends.a.post(WRITE if operation != READ else READ, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    row["query_error"] = LAUNCH_FAILURE
    ends.b.receive(there.at())
    ends.a.post(operation, *([] if operation == SEND else [there.remote()]), here.at())
    ends.a.post(operation, *([] if operation == SEND else [there.remote()]), here.at())
    cqes = ends.a.done.take(2)
    assert [cqe.opcode for cqe in cqes] == [REQ_ERR, REQ_ERR]
    expected = Reason.COPY_FAILED if operation == READ else Reason.NAK_REMOTE_OPERATION
    assert error_of(cqes[0])[1] == expected


@pytest.mark.parametrize("side", [0, 1])
def test_commands_wait_for_what_is_on_its_way(ends, side):
    here, there = ends.device(0, MIB, 1), ends.device(1, MIB)
    row = streams(ends)[side]
    row["hangs"] = 1
    ends.a.post(WRITE, there.remote(), here.at())
    until(lambda: row["given"], "a copy")
    timer = threading.Timer(0.05, lambda: row.__setitem__("hangs", 0))
    timer.start()
    (here, there)[side].mr.close()
    assert row["hangs"] == 0
    timer.join()
    assert row["done"] == row["given"]
    image = there.bytes.copy()
    time.sleep(0.01)
    assert side == 0 or np.array_equal(image, there.bytes)
    assert ends.a.done.next().opcode == REQ_ERR
