"""The software NIC over time: pausing, closing in the middle of traffic, and several NICs."""

import errno
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpunetio import memory, verbs
from gpunetio.enums import QpState
from gpunetio.errors import BadStateError
from gpunetio.nic import nic
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.reasons import Reason
from gpunetio.providers.soft import SoftProvider
from nic_rig import (
    ALWAYS,
    FA,
    FLUSHED,
    LOCAL_PROT,
    NOP,
    ON_ERROR,
    READ,
    REMOTE_ACCESS,
    REQ,
    RETRY_EXCEEDED,
    RINGS,
    SEND,
    SIZE,
    WRITE,
    Buffer,
    Ends,
    Queue,
    atomic,
    connect,
    error_of,
    pause,
    until,
)


def test_pause_and_resume(ends):
    pause(ends.a)
    ends.write()
    ends.a.ring()
    assert ends.a.done.none_for()
    assert not ends.there.bytes.any()
    assert ends.a.qp.state == QpState.RTS  # commands are served
    ends.a.nic.resume()
    assert ends.a.done.next().opcode == REQ
    assert ends.written()


@pytest.mark.parametrize("count", [1, 3, 7])
def test_pause_after(ends, count):
    """The NIC stands still after exactly so many WQEs."""
    ends.a.nic.pause(after=count)
    for _ in range(10):
        ends.write()
    ends.a.ring()
    assert [cqe.counter for cqe in ends.a.done.take(count)] == list(range(count))
    assert ends.a.done.none_for()
    ends.a.nic.resume()
    assert [cqe.counter for cqe in ends.a.done.take(10 - count)] == list(range(count, 10))


@pytest.mark.parametrize("ends", [("soft0", "soft1")], indirect=True, ids=["wire"])
def test_paused_responder(ends):
    """While the peer's NIC stands still nothing arrives; when it goes on, everything does."""
    pause(ends.b)
    for _ in range(5):
        ends.write()
    ends.a.ring()
    assert ends.a.done.none_for()
    assert not ends.there.bytes.any()
    ends.b.nic.resume()
    assert [cqe.opcode for cqe in ends.a.done.take(5)] == [REQ] * 5
    assert ends.written()


RING = 64  # WQEs that the ring of a test queue holds
BIG = 4 << 20  # bytes of a write that takes a while


def big_traffic(ends: Ends) -> tuple[Buffer, Buffer]:
    """Memory, and a ring full of large writes from one to the other, not rung yet."""
    here, there = Buffer(ends.a.qp.pd, BIG, fill=1), Buffer(ends.b.qp.pd, BIG)
    for _ in range(RING):
        ends.a.put(WRITE, there.remote(), here.at())
    return here, there


def stays(memory: np.ndarray, seconds: float = 0.03) -> bool:
    """Whether memory that is cleared now stays clear."""
    memory[:] = 0
    time.sleep(seconds)
    return not memory.any()


@pytest.mark.parametrize("end", ["a", "b"])
@pytest.mark.parametrize("how", ["close", "reset", "to_error"])
def test_closing_a_qp_while_traffic_runs(ends, how, end):
    """Once the QP is closed, reset or in ERR, its requests touch no memory: neither the sender's nor the receiver's.

    What a sender has put on a wire by then still arrives.
    """
    here, there = big_traffic(ends)
    ends.a.ring()
    until(lambda: there.bytes[-1], "the first write")
    qp = getattr(ends, end).qp
    getattr(qp, how)()
    here.bytes[:] = 0xFF
    if ends.wired and end == "a":
        until(lambda: stays(there.bytes) or (there.bytes.reshape(-1, 64) == 0xFF).all(1).any(), "an empty wire")
        ends.b.nic.engine.synchronize()  # it may have been off its core all the while
        until(lambda: stays(there.bytes) or (there.bytes.reshape(-1, 64) == 0xFF).all(1).any(), "an empty wire")
    assert stays(there.bytes)


@pytest.mark.parametrize("which", ["source", "target"])
def test_deregistering_while_traffic_runs(ends, which):
    """The region is closed in the middle of traffic: that ends with an error, and nothing is touched any more."""
    here, there = big_traffic(ends)
    ends.a.ring()
    until(lambda: there.bytes[-1], "the first write")
    if which == "source":
        here.mr.close()
        here.bytes[:] = 0xFF  # must not arrive
    else:
        there.mr.close()
        assert stays(there.bytes)
    cqes = ends.a.done.take(RING)
    if which == "source":
        assert not np.array_equal(there.bytes[-64:], here.bytes[-64:])
    failed = [error_of(cqe) for cqe in cqes if cqe.opcode != REQ]
    if failed:  # unless all was over by then
        if which == "source":
            assert failed[0] == (LOCAL_PROT, Reason.LKEY_UNKNOWN)
        else:
            ends.refused(next(cqe for cqe in cqes if cqe.opcode != REQ), REMOTE_ACCESS, Reason.RKEY_UNKNOWN)
        assert set(failed[1:]) <= {(FLUSHED, Reason.FLUSH)}


def test_deregistering_while_the_nic_stands_still(ends):
    """The same, certainly in the middle."""
    _, there = big_traffic(ends)
    ends.a.nic.pause(after=3)
    ends.a.ring()
    assert [cqe.opcode for cqe in ends.a.done.take(3)] == [REQ] * 3
    there.mr.close()
    there.bytes[:] = 0
    ends.a.nic.resume()
    cqes = ends.a.done.take(RING - 3)
    ends.refused(cqes[0], REMOTE_ACCESS, Reason.RKEY_UNKNOWN)
    assert {error_of(cqe) for cqe in cqes[1:]} == {(FLUSHED, Reason.FLUSH)}
    assert not there.bytes.any()


def test_closing_the_context_while_traffic_runs(ends):
    _, there = big_traffic(ends)
    ends.a.ring()
    until(lambda: there.bytes[-1], "the first write")
    ends.a.qp.ctx.close()
    assert stays(there.bytes)


@pytest.mark.parametrize("paused", [False, True])
def test_peer_closes_in_the_middle(paused):
    """Two NICs: the peer's whole NIC goes away. The sender's retries are exceeded, and nothing hangs."""
    ends = Ends.open("soft0", "soft1")
    _, there = big_traffic(ends)
    if paused:
        pause(ends.b)
    ends.a.ring()
    if not paused:
        until(lambda: there.bytes[-1], "the first write")
    start = time.monotonic()
    ends.b.qp.ctx.close()
    assert time.monotonic() - start < 5
    cqes = ends.a.done.take(RING)
    failed = [error_of(cqe) for cqe in cqes if cqe.opcode != REQ]
    if failed:
        assert failed[0][0] in (RETRY_EXCEEDED, REMOTE_ACCESS)
        assert set(failed[1:]) <= {(FLUSHED, Reason.FLUSH)}
    assert stays(there.bytes)
    # Whoever posts now learns it too; and the NIC that is left still works.
    ends.a.reset()
    ends.a.qp.connect(ends.a.qp)
    ends.a.post(NOP)
    assert ends.a.done.next().opcode == REQ
    start = time.monotonic()
    ends.a.qp.ctx.close()
    assert time.monotonic() - start < 5


def test_requests_to_a_nic_that_is_gone():
    ends = Ends.open("soft0", "soft1")
    ends.b.qp.ctx.close()
    ends.write()
    ends.a.ring()
    assert error_of(ends.a.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
    ends.a.qp.ctx.close()


def test_both_directions_of_a_wire_at_once(ends):
    """Both ends send at the same time, far more than a wire holds."""
    pairs = [(ends.a, ends.here, ends.there), (ends.b, ends.there, ends.here)]
    for round_ in range(20):
        for queue, source, target in pairs:
            half = SIZE // 2
            offset = 0 if queue is ends.a else half
            for i in range(60):
                ce = ALWAYS if i == 59 else ON_ERROR
                queue.put(WRITE, target.remote(offset + i), source.at(offset + i, 4), ce=ce)
        for queue, _, _ in pairs:
            queue.ring(RINGS[round_ % 3])
        for queue, _, _ in pairs:
            assert queue.done.next().counter == (60 * round_ + 59) & 0xFFFF


def test_many_qps_over_one_wire(ends):
    """Queues do not disturb each other's order."""
    pairs = [(Queue(ends.a.qp.pd), Queue(ends.b.qp.pd)) for _ in range(8)]
    for a, b in pairs:
        connect(a, b)
    for round_ in range(10):
        for k, (a, _) in enumerate(pairs):
            for i in range(30):
                a.put(FA, ends.there.remote(8 * k), atomic(1), ends.here.at(8 * (30 * k + i), 8))
            a.ring(RINGS[round_ % 3])
        for a, _ in pairs:
            assert [cqe.opcode for cqe in a.done.take(30)] == [REQ] * 30
    for k in range(len(pairs)):
        assert ends.there.word(8 * k) == 300
        assert [ends.here.word(8 * (30 * k + i)) for i in range(30)] == list(range(270, 300))


def test_third_nic(one):
    """Wires join every two NICs of a process."""
    with verbs.open("soft1") as ctx1, verbs.open("soft2") as ctx2:
        queues = [one.a, *(Queue(ctx.create_pd()) for ctx in (ctx1, ctx2))]
        buffers = [one.here, *(Buffer(queue.qp.pd, SIZE) for queue in queues[1:])]
        one.a.reset()
        for source, target in ((0, 1), (1, 2), (2, 0)):
            a, b = queues[source], queues[target]
            connect(a, b)
            expected = buffers[source].bytes.copy()
            a.post(WRITE, buffers[target].remote(), buffers[source].at())
            assert a.done.next().opcode == REQ
            assert np.array_equal(buffers[target].bytes, expected)
            a.reset()
            b.reset()


def counted(nic: SoftNic, before: dict[str, int] | None = None) -> dict[str, int]:
    """What the counters of a NIC say, or how much they have grown since `before`."""
    nic.engine.synchronize()
    values = dict(nic.counters)
    return {name: n - before[name] for name, n in values.items() if n != before[name]} if before else values


def one_of_each(ends: Ends) -> None:
    """WRITE, READ, SEND and an atomic, one after the other."""
    ends.b.receive(ends.there.at())
    for opcode in (WRITE, READ):
        ends.a.post(opcode, ends.there.remote(), ends.here.at(0, 100))
        assert ends.a.done.next().opcode == REQ
    ends.a.post(SEND, ends.here.at(0, 50))
    assert ends.a.done.next().opcode == REQ
    ends.a.post(FA, ends.there.remote(), atomic(1), ends.here.at(0, 8))
    assert ends.a.done.next().opcode == REQ


def test_counters(one):
    before = counted(one.a.nic)
    one_of_each(one)
    assert counted(one.a.nic, before) == {
        "rx_write_requests": 1, "rx_read_requests": 1, "rx_atomic_requests": 1, "sq_wqes": 4, "cqes": 5,
        "rdma_tx_bytes": 258, "rdma_rx_bytes": 258,
    }


@pytest.mark.parametrize("ends", [("soft0", "soft1")], indirect=True, ids=["wire"])
def test_counters_across_a_wire(ends):
    """Each side counts the packets and the payload that it sends and gets: a WRITE, a SEND, and a READ's response."""
    here, there = counted(ends.a.nic), counted(ends.b.nic)
    one_of_each(ends)
    assert counted(ends.a.nic, here) == {
        "sq_wqes": 4, "cqes": 4, "rdma_tx_packets": 4, "rdma_tx_bytes": 150, "rdma_rx_packets": 4,
        "rdma_rx_bytes": 100, "rx_accepted": 4,
    }
    assert counted(ends.b.nic, there) == {
        "rx_write_requests": 1, "rx_read_requests": 1, "rx_atomic_requests": 1, "cqes": 1, "rdma_rx_packets": 4,
        "rdma_rx_bytes": 150, "rdma_tx_packets": 4, "rdma_tx_bytes": 100, "rx_accepted": 4,
    }


def test_a_kernel_may_end_after_its_nic_has_closed():
    """Whoever ends tells the engines that there were at its launch; one that is gone by then is no error."""
    with verbs.open("soft6") as ctx:
        provider = ctx.provider
        assert isinstance(provider, SoftProvider)
        engine = provider.nic.engine
        engine.count_kernels(+1)
    engine.count_kernels(-1)
    engine.kick()


def test_a_call_that_waits_while_the_nic_closes():
    """It finds the NIC closed when it has the lock, and touches no memory that is gone."""
    waits, closed = threading.Event(), threading.Event()
    with verbs.open("soft6") as ctx, ThreadPoolExecutor(1) as pool:
        nic = ctx.provider.nic
        lock, caller = nic._lock, pool.submit(threading.get_ident).result()

        class Contended:
            def __enter__(self):
                if threading.get_ident() == caller:
                    waits.set()
                    assert closed.wait(20)
                return lock.__enter__()

            def __exit__(self, *exc):
                lock.__exit__(*exc)

        nic._lock = Contended()
        call = pool.submit(nic.alloc_pd)
        assert waits.wait(20)
        ctx.close()
        closed.set()
        with pytest.raises(BadStateError, match="soft6 is closed"):
            call.result()


def test_two_nics_that_close_at_the_same_time(monkeypatch):
    with verbs.open("soft5") as one, verbs.open("soft6") as other:
        nic, peer = one.provider.nic, other.provider.nic
        peers = nic.links.peers()
        assert peers == [peer]
        other.close()
        monkeypatch.setattr(nic.links, "peers", lambda: peers)  # as they were a moment ago


def test_opening_that_fails_leaves_nothing_behind(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(memory._live)

    with verbs.open("soft5"):
        pass
    before = count()
    with monkeypatch.context() as patch:
        patch.setattr(nic, "ControlSocket", fail)
        with pytest.raises(OSError, match="no free file descriptor"):
            verbs.open("soft5")
    assert count() == before
    with verbs.open("soft5"):
        pass
