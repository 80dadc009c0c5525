"""Threads of the program that make turns in the place of an engine's thread."""

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpunetio as gn
from gpunetio.nic import nic
from gpunetio.nic.host import helping
from gpunetio.nic.nic import SoftNic
from gpunetio.providers.soft import SoftProvider
from gpunetio.verbs import CQ, QP, Context, SendWr, Sge
from nic_rig import until

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]  # tests make turns on threads of their own

NBYTES = 1 << 16
NEVER_NS = 1 << 62


def nic_of(ctx: Context) -> SoftNic:
    assert isinstance(ctx.provider, SoftProvider)
    return ctx.provider.nic


@pytest.fixture
def ctx(monkeypatch) -> Iterator[Context]:
    """A NIC on a machine with few cores, whose programs poll."""
    monkeypatch.setattr(nic, "few_cores", lambda: True)
    with gn.open("soft0") as opened:
        nic_of(opened).expect_polling()
        yield opened


def help_out(worker: int, posted: int = 0) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(helping.address())(worker, posted)


class Loop:
    """A queue pair that is connected to itself, and two buffers."""

    cq: CQ
    qp: QP

    def __init__(self, ctx: Context):
        pd, self.cq = ctx.create_pd(), ctx.create_cq(64)
        self.qp = pd.create_qp(send_cq=self.cq, receive_cq=self.cq, sq_wr=32, rq_wr=1)
        self.qp.connect(self.qp)
        self.source, self.target = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
        self._mine, self._theirs = pd.register(self.source), pd.register(self.target)

    def write(self, at: int, nbytes: int) -> None:
        self.qp.post_send(SendWr(
            opcode=gn.WrOpcode.RDMA_WRITE, sges=[Sge(self._mine.address + at, nbytes, self._mine.lkey)],
            remote_addr=self._theirs.address + at, rkey=self._theirs.rkey,
        ))


def test_a_helper_does_the_work(ctx):
    """The engine's thread, which believes that others make the turns, leaves it to them."""
    record, loop = nic_of(ctx).record, Loop(ctx)
    loop.write(0, 8)
    until(lambda: loop.cq.poll(1), "the engine's own thread")
    loop.source[:] = 7
    record["helped_at"] = NEVER_NS
    nic_of(ctx).engine.kick()
    until(lambda: record["trust"] > record["nap_ns"] and not record["taken"], "the engine's thread to nap")
    loop.write(0, NBYTES)
    assert not loop.cq.poll(1)
    help_out(nic_of(ctx).to_help())
    assert [wc.status for wc in loop.cq.poll(1)] == [gn.WcStatus.SUCCESS]
    assert (loop.target == 7).all()
    assert (record["helper"], record["taken"]) == (0, 0)
    assert record["helped_at"] < NEVER_NS


def test_the_engine_goes_on_without_help(ctx):
    loop = Loop(ctx)
    help_out(nic_of(ctx).to_help())
    for at in range(0, NBYTES, NBYTES // 4):
        loop.write(at, NBYTES // 4)
        until(lambda: loop.cq.poll(1), "the engine's own thread")


def test_one_turn_at_a_time(ctx):
    """A helper that finds another thread in a turn makes none."""
    record, loop = nic_of(ctx).record, Loop(ctx)
    record["helped_at"] = NEVER_NS
    nic_of(ctx).engine.kick()
    until(lambda: not record["taken"] and record["trust"] > record["nap_ns"], "the engine's thread to nap")
    record["taken"] = 1
    loop.write(0, 8)
    help_out(nic_of(ctx).to_help())
    assert not loop.cq.poll(1)
    assert record["taken"] == 1
    record["taken"] = 0
    help_out(nic_of(ctx).to_help())
    assert loop.cq.poll(1)


def test_a_worker_that_sleeps(ctx):
    """A thread that polls leaves it asleep; one that has posted wakes it. It makes its turns itself."""
    record, worker = nic_of(ctx).record, nic_of(ctx).to_help()
    record["spin_ns"], record["sleep_ms"] = 0, 60_000
    until(lambda: record["asleep"], "the engine to sleep")
    time.sleep(0.1)  # behind its last turn before that
    idle = record["idle"]
    help_out(worker)
    time.sleep(0.05)
    assert record["idle"] == idle
    help_out(worker, posted=1)
    until(lambda: record["idle"] > idle, "the engine to wake up")
    assert record["helped_at"] == 0


def test_work_of_helpers_keeps_the_engine_awake(ctx):
    record, loop = nic_of(ctx).record, Loop(ctx)
    loop.write(0, 8)
    until(lambda: loop.cq.poll(1), "the engine's own thread")
    since = until(lambda: int(record["idle_since"]), "the engine to be idle")
    record["helped_at"] = NEVER_NS
    until(lambda: record["trust"] > record["nap_ns"] and not record["taken"], "the engine's thread to nap")
    loop.write(0, 8)
    help_out(nic_of(ctx).to_help(), posted=1)
    assert loop.cq.poll(1)
    assert record["idle_since"] != since


@settings(max_examples=20, deadline=None)
@given(writes=st.lists(st.tuples(st.integers(0, NBYTES - 1), st.integers(1, NBYTES)), min_size=1, max_size=30),
       helpers=st.integers(1, 3), seed=st.integers(0, 255))
def test_helpers_beside_the_engine(writes, helpers, seed):
    """Whoever makes the turns, each write happens once and in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nic, "few_cores", lambda: True)
        with gn.open("soft0") as ctx:
            nic_of(ctx).expect_polling()
            loop, worker, ends = Loop(ctx), nic_of(ctx).to_help(), threading.Event()
            loop.source[:] = np.random.default_rng(seed).integers(0, 256, NBYTES)
            expected = np.zeros(NBYTES, np.uint8)

            def keep_helping() -> None:
                while not ends.is_set():
                    help_out(worker)

            threads = [threading.Thread(target=keep_helping, daemon=True) for _ in range(helpers)]
            for thread in threads:
                thread.start()
            for at, wanted in writes:
                nbytes = min(wanted, NBYTES - at)
                expected[at : at + nbytes] = loop.source[at : at + nbytes]
                loop.write(at, nbytes)
            found: list[object] = []
            until(lambda: found.extend(loop.cq.poll(64)) or len(found) >= len(writes), "all completions")
            ends.set()
            for thread in threads:
                thread.join()
            assert [wc.status for wc in found] == [gn.WcStatus.SUCCESS] * len(writes)
            assert (loop.target == expected).all()


def test_what_cannot_be_helped(monkeypatch):
    """Cores for all; several workers; turns that are not made by a thread."""
    for few, port in ((False, gn.PortConfig()), (True, gn.PortConfig(workers=2)), (True, gn.PortConfig(engine="twin"))):
        monkeypatch.setattr(nic, "few_cores", lambda few=few: few)
        with gn.open("soft0", port=port) as ctx:
            nic_of(ctx).expect_polling()
            assert nic_of(ctx).to_help() == 0
