"""MMO in the software NIC: copies of local memory, by the bytes of WQEs."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from fake_gpu import LAUNCH_FAILURE, DeviceEnds, FakeGpus, device_ends
from gpunetio.enums import Access, QpType
from gpunetio.errors import InvalidValueError
from gpunetio.memory import HostMemory
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    LOCAL_PROT,
    LOCAL_QP_OP,
    MMO,
    NOP,
    READ,
    REMOTE_ACCESS,
    REQ,
    SIZE,
    WRITE,
    Buffer,
    Ends,
    Queue,
    connect,
    data,
    error_of,
    inline,
    pause,
    raddr,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
METADATA = data(0, 0, 0)  # control bits, and the device's own buffer
DMA = 1  # opmod of an MMO that copies


@pytest.fixture(params=[("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    opened = Ends.open(*request.param, memcpy=True)
    yield opened
    opened.close()


@pytest.fixture
def alone() -> Iterator[Ends]:
    """One QP connected to itself."""
    opened = Ends.open("soft0", memcpy=True)
    opened.a.reset()
    connect(opened.a, opened.a)
    yield opened
    opened.close()


def copy(queue: Queue, source: bytes, target: bytes) -> int:
    """Put an MMO of two data segments: its index. Nothing is rung."""
    return queue.put(MMO, METADATA, source, target, opmod=DMA)


def test_mmo_copies_local_memory(ends):
    """It takes no key of a peer, and what reads its target behind it finds the copy, without a fence."""
    source = Buffer(ends.a.qp.pd, SIZE, fill=3, access=Access.LOCAL_READ)
    before = ends.here.bytes.tobytes()
    copy = ends.a.put(MMO, METADATA, source.at(5, 1000), ends.here.at(17, 1000), opmod=DMA)
    ends.a.put(WRITE, ends.there.remote(), ends.here.at())
    ends.a.ring()
    done, write = ends.a.done.take(2)
    assert (done.opcode, done.wqe_opcode, done.counter, write.opcode) == (REQ, MMO, copy, REQ)
    expected = before[:17] + source.bytes[5:1005].tobytes() + before[1017:]
    assert ends.here.bytes.tobytes() == expected
    assert ends.there.bytes.tobytes() == expected


def test_mmo_copies_what_a_read_before_it_brings(ends):
    target = Buffer(ends.a.qp.pd, SIZE)
    ends.there.bytes[:] = 9
    ends.a.put(READ, ends.there.remote(), ends.here.at())
    ends.a.put(MMO, METADATA, ends.here.at(), target.at(), opmod=DMA)
    ends.a.ring()
    assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ]
    assert (target.bytes == 9).all()


def test_a_flushed_mmo_has_copied_nothing(ends):
    target = Buffer(ends.a.qp.pd, SIZE)
    ends.a.put(WRITE, raddr(ends.there.address, 0xBAD00), ends.here.at())
    ends.a.put(MMO, METADATA, ends.here.at(), target.at(), opmod=DMA)
    ends.a.ring()
    write, copy = ends.a.done.take(2)
    assert error_of(write)[0] == REMOTE_ACCESS
    assert error_of(copy)[1] == Reason.FLUSH
    assert not target.bytes.any()


def test_bad_mmos(ends):
    here, target = ends.here, Buffer(ends.a.qp.pd, 64)
    locked = Buffer(ends.a.qp.pd, 64, access=Access.LOCAL_READ)
    foreign = Buffer(ends.a.qp.ctx.create_pd(), 64)
    cases = [
        ([METADATA, here.at(0, 8)], DMA, LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([METADATA, here.at(0, 8), target.at(0, 4), target.at(4, 4)], DMA, LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([METADATA, here.at(0, 8), target.at(0, 9)], DMA, LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([METADATA, inline(b"8 bytes."), target.at(0, 8)], DMA, LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([METADATA, here.at(0, 8), target.at(0, 8)], 2, LOCAL_QP_OP, Reason.WQE_OPCODE),
        ([METADATA, data(here.address, here.key, 0), data(target.address, target.key, 0)], DMA,
         LOCAL_PROT, Reason.LKEY_BOUNDS),  # 0 means 2 GiB
        ([METADATA, foreign.at(), target.at()], DMA, LOCAL_PROT, Reason.LKEY_PD),
        ([METADATA, here.at(0, 64), locked.at()], DMA, LOCAL_PROT, Reason.LKEY_RIGHTS),
        ([METADATA, here.at(0, 64), data(target.address + 1, target.key, 64)], DMA, LOCAL_PROT, Reason.LKEY_BOUNDS),
    ]
    for segments, opmod, syndrome, reason in cases:
        ends.a.post(MMO, *segments, opmod=opmod)
        assert error_of(ends.a.done.next()) == (syndrome, reason)
        assert not target.bytes.any()
        ends.again()


def test_a_queue_without_mmo_refuses_it(ends):
    plain, other = Queue(ends.a.qp.pd), Queue(ends.a.qp.pd)
    connect(plain, other)
    before = ends.here.bytes.tobytes()
    plain.post(MMO, METADATA, ends.here.at(0, 8), ends.here.at(8, 8), opmod=DMA)
    assert error_of(plain.done.next()) == (LOCAL_QP_OP, Reason.WQE_OPCODE)
    assert ends.here.bytes.tobytes() == before


def test_only_rc_has_mmo(ends):
    with pytest.raises(InvalidValueError, match="memcpy on a UC queue pair: only RC has it"):
        Queue(ends.a.qp.pd, qp_type=QpType.UC, memcpy=True)


def test_a_queue_pair_connected_to_itself(alone):
    """What is posted behind a copy finds its bytes: here a WRITE to the same memory."""
    copy(alone.a, alone.here.at(0, 100), alone.here.at(200, 100))
    alone.a.put(WRITE, alone.there.remote(), alone.here.at(200, 100))
    alone.a.ring()
    assert [cqe.opcode for cqe in alone.a.done.take(2)] == [REQ, REQ]
    assert np.array_equal(alone.there.bytes[:100], alone.here.bytes[:100])
    assert np.array_equal(alone.here.bytes[200:300], alone.here.bytes[:100])


def test_every_alignment(alone):
    """Each of 0 to 63 at both ends, with lengths around powers of two; nothing beside the target changes."""
    r, room = Random(5), 64 + 300
    lengths = [n for k in range(9) for n in ((1 << k) - 1, 1 << k, (1 << k) + 1) if n]
    source, target = Buffer(alone.a.qp.pd, room, fill=9), Buffer(alone.a.qp.pd, 64 * room)
    expected = np.zeros(64 * room, np.uint8)
    for begin in range(64):
        for to in range(64):
            nbytes = r.choice(lengths)
            at = to * room + to
            copy(alone.a, source.at(begin, nbytes), target.at(at, nbytes))
            expected[at : at + nbytes] = source.bytes[begin : begin + nbytes]
        alone.a.ring()
        assert {cqe.opcode for cqe in alone.a.done.take(64)} == {REQ}
        assert np.array_equal(target.bytes, expected)


@pytest.mark.parametrize("nbytes", [n + d for n in (4 * KIB, MIB, 3 * MIB) for d in (-1, 0, 1)])
def test_lengths_around_those_of_turns(alone, nbytes):
    source, target = Buffer(alone.a.qp.pd, nbytes, fill=nbytes % 250), Buffer(alone.a.qp.pd, nbytes)
    copy(alone.a, source.at(), target.at())
    alone.a.ring()
    assert alone.a.done.next().opcode == REQ
    assert np.array_equal(source.bytes, target.bytes)
    assert not target.whole[: target.start].any()
    assert not target.whole[target.start + nbytes :].any()


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [GIB + 1, 2 * GIB - 1, 2 * GIB])
def test_lengths_up_to_2_gib(alone, nbytes):
    """A byte count of 0 is 2^31. Most of the source was never touched, and is the page of zeros."""
    pd = alone.a.qp.pd
    source, target = HostMemory(nbytes), HostMemory(nbytes)
    keys = pd.register(source), pd.register(target)
    places = np.unique([*range(0, nbytes, nbytes // 997), *range(4), *range(nbytes - 4, nbytes)])
    source.array[places] = np.arange(len(places)) % 255 + 1
    copy(alone.a, data(source.address, keys[0].lkey, nbytes & 2 * GIB - 1),
         data(target.address, keys[1].lkey, nbytes & 2 * GIB - 1))
    alone.a.ring()
    assert alone.a.done.next().opcode == REQ
    assert np.array_equal(source.array[places], target.array[places])
    assert int(np.count_nonzero(target.array)) == len(places)
    for resource in (*keys, source, target):
        resource.close()


def test_a_long_copy_lets_other_queues_work(ends):
    """A NOP that is announced with it is complete first, whichever queue the engine begins with."""
    nbytes = 8 * MIB
    cq = ends.a.qp.ctx.create_cq(16)
    long, short = Queue(ends.a.qp.pd, send_cq=cq, memcpy=True), Queue(ends.a.qp.pd, send_cq=cq)
    far, near = Queue(ends.b.qp.pd) if ends.wired else long, Queue(ends.a.qp.pd)
    connect(long, far)
    connect(short, near)
    source, target = Buffer(ends.a.qp.pd, nbytes, fill=1), Buffer(ends.a.qp.pd, nbytes)
    pause(long)
    copy(long, source.at(), target.at())
    long.ring()
    short.put(NOP)
    short.ring()
    long.nic.resume()
    assert [cqe.qpn for cqe in long.done.take(2)] == [short.qp.qpn, long.qp.qpn]
    assert np.array_equal(source.bytes, target.bytes)


@pytest.mark.parametrize("distance", [-3 * MIB // 2, -4096, -1, 0, 1, 63, 4096, 3 * MIB // 2])
def test_overlapping_ranges(alone, distance):
    """Bytes of the target that the source covers, too, may be anything; all others are as they should be."""
    nbytes, start = 2 * MIB + 5, 2 * MIB
    memory = Buffer(alone.a.qp.pd, 3 * start, fill=1)
    before = memory.bytes.copy()
    copy(alone.a, memory.at(start, nbytes), memory.at(start + distance, nbytes))
    alone.a.ring()
    assert alone.a.done.next().opcode == REQ
    low, high = start + distance, start + distance + nbytes
    assert np.array_equal(memory.bytes[:low], before[:low])
    assert np.array_equal(memory.bytes[high:], before[high:])
    certain = np.ones(nbytes, bool)  # of the source: outside the target
    certain[max(0, distance) : max(0, min(nbytes, nbytes + distance))] = distance == 0
    assert np.array_equal(memory.bytes[low:high][certain], before[start : start + nbytes][certain])


# --- memory of a GPU -------------------------------------------------------------------------------------------------

PLACES = ("host", "pinned", "far")


def place(ends: DeviceEnds, where: str, nbytes: int, fill: int | None = None, ordinal: int = 0) -> Any:
    if where == "far":
        return ends.device(0, nbytes, fill, ordinal)
    return ends.host(0, nbytes, fill, where == "pinned")


@pytest.mark.parametrize("names", [("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_between_all_places(names, eager):
    """Host memory, pinned or not, and that of two GPUs. Each pair of copies is a chain: there, and back."""
    with device_ends(*names, gpus=FakeGpus(2, eager=eager), memcpy=True) as ends:
        nbytes = 3 * MIB + 5
        for source, target in itertools.product(PLACES, PLACES):
            here, there = place(ends, source, nbytes, 3), place(ends, target, nbytes, ordinal=1)
            back = place(ends, source, nbytes)
            copy(ends.a, here.at(2, nbytes - 2), there.at(1, nbytes - 2))
            copy(ends.a, there.at(1, nbytes - 2), back.at(0, nbytes - 2))
            ends.a.ring()
            assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ], (source, target)
            assert np.array_equal(there.bytes[1:-1], here.bytes[2:]), (source, target)
            assert np.array_equal(back.bytes[:-2], here.bytes[2:]), (source, target)
            assert there.bytes[0] == there.bytes[-1] == 0
            assert not there.whole[: there.start].any()


def test_copies_by_one_stream_are_in_flight_together():
    """The fake GPU ends a copy after several queries. All begin before the first has ended, and complete in order."""
    with device_ends("soft0", gpus=FakeGpus(delay=1000), memcpy=True) as ends:
        here, there = place(ends, "pinned", 32 * KIB, 5), place(ends, "far", 32 * KIB)
        for i in range(16):
            copy(ends.a, here.at(i * KIB, KIB), there.at(i * 2 * KIB, KIB))
        pause(ends.a)
        ends.a.ring()
        ends.a.nic.resume()
        assert ends.a.done.next().counter == 0
        assert int(ends.a.row["sq_next"]) == 16
        assert [cqe.counter for cqe in ends.a.done.take(15)] == list(range(1, 16))
        for i in range(16):
            assert np.array_equal(there.bytes[i * 2 * KIB :][:KIB], here.bytes[i * KIB :][:KIB])


def test_a_refusal_behind_copies_on_their_way():
    """Those before it complete, in order; it fails; those behind it are flushed."""
    with device_ends("soft0", memcpy=True) as ends:
        here, there = ends.device(0, KIB, 1), ends.device(0, KIB)
        stream = ends.gpus.streams[0].row
        stream["copy_error"], stream["copies_left"] = LAUNCH_FAILURE, 3
        for _ in range(6):
            copy(ends.a, here.at(), there.at())
        ends.a.ring()
        cqes = ends.a.done.take(6)
        assert [error_of(cqe)[1] if cqe.opcode != REQ else REQ for cqe in cqes] == [
            REQ, REQ, REQ, Reason.COPY_FAILED, Reason.FLUSH, Reason.FLUSH
        ]
