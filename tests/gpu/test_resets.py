"""Resets of exported queues: the NIC's completions go on where WQEs are counted from 0 again."""

import ctypes
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import ExportedQp, Gpu, MemType, device, verbs
from gpunetio.enums import RingMemory
from gpunetio.errors import BadStateError
from gpunetio.formats.cqe import CQE64, INIT_OP_OWN, Syndrome
from gpunetio.formats.doorbell import PI_MASK
from gpunetio.gpu.completions import Completions
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.gpu.spans import Span
from nic_rig import until
from pair import Pair, make_pair
from queue_kernels import count_when_complete, puts

DEPTH = 8
NO_KEY = 0  # no region has it


# --- the ring alone --------------------------------------------------------------------------------------------------


class Ring:
    """A CQ as the NIC writes it: one CQE after the other, the owner bit changing with each lap."""

    def __init__(self, entries: int, collapsed: bool, lies_in: RingMemory):
        self.cqes = np.zeros(entries, CQE64.dtype)
        self.cqes["op_own"] = INIT_OP_OWN
        self.total = 0
        self.cq: Any = SimpleNamespace(entries=entries, collapsed=collapsed)
        span = Span(HostBackend(), int(self.cqes.ctypes.data), self.cqes.nbytes, lies_in)
        self.completions = Completions(self.cq, span)

    def complete(self, first: int, count: int) -> None:
        """WQEs `first` … complete; only what a lap leaves behind is written."""
        entries = self.cq.entries
        for i in range(max(0, count - entries), count):
            at = self.total + i
            cqe = self.cqes[0 if self.cq.collapsed else at % entries]
            cqe["wqe_counter"], cqe["op_own"] = (first + i) & PI_MASK, at // entries & 1
        self.total += count


lives = st.lists(st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 1 << 20)), st.integers(0, 16)), max_size=12)


@given(st.integers(0, 4).map(lambda log: 1 << log), st.booleans(), lives, st.sampled_from(RingMemory))
def test_the_count_of_completions_is_told_by_the_ring(entries, collapsed, lives, lies_in):
    """Through any number of lives of a queue: so many WQEs, of which the last few were not known to be complete."""
    ring = Ring(entries, collapsed, lies_in)
    before = 0
    for count, unknown in lives:
        ring.complete(0, count)
        least = max(0, count - min(unknown, entries))
        assert before + ring.completions.produced(before, least) == ring.total
        for index in () if collapsed else range(max(0, count - entries), count + 2):
            assert ring.completions.is_complete(before, index) == (index < count)
        before = ring.total
        ring.completions.forget()


# --- the queue -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def reused(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair for all examples, so that its CQs go on."""
    logger = logging.getLogger("gpunetio.nic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # of what fails on purpose
    with Gpu(request.param) as gpu, verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu, DEPTH)
        yield pair
        pair.a.close()
        pair.b.close()
    logger.setLevel(level)


def begin_anew(pair: Pair) -> None:
    for end in (pair.a, pair.b):
        end.qp.reset()
        end.reset()
    pair.a.connect(pair.b)


def written(pair: Pair, queue: ExportedQp) -> int:
    """What the NIC itself says."""
    return int(pair.nic.cqs[queue.cq.cqn]["pi"])


WAYS = ("waited", "left alone", "failed")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5 * DEPTH), st.sampled_from(WAYS)), min_size=1, max_size=6))
def test_many_resets(reused, lives):
    """Whatever a queue has done before, its next life begins at 0, and finds its own completions."""
    pair = reused
    begin_anew(pair)
    for count, way in lives:
        before = written(pair, pair.a)
        assert pair.a.cqe_offset() == before
        if way != "waited":  # nobody polls: the ring bounds what may be posted
            count = min(count, DEPTH)
        pair.there.array[:] = 0
        if way == "failed":
            with pair.gpu.alloc(64) as out:
                args = (pair.there.address, NO_KEY, pair.here.address, pair.here_mr.lkey, 16, count, 0, out)
                assert puts[1, 1, pair.gpu](pair.a, *args).wait(60)
        else:
            assert pair.run(puts, 16, count, int(way == "waited"))[0] == device.OK
        until(lambda before=before, count=count: written(pair, pair.a) == before + count, "the NIC")
        arrived = 0 if way == "failed" else 16 * count
        assert np.array_equal(pair.there.array[:arrived], pair.here.array[:arrived])
        assert not pair.there.array[arrived:].any()
        if way == "failed" and count:
            error = pair.a.last_error()
            assert error is not None
            assert (error.index, error.syndrome) == (0, Syndrome.REMOTE_ACCESS)
        begin_anew(pair)
        assert pair.a.last_error() is None
        assert set(pair.a.indices().values()) == {0}
    assert pair.run(puts, 16, DEPTH + 1, 1)[0] == device.OK


@pytest.mark.host_memory
def test_a_reset_takes_errors_and_old_requests_away(reused, caplog):
    pair = reused
    caplog.set_level("CRITICAL", "gpunetio")
    assert pair.run(puts, 1 << 30, 1, 1)[0] == device.EIO
    assert pair.a.last_error() is not None
    with pytest.raises(BadStateError, match=r"is in ERR: move it to RST first, with QP.reset\(\)"):
        pair.a.reset()
    begin_anew(pair)
    assert pair.a.last_error() is None
    ring = (ctypes.c_uint8 * (DEPTH * 64)).from_address(pair.a.qp.sq_address)
    assert not any(ring)
    assert pair.run(puts, 16, 1, 1)[0] == device.OK


def test_a_collapsed_ring_forgets_its_last_completion(gpu):
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        a, b = (gpu.create_qp(pd, DEPTH, cq_collapsed=True) for _ in range(2))
        memory = gpu.alloc(4096, MemType.CPU_GPU)
        mr = pd.register(memory)
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        cqs = nic.cqs
        a.connect(b)
        total = 0
        for count in (1, DEPTH, 0, 3, 2 * DEPTH):
            with gpu.alloc(64) as out:
                for done in range(0, count, DEPTH):
                    part = min(DEPTH, count - done)
                    args = (memory.address, mr.rkey, memory.address, mr.lkey, 8, part, 0, out)
                    assert puts[1, 1, gpu](a, *args).wait(60)
                    total += part
                    until(lambda: int(cqs[a.cq.cqn]["pi"]) == total, "the NIC")  # noqa: B023
            for end in (a, b):
                end.qp.reset()
                end.reset()
            assert a.cqe_offset() == total
            assert a.sends.produced(total, 0) == 0
            a.connect(b)
        a.close()
        b.close()


def test_the_offset_is_what_a_wait_request_needs(gpu):
    """A companion counts what the main queue completes, also after resets of the main queue alone."""
    beside = Gpu(gpu.name)  # kernels of one handle run one after the other
    with verbs.open("soft0") as ctx, beside, gpu.create_qp_group(ctx.create_pd(), DEPTH) as group:
        pd = group.main.qp.pd
        peers = [gpu.create_qp(pd, DEPTH) for _ in range(2)]
        memory = gpu.alloc(4096, MemType.CPU_GPU)
        mr = pd.register(memory)
        counter = memory.array[2048:2056].view(np.int64)
        keys = (memory.address, mr.rkey, memory.address + 1024, mr.lkey)
        group.main.connect(peers[0])
        group.companion.connect(peers[1])
        for life, count in enumerate((1, 2 * DEPTH + 3, 5, DEPTH)):
            number = group.main.cqe_offset() + count - 1  # of the last one, which is not posted yet
            with gpu.alloc(64, MemType.CPU_GPU) as done, gpu.alloc(64, MemType.CPU_GPU) as out:
                waiting = count_when_complete[1, 1, gpu](
                    group.companion, group.main.cq.cqn, number, memory.address + 2048, mr.rkey,
                    memory.address + 3072, mr.lkey, done,
                )
                if count > 1:
                    assert puts[1, 1, beside](group.main, *keys, 8, count - 1, 1, out).wait(60)
                assert not waiting.wait(0.02)
                assert counter[0] == life
                assert puts[1, 1, beside](group.main, *keys, 8, 1, 1, out).wait(60)
                assert waiting.wait(60)
                assert done.array.view(np.int64)[0] == device.OK
            assert counter[0] == life + 1
            for end in (group.main, peers[0]):
                end.qp.reset()
                end.reset()
            group.main.connect(peers[0])
        for peer in peers:
            peer.close()
