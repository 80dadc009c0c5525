"""Payload in memory that the engine cannot touch, inside one NIC: order, completion, errors, and taking memory away.

The GPUs are fake ones (fake_gpu.py): an engine that loads from or stores to their memory by itself dies, and with it
the tests.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fake_gpu import LAUNCH_FAILURE, DeviceEnds, FakeGpus, device_ends
from gpunetio.enums import Access
from gpunetio.errors import InvalidValueError, NotSupportedError
from gpunetio.nic.memory.cuda_driver import cuda_driver
from gpunetio.nic.memory.streams import STAGING
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    ALWAYS,
    CS,
    FA,
    FLUSHED,
    LOCAL_QP_OP,
    NOP,
    ON_ERROR,
    READ,
    REMOTE_INVALID,
    REQ,
    REQ_ERR,
    RESP_SEND,
    RESP_SEND_IMM,
    RESP_WRITE_IMM,
    SEND,
    SEND_IMM,
    WRITE,
    WRITE_IMM,
    Queue,
    atomic,
    connect,
    data,
    error_of,
    inline,
    pause,
    reports_of,
    until,
)

KIB, MIB = 1 << 10, 1 << 20
PLACES = ("host", "pinned", "far")


@pytest.fixture(params=[False, True], ids=["lazy", "eager"])
def one(request: pytest.FixtureRequest) -> Iterator[DeviceEnds]:
    """One NIC, with a GPU that carries copies out as late or as early as it may."""
    with device_ends("soft0", gpus=FakeGpus(eager=request.param)) as ends:
        yield ends


@pytest.fixture(params=[("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
def ends(request: pytest.FixtureRequest) -> Iterator[DeviceEnds]:
    with device_ends(*request.param) as ends:
        yield ends


def memory(ends: DeviceEnds, place: str, side: int, nbytes: int, fill: int | None = None) -> Any:
    return ends.device(side, nbytes, fill) if place == "far" else ends.host(side, nbytes, fill, place == "pinned")


def stream(ends: DeviceEnds) -> Any:
    return ends.gpus.streams[0].row


# --- bytes arrive ----------------------------------------------------------------------------------------------------


def test_every_operation_between_all_places(ends):
    for source, target in itertools.product(PLACES, PLACES):
        every_operation(ends, source, target)
    assert not list(ends.a.nic.reports)


def every_operation(ends: DeviceEnds, source: str, target: str) -> None:
    nbytes = 3 * KIB + 5
    here, there = memory(ends, source, 0, nbytes, 3), memory(ends, target, 1, nbytes)
    ends.a.post(WRITE, there.remote(1), here.at(2, nbytes - 2))
    assert ends.a.done.next()[0] == REQ
    assert np.array_equal(there.bytes[1:-1], here.bytes[2:])
    assert there.bytes[0] == there.bytes[-1] == 0
    there.bytes[:] = np.arange(nbytes) * 11
    ends.a.post(READ, there.remote(), here.at())
    assert ends.a.done.next().byte_cnt == nbytes
    assert np.array_equal(there.bytes, here.bytes)
    here.bytes[:] = np.arange(nbytes) * 13
    ends.b.receive(there.at())
    ends.a.post(SEND_IMM, here.at(), imm=77)
    assert ends.a.done.next().opcode == REQ
    arrived = ends.b.arrived.next()
    assert (arrived.opcode, arrived.byte_cnt, arrived.imm) == (RESP_SEND_IMM, nbytes, 77)
    assert np.array_equal(there.bytes, here.bytes)
    here.bytes[:] = np.arange(nbytes) * 17
    ends.b.receive(data(0, 0, 0))
    ends.a.post(WRITE_IMM, there.remote(), here.at(), imm=5)
    assert ends.a.done.next().opcode == REQ
    assert ends.b.arrived.next().opcode == RESP_WRITE_IMM
    assert np.array_equal(there.bytes, here.bytes)
    there.bytes[:] = 0
    assert not there.whole.any()


def test_segments_of_all_places_in_one_message(ends):
    parts = [memory(ends, place, 0, 1000, i + 1) for i, place in enumerate((*PLACES, *PLACES))]
    there = ends.device(1, 6000)
    ends.a.post(WRITE, there.remote(), *(part.at(7, 900) for part in parts))
    assert ends.a.done.next().opcode == REQ
    sent = np.concatenate([part.bytes[7:907] for part in parts])
    assert np.array_equal(there.bytes[:5400], sent)
    there.bytes[:] = np.arange(6000) * 3
    ends.a.post(READ, there.remote(11), *(part.at(3, 800) for part in parts))
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(np.concatenate([part.bytes[3:803] for part in parts]), there.bytes[11 : 11 + 4800])
    inbox = [memory(ends, place, 1, 2000) for place in ("far", "host", "far", "pinned")]
    ends.b.receive(*(part.at(0, 1300) for part in inbox))
    ends.a.post(SEND, *(part.at(0, 850) for part in parts))
    assert ends.b.arrived.next().opcode == RESP_SEND
    got = np.concatenate([part.bytes[:1300] for part in inbox])
    assert np.array_equal(got[:5100], np.concatenate([part.bytes[:850] for part in parts]))


def test_more_than_the_staging_ring_holds(ends):
    for source, target in (("host", "far"), ("far", "host"), ("far", "far"), ("far", "pinned")):
        much(ends, source, target)


def much(ends: DeviceEnds, source: str, target: str) -> None:
    nbytes = 2 * STAGING + 3 * MIB + 77
    here, there = memory(ends, source, 0, nbytes), memory(ends, target, 1, nbytes)
    here.bytes[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    ends.a.post(WRITE, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(here.bytes, there.bytes)
    there.bytes[:] = there.bytes[::-1].copy()
    ends.a.post(READ, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(here.bytes, there.bytes)


def test_two_gpus_in_one_message_and_between_them():
    with device_ends("soft0", gpus=FakeGpus(2)) as ends:
        ends.gpus.world["one_thread"] = 1
        first, second, target = ends.device(0, 5000, 1, 0), ends.device(0, 5000, 2, 1), ends.device(1, 9000, ordinal=1)
        ends.a.post(WRITE, target.remote(), first.at(0, 4000), second.at(0, 4000))
        ends.a.post(WRITE, target.remote(8000), first.at(0, 500))
        ends.a.post(WRITE, first.remote(4000), second.at(0, 1000))
        ends.a.done.take(3)
        assert np.array_equal(target.bytes[:4000], first.bytes[:4000])
        assert np.array_equal(target.bytes[4000:8000], second.bytes[:4000])
        assert np.array_equal(target.bytes[8000:8500], first.bytes[:500])
        assert np.array_equal(first.bytes[4000:], second.bytes[:1000])
        assert len(ends.gpus.streams) == 2


def test_inline_data_and_what_an_atomic_returns(ends):
    there, word, old = ends.device(1, 64), ends.host(1, 64), ends.device(0, 64)
    ends.a.post(WRITE, there.remote(3), inline(b"inline, to a GPU"))
    assert ends.a.done.next().opcode == REQ
    assert there.bytes[3:19].tobytes() == b"inline, to a GPU"
    ends.b.receive(there.at(32, 8))
    ends.a.post(SEND, inline(b"a signal"))
    assert ends.b.arrived.next().opcode == RESP_SEND
    assert there.bytes[32:40].tobytes() == b"a signal"
    assert ends.a.done.next().opcode == REQ
    word.set_word(8, 40)
    ends.a.post(FA, word.remote(8), atomic(2), old.at(16, 8))
    ends.a.post(CS, word.remote(8), atomic(7, 42), old.at(24, 8))
    assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ]
    assert (old.word(16), old.word(24), word.word(8)) == (40, 42, 7)


def test_the_word_of_an_atomic_cannot_be_in_device_memory(ends):
    there, old = ends.device(1, 64), ends.host(0, 64)
    ends.a.post(FA, there.remote(), atomic(2), old.at(0, 8))
    syndrome, reason = error_of(ends.a.done.next())
    assert syndrome == REMOTE_INVALID
    assert reason == (Reason.ATOMIC_FAR if len(ends.contexts) == 1 else Reason.NAK_INVALID_REQUEST)
    report = next(report for report in reports_of(ends.b.nic, ends.b.qp.qpn) if report.responder)
    assert "GPU memory" in report.message
    assert not there.bytes.any()


def test_shifted_and_zero_based_regions(ends):
    there = ends.device(1, 4096, iova=(1 << 63) - 100)
    here = ends.device(0, 4096, 9, iova=0)
    ends.a.post(WRITE, there.remote(50), here.at(5, 1000))
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(there.bytes[50:1050], here.bytes[5:1005])


def test_a_window_that_fits_the_bounds_of_the_region_only(ends):
    there = ends.device(1, 4096)
    here = ends.host(0, 4096, 1)
    ends.a.post(WRITE, there.remote(4000), here.at(0, 97))
    assert ends.a.done.next().opcode == REQ_ERR
    assert not there.whole.any()


# --- batches and order -----------------------------------------------------------------------------------------------


def test_many_requests_are_given_to_the_gpu_before_the_first_is_done(one):
    here, there = one.device(0, 64 * KIB, 1), one.host(1, 64 * KIB, pinned=True)
    stream(one)["hangs"] = 1
    for i in range(32):
        one.a.put(WRITE, there.remote(i * KIB), here.at(i * KIB, KIB))
    one.a.ring()
    until(lambda: stream(one)["given"] == 32, "32 copies")
    assert one.a.done.none_for()
    assert stream(one)["recorded"] < 32
    stream(one)["hangs"] = 0
    assert [cqe.counter for cqe in one.a.done.take(32)] == list(range(32))
    assert np.array_equal(there.bytes[: 32 * KIB], here.bytes[: 32 * KIB])


def test_each_request_is_counted_once(one):
    here, there = one.device(0, KIB, 1), one.device(1, KIB)
    before = int(one.a.nic.counters["sq_wqes"])
    one.a.nic.pause(after=4)
    for _ in range(10):
        one.a.put(WRITE, there.remote(), here.at())
    one.a.ring()
    until(lambda: one.a.nic.record["paused"], "the NIC to stand still")
    assert int(one.a.nic.counters["sq_wqes"]) - before == 4
    assert len(one.a.done.take(4)) == 4
    assert one.a.done.none_for()
    one.a.nic.resume()
    one.a.done.take(6)
    one.a.nic.engine.synchronize()
    assert int(one.a.nic.counters["sq_wqes"]) - before == 10


def flag_by_write(ends: DeviceEnds, flag: Any, source: Any) -> None:
    ends.a.put(WRITE, flag.remote(), source.at(0, 8))


def flag_by_atomic(ends: DeviceEnds, flag: Any, source: Any) -> None:
    old = ends.host(0, 8)
    ends.a.put(FA, flag.remote(), atomic(1), old.at())


def flag_by_inline(ends: DeviceEnds, flag: Any, source: Any) -> None:
    ends.a.put(WRITE, flag.remote(), inline(b"\1" * 8))


def flag_by_send(ends: DeviceEnds, flag: Any, source: Any) -> None:
    ends.b.receive(flag.at(0, 8))
    ends.a.put(SEND, source.at(0, 8))


@pytest.mark.parametrize("raise_flag", [flag_by_write, flag_by_atomic, flag_by_inline, flag_by_send])
def test_the_flag_does_not_show_before_the_payload(one, raise_flag):
    """While no event occurs: where the flag is seen the payload is, too."""
    for payload, flag, source in itertools.product(PLACES, PLACES, ("host", "far")):
        if flag != "far" or raise_flag is not flag_by_atomic:  # whose words are in host memory
            flag_behind_payload(one, raise_flag, payload, flag, source)


def flag_behind_payload(one: DeviceEnds, raise_flag: Any, payload_place: str, flag_place: str, flag_from: str) -> None:
    here, source = one.device(0, 4096, 1), memory(one, flag_from, 0, 8, 1)
    payload, flag = memory(one, payload_place, 1, 4096), memory(one, flag_place, 1, 8)
    before = int(stream(one)["given"])
    stream(one)["hangs"] = 1
    one.a.put(WRITE, payload.remote(), here.at())
    raise_flag(one, flag, source)
    one.a.ring()
    until(lambda: stream(one)["given"] != before, "the payload's copy")
    time.sleep(0.002)
    if flag.bytes.any():
        assert np.array_equal(payload.bytes, here.bytes)
    assert one.a.done.poll() is None
    stream(one)["hangs"] = 0
    assert [cqe.opcode for cqe in one.a.done.take(2)] == [REQ, REQ]
    assert flag.bytes.any()
    assert np.array_equal(payload.bytes, here.bytes)


def test_completions_are_in_order_whatever_is_behind(one):
    here, there, host = one.device(0, KIB, 1), one.device(1, KIB), one.host(0, KIB, 2)
    near = one.host(1, KIB)
    one.a.put(WRITE, there.remote(), here.at(), ce=ON_ERROR)
    one.a.put(NOP)
    one.a.put(WRITE, near.remote(), host.at())
    one.a.put(READ, there.remote(), host.at(), ce=ALWAYS)
    one.a.put(WRITE, near.remote(), host.at(), junk=0x20)  # with a fence
    one.a.ring()
    assert [cqe.counter for cqe in one.a.done.take(4)] == [1, 2, 3, 4]
    assert np.array_equal(near.bytes, here.bytes)


def test_sends_fill_receives_in_order(one):
    here, there = one.device(0, 16 * KIB, 5), one.device(1, 16 * KIB)
    for i in range(8):
        one.b.receive(there.at(i * KIB, KIB))
        one.a.put(SEND, here.at(i * KIB, 100 * i + 1), imm=i)
    one.a.ring()
    assert [cqe.byte_cnt for cqe in one.b.arrived.take(8)] == [100 * i + 1 for i in range(8)]
    assert [cqe.counter for cqe in one.a.done.take(8)] == list(range(8))
    for i in range(8):
        assert np.array_equal(there.bytes[i * KIB :][: 100 * i + 1], here.bytes[i * KIB :][: 100 * i + 1])


def test_other_queue_pairs_go_on_meanwhile(one):
    here, there = one.device(0, KIB, 1), one.device(1, KIB)
    with device_ends("soft0", gpus=one.gpus) as others:
        near, nearer = others.host(0, KIB, 1), others.host(1, KIB)
        stream(one)["hangs"] = 1
        one.a.post(WRITE, there.remote(), here.at())
        until(lambda: stream(one)["given"], "the copy")
        others.a.post(WRITE, nearer.remote(), near.at())
        assert others.a.done.next().opcode == REQ
        assert one.a.done.poll() is None
        stream(one)["hangs"] = 0
        assert one.a.done.next().opcode == REQ


# --- taking away what is in use --------------------------------------------------------------------------------------


def soon(action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(0.05, action)
    timer.start()
    return timer


@pytest.mark.parametrize("how", ["dereg source", "dereg target", "error", "reset", "destroy", "error of the peer"])
@pytest.mark.parametrize("operation", [WRITE, SEND])
def test_commands_wait_for_what_is_on_its_way(one, how, operation):
    here, there = one.device(0, KIB, 1), one.host(1, KIB)
    row = stream(one)
    row["hangs"] = 1
    one.b.receive(there.at())
    one.a.post(operation, *([there.remote()] if operation == WRITE else []), here.at())
    until(lambda: row["given"], "the copy")
    timer = soon(lambda: row.__setitem__("hangs", 0))
    {
        "dereg source": here.mr.close, "dereg target": there.mr.close, "error": one.a.qp.to_error,
        "reset": one.a.qp.reset, "destroy": one.a.qp.close, "error of the peer": one.b.qp.to_error,
    }[how]()
    assert row["hangs"] == 0
    timer.join()
    image = there.bytes.copy()
    assert row["done"] == row["given"]
    time.sleep(0.002)
    assert np.array_equal(there.bytes, image)
    if how == "error":
        assert one.a.done.next().opcode == REQ
    if how.startswith("dereg"):
        assert one.a.done.next().opcode == REQ
        one.a.post(WRITE, there.remote(), here.at())
        assert one.a.done.next().opcode == REQ_ERR


def test_closing_the_nic_waits_no_longer_than_it_must():
    with device_ends("soft0") as ends:
        here, there = ends.device(0, KIB, 1), ends.host(1, KIB)
        stream(ends)["hangs"] = 1
        ends.a.post(WRITE, there.remote(), here.at())
        until(lambda: stream(ends)["given"], "the copy")
        soon(lambda: stream(ends).__setitem__("hangs", 0)).join()
    assert all(opened.closed for opened in ends.gpus.streams)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_copy_that_cuda_refuses(ends):
    here, there = ends.device(0, 64 * KIB, 1), ends.device(1, 64 * KIB)
    for row in (opened.row for opened in ends.gpus.streams):
        row["copy_error"] = LAUNCH_FAILURE
    ends.a.post(WRITE, there.remote(), here.at())
    ends.a.post(NOP)
    assert error_of(ends.a.done.next()) == (LOCAL_QP_OP, Reason.COPY_FAILED)
    assert error_of(ends.a.done.next())[0] == FLUSHED
    report = next(reports_of(ends.a.nic, ends.a.qp.qpn))
    assert "CUDA_ERROR_LAUNCH_FAILED (CUDA error 719)" in report.message
    for opened in ends.gpus.streams:
        opened.row["copy_error"] = 0
    ends.reconnect()
    ends.a.post(WRITE, there.remote(), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(here.bytes, there.bytes)


def test_a_refusal_behind_copies_on_their_way(one):
    """Those before it complete, in order; it fails; those behind it are flushed."""
    here, there = one.device(0, KIB, 1), one.device(1, KIB)
    stream(one)["copy_error"], stream(one)["copies_left"] = LAUNCH_FAILURE, 3
    for _ in range(6):
        one.a.put(WRITE, there.remote(), here.at())
    one.a.ring()
    cqes = one.a.done.take(6)
    assert [cqe.opcode for cqe in cqes] == [REQ] * 3 + [REQ_ERR] * 3
    assert [cqe.syndrome for cqe in cqes] == [0] * 3 + [LOCAL_QP_OP] + [FLUSHED] * 2


def test_all_copies_of_a_turn_fail(one):
    """Each failure gives up what was on its way: what the first one gave up has not arrived, whatever the second does.

    The bytes of one queue pair are given to the GPU when those of the next come.
    """
    here, there = one.host(0, KIB, 1), one.device(1, 8 * KIB)
    pairs = [(Queue(one.pds[0], 16, 0), Queue(one.pds[0], 16, 0)) for _ in range(6)]
    for i, (a, b) in enumerate(pairs):
        connect(a, b)
        a.put(WRITE, there.remote(i * KIB), here.at(0, 100))
    pause(one.a)
    for a, _ in pairs:
        a.ring()
    stream(one)["copies_left"], stream(one)["copy_error"] = 0, LAUNCH_FAILURE
    one.a.nic.resume()
    assert [error_of(a.done.next()) for a, _ in pairs] == [(LOCAL_QP_OP, Reason.COPY_FAILED)] * 6


def test_a_gpu_that_has_failed(ends):
    """What the events answer: the copies were begun, and nobody knows what became of them."""
    here, there = ends.device(0, KIB, 1), ends.device(1, KIB)
    for opened in ends.gpus.streams:
        opened.row["query_error"] = LAUNCH_FAILURE
    ends.a.post(WRITE, there.remote(), here.at())
    assert error_of(ends.a.done.next()) == (LOCAL_QP_OP, Reason.COPY_FAILED)
    assert "CUDA_ERROR_LAUNCH_FAILED" in next(reports_of(ends.a.nic, ends.a.qp.qpn)).message


def test_a_target_that_fails_across_a_wire():
    with device_ends("soft0", "soft1") as ends:
        here, there = ends.host(0, 64 * KIB, 1), ends.device(1, 64 * KIB)
        stream(ends)["query_error"] = LAUNCH_FAILURE
        ends.a.post(WRITE, there.remote(), here.at())
        assert error_of(ends.a.done.next())[1] == Reason.NAK_REMOTE_OPERATION
        report = next(reports_of(ends.b.nic, ends.b.qp.qpn))
        assert report.reason == Reason.COPY_FAILED
        assert report.responder


@pytest.mark.parametrize("operation", [WRITE, READ, SEND])
def test_a_gpu_that_does_not_answer_is_given_up_and_may_come_back(operation):
    with device_ends("soft0") as ends:
        ends.a.nic.device_memory.timeout_ns = 20_000_000
        here, there = ends.device(0, KIB, 1), ends.host(1, KIB, 2)
        before = there.bytes.copy()
        stream(ends)["hangs"] = 1
        ends.b.receive(there.at())
        ends.a.post(operation, *([] if operation == SEND else [there.remote()]), here.at())
        assert error_of(ends.a.done.next()) == (LOCAL_QP_OP, Reason.COPY_FAILED)
        assert "has not finished the copy within 0.02 s" in next(reports_of(ends.a.nic, ends.a.qp.qpn)).message
        ends.reconnect()  # commands do not wait for it
        ends.a.post(WRITE, there.remote(), here.at())
        assert error_of(ends.a.done.next()) == (LOCAL_QP_OP, Reason.COPY_FAILED)
        stream(ends)["hangs"] = 0
        until(lambda: stream(ends)["done"] == stream(ends)["given"], "the GPU to come back")
        until(lambda: not int(ends.a.nic.device_memory.rows[1]["stuck"]), "the NIC to notice")
        assert np.array_equal(there.bytes, before)  # what has failed does not land when the GPU comes back
        ends.reconnect()
        ends.a.post(WRITE, there.remote(), here.at())
        assert ends.a.done.next().opcode == REQ
        assert np.array_equal(here.bytes, there.bytes)


def test_memory_that_was_freed_under_its_region(one):
    here, there = one.device(0, KIB, 1), one.host(1, KIB)
    one.gpus.free(here.memory)
    one.a.post(WRITE, there.remote(), here.at())
    assert error_of(one.a.done.next()) == (LOCAL_QP_OP, Reason.COPY_FAILED)
    assert "CUDA_ERROR_INVALID_VALUE" in next(reports_of(one.a.nic, one.a.qp.qpn)).message


# --- registering -----------------------------------------------------------------------------------------------------


class _Range:
    def __init__(self, address: int, nbytes: int, is_cuda: bool):
        self.address, self.nbytes, self.is_cuda = address, nbytes, is_cuda


def test_ranges_that_are_nobodys(one):
    there = one.device(0, 4096)
    end = there.memory.address + there.memory.nbytes
    with pytest.raises(NotSupportedError, match="neither memory of this process's CPU nor"):
        one.pds[0].register(_Range(end - 100, 200, True), Access.all())
    with pytest.raises(InvalidValueError, match="not readable and writable memory"):
        one.pds[0].register(_Range(end - 100, 200, False), Access.all())


def test_gpu_memory_needs_no_word_from_its_owner(one):
    """The driver is asked what an address is, not the object."""
    there = one.device(0, 4096)
    region = one.pds[0].register(_Range(there.memory.address, 4096, False))
    near = one.host(0, 100, 1)
    one.a.post(WRITE, data(0, 0, 0)[:0] + there.remote(), near.at())
    assert one.a.done.next().opcode == REQ
    region.close()


@pytest.mark.skipif(cuda_driver() is not None, reason="there is a CUDA driver")
def test_without_a_driver_gpu_memory_is_refused():
    with device_ends("soft0") as ends:
        ends.a.nic.device_memory.driver = None
        memory = ends.gpus.alloc(4096)
        with pytest.raises(NotSupportedError, match="CUDA driver"):
            ends.pds[0].register(_Range(memory.address, 4096, True))
