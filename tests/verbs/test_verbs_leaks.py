"""Objects of verbs made and closed in any order, with requests in flight and calls that fail: nothing stays behind.

Counted are threads, descriptors, mappings of memory, memory that is kept for a NIC, and the rows of the NIC's tables.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import permutations
from mmap import MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import memory, verbs
from gpunetio.enums import QpState, SendFlags, WrOpcode
from gpunetio.errors import DriverError, InUseError
from gpunetio.memory import HostMemory
from gpunetio.verbs import CQ, MR, PD, QP, SRQ, UAR, UMEM, CompChannel, Context, SendWr, Sge
from nic_rig import until
from usage import BLOCK, Usage, opens

MESSAGE = 1 << 18
PATIENCE = 30.0
TABLES = ("qps", "cqs", "srqs", "mkeys", "pds", "umems", "uar_pages")
MAKING = (
    "alloc_pd", "reg_mr", "reg_umem", "alloc_uar", "query_eqn", "devx_obj_create", "doorbell_register",
    "create_event_channel", "subscribe",
)


@dataclass
class Stage:
    """Contexts and all that was made from them, and how to make and to close more. Choices are taken modulo."""

    names: tuple[str, ...]
    made: list[verbs.Handle] = field(default_factory=list)

    def one(self, kind: type, choice: int) -> Any:
        """Some open object of a kind, or None."""
        there = [handle for handle in self.made if type(handle) is kind and not handle.closed]
        return there[choice % len(there)] if there else None

    def of(self, kind: type, ctx: Context, choice: int) -> Any:
        """Some open object of a kind and a context, or None."""
        there = [h for h in self.made if type(h) is kind and h.ctx is ctx and not h.closed]
        return there[choice % len(there)] if there else None

    def open(self, a: int, b: int) -> None:
        if sum(type(handle) is Context and not handle.closed for handle in self.made) < 3:
            self.made.append(verbs.open(self.names[a % len(self.names)]))

    def pd(self, a: int, b: int) -> None:
        if ctx := self.one(Context, a):
            self.made.append(ctx.create_pd())

    def mr(self, a: int, b: int) -> None:
        if pd := self.one(PD, a):
            with closing(HostMemory(4096)) as host:  # the region keeps it
                self.made.append(pd.register(mmap(-1, BLOCK, MAP_PRIVATE) if b % 3 == 0 else host))

    def umem(self, a: int, b: int) -> None:
        if ctx := self.one(Context, a):
            with closing(HostMemory(BLOCK if b % 3 == 0 else 1 << 13)) as host:
                self.made.append(ctx.register_umem(host))

    def uar(self, a: int, b: int) -> None:
        if ctx := self.one(Context, a):
            self.made.append(ctx.create_uar())

    def _place(self, ctx: Context, choice: int) -> dict[str, Any]:
        umem, uar = self.of(UMEM, ctx, choice), self.of(UAR, ctx, choice)
        place: dict[str, Any] = {}
        if choice & 1 and umem:
            place |= {"external_umem": (umem, 0), "external_dbr_umem": (umem, 4096)}
        if choice & 2 and uar:
            place["external_uar"] = uar
        return place

    def channel(self, a: int, b: int) -> None:
        if ctx := self.one(Context, a):
            self.made.append(ctx.create_comp_channel())

    def cq(self, a: int, b: int) -> None:
        if ctx := self.one(Context, a):
            channel = self.of(CompChannel, ctx, b) if b & 4 else None
            self.made.append(ctx.create_cq(16, channel=channel, **self._place(ctx, b)))

    def srq(self, a: int, b: int) -> None:
        if pd := self.one(PD, a):
            self.made.append(pd.create_srq(4, **self._place(pd.ctx, b & 1)))

    def qp(self, a: int, b: int) -> None:
        if (pd := self.one(PD, a)) and (cq := self.of(CQ, pd.ctx, b)):
            srq = self.of(SRQ, pd.ctx, b) if b & 4 else None
            place = self._place(pd.ctx, b)
            self.made.append(pd.create_qp(sq_wr=8, rq_wr=8, send_cq=cq, receive_cq=cq, srq=srq, **place))

    def post(self, a: int, b: int) -> None:
        """Large writes, which nobody waits for, between two queue pairs of any contexts."""
        one, other = self.one(QP, a), self.one(QP, b)
        if not one or one.init_attr.external_umem or other.init_attr.external_umem:
            return
        for qp in {one, other}:
            qp.reset()
        one.connect(other, ack_timeout=8, retry_cnt=1)
        source, target = (
            next((h for h in self.made if isinstance(h, MR) and h.pd is qp.pd and not h.closed), None)
            for qp in (one, other)
        )
        if source and target:
            nbytes = min(source.nbytes, target.nbytes, MESSAGE)
            write = SendWr(
                opcode=WrOpcode.RDMA_WRITE, sges=[Sge(source.address, nbytes, source.lkey)], flags=SendFlags(0),
                remote_addr=target.address, rkey=target.rkey,
            )
            one.post_send(write, write, write)

    def close(self, a: int, b: int) -> None:
        """Any object; what others need stays open."""
        if self.made:
            handle = self.made[a % len(self.made)]
            try:
                handle.close()
            except InUseError:
                assert not handle.closed
            else:
                assert handle.closed

    def drop(self, a: int, b: int) -> None:
        """Forget any object. It stays as long as another needs it."""
        if self.made:
            self.made.pop(a % len(self.made))

    def fail(self, a: int, b: int) -> None:
        """A call fails on the way to a new object: the device refuses it."""
        ctx = self.one(Context, a)
        if ctx is None:
            return
        provider, name = ctx.provider, MAKING[b % len(MAKING)]

        def refuse(*_: Any) -> None:
            raise DriverError(f"{name} was refused", 3, 0)

        setattr(provider, name, refuse)
        before = len(self.made)
        try:
            for make in (self.pd, self.mr, self.umem, self.uar, self.channel, self.cq, self.srq, self.qp):
                with suppress(DriverError):
                    make(a, b)
            assert all(handle.ctx.closed is False for handle in self.made[before:])
        finally:
            delattr(provider, name)


ACTIONS = ("open", "pd", "mr", "umem", "uar", "channel", "cq", "srq", "qp", "post", "close", "drop", "fail")
STEPS = st.lists(
    st.tuples(st.sampled_from((*ACTIONS, "qp", "post", "mr")), st.integers(0, 50), st.integers(0, 50)),
    min_size=10, max_size=30,
)
FIRST: tuple[tuple[str, int, int], ...] = (
    ("open", 0, 0), ("open", 1, 0), ("pd", 0, 0), ("pd", 1, 0), ("cq", 0, 0), ("cq", 1, 0), ("mr", 0, 0), ("mr", 1, 0),
    ("qp", 0, 0), ("qp", 1, 0),
)


def play(
    names: tuple[str, ...], steps: list[tuple[str, int, int]], last: Callable[[list[verbs.Handle]], None]
) -> None:
    """Take the steps, then close what is open. Contexts that nobody holds are closed soon."""
    stage, before = Stage(names), opens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what was dropped
        try:
            for action, a, b in (*FIRST, *steps):
                getattr(stage, action)(a, b)
        finally:
            last(stage.made)
            while stage.made:
                stage.made.pop().close()
        gc.collect()
        until(lambda: opens() == before, "the end of contexts", PATIENCE)


def contexts_only(made: list[verbs.Handle]) -> None:
    """A context closes all that was made from it."""
    for handle in made:
        handle.ctx.close()
    assert all(handle.closed for handle in made)


def one_by_one(made: list[verbs.Handle]) -> None:
    """Users before what they use, the latest first.

    The devices have nothing then but the pages that queues share, and the channel of the context's events.
    """
    try_to_close(made)
    for handle in reversed(made):  # those that a younger object's user was in the way of
        if not isinstance(handle, Context):
            handle.close()
    for handle in made:
        if isinstance(handle, Context) and not handle.closed:
            handle.dropped.found()
            shared = [uar.page_id for uar in handle._uars.values()] + [handle.async_events._reader._channel]
            held = [number for _, number in handle.provider._held]  # type: ignore[attr-defined]
            assert sorted(held) == sorted(shared)


def try_to_close(made: list[verbs.Handle]) -> None:
    """Close what can be closed, and forget it: it may be all that holds an object which was dropped."""
    for handle in reversed(made):
        if not isinstance(handle, Context):
            with suppress(InUseError):
                handle.close()
    made[:] = [handle for handle in made if not handle.closed]


ORDERS = st.sampled_from([contexts_only, one_by_one])


@pytest.fixture(scope="module")
def warm() -> None:
    """What is made once and kept: compiled functions, imports."""
    everything = [(action, n, n) for n in range(4) for action in ACTIONS if action not in ("close", "drop")]
    for _ in range(2):
        play(("soft0", "soft1"), everything, contexts_only)


@pytest.fixture
def kept(warm: None) -> Iterator[list[Context]]:
    """Both NICs, open all the time, so that their tables can be looked at."""
    with verbs.open("soft0") as one, verbs.open("soft1") as two:
        yield [one, two]


def rows(contexts: list[Context]) -> list[int]:
    return [len(getattr(ctx.provider.nic, table)) for ctx in contexts for table in TABLES]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_nic_that_stays(kept):
    """Contexts come and go, and the NICs' tables are empty."""
    before = Usage.now()

    @settings(max_examples=80)
    @given(STEPS, ORDERS)
    def check(steps, last):
        play(("soft0", "soft1"), steps, last)
        assert rows(kept) == [0] * (2 * len(TABLES))
        nics = [ctx.provider.nic for ctx in kept]
        assert all(not nic.control.qps.known and not nic.control.qps._memory for nic in nics)
        assert len(memory.live()) == before.live

    check()
    before.check()


def test_a_nic_that_goes(warm):
    """The last context of a NIC closes it: its threads, descriptors and memory are gone."""
    before = Usage.now()

    @settings(max_examples=40)
    @given(STEPS, ORDERS)
    def check(steps, last):
        play(("soft0", "soft1"), steps, last)
        assert not opens()

    check()
    before.check()


def close_in(order: tuple[str, ...]) -> None:
    """Make one of each kind, and close them in an order while writes are under way; the context closes what is left."""
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        with closing(HostMemory(1 << 13)) as host:
            umem = ctx.register_umem(host)
        cq = ctx.create_cq(16, external_umem=(umem, 0), external_dbr_umem=(umem, 4096))
        mr = pd.register(bytearray(1 << 16))
        qp = pd.create_qp(sq_wr=8, send_cq=cq)
        qp.connect(qp)
        write = SendWr(
            opcode=WrOpcode.RDMA_WRITE, sges=[Sge(mr.address, mr.nbytes, mr.lkey)], flags=SendFlags(0),
            remote_addr=mr.address, rkey=mr.rkey,
        )
        qp.post_send(*[write] * 8)
        handles: dict[str, verbs.Handle] = {"qp": qp, "cq": cq, "mr": mr, "pd": pd, "umem": umem}
        gone: set[str] = set()
        for name in order:
            if set(NEEDED_BY.get(name, ())) - gone:
                with pytest.raises(InUseError, match="is still used by"):
                    handles[name].close()
            else:
                handles[name].close()
                gone |= {name, *CLOSES.get(name, ())}
            assert {name for name, handle in handles.items() if handle.closed} == gone
        if "qp" not in gone:
            assert qp.state in (QpState.RTS, QpState.ERR)


NEEDED_BY = {"cq": ("qp",), "umem": ("cq",)}
CLOSES = {"pd": ("mr", "qp")}


def test_every_order(kept):
    before = Usage.now()
    for order in permutations(("qp", "cq", "mr", "pd", "umem")):
        close_in(order)
        assert rows(kept) == [0] * (2 * len(TABLES))
    before.check()


def test_a_context_that_nobody_holds(kept):
    """It is closed soon, with its regions, and the memory behind them is given back."""
    nic = kept[0].provider.nic  # type: ignore[attr-defined]

    def forget() -> tuple[weakref.ref, weakref.ref, int]:
        ctx, buffer = verbs.open("soft0"), np.zeros(64, np.uint8)
        rkey = ctx.create_pd().register(buffer).rkey
        assert rkey in nic.mkeys
        return weakref.ref(ctx), weakref.ref(buffer), rkey

    before = opens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        ctx, buffer, rkey = forget()
        gc.collect()
        until(lambda: opens() == before, "the end of contexts", PATIENCE)
    assert rkey not in nic.mkeys
    until(lambda: gc.collect() >= 0 and (ctx(), buffer()) == (None, None), "the end of the memory", PATIENCE)


def test_a_queue_that_the_device_does_not_destroy_keeps_its_ring(kept, monkeypatch):
    """The device may still write there."""
    ctx, before = verbs.open("soft0"), len(memory.live())
    qp = ctx.create_pd().create_qp(sq_wr=4, send_cq=ctx.create_cq(16))
    ring = memory.live()[qp.sq_address]

    def refuse(handle: int) -> None:
        raise DriverError("stuck", 8, 0)

    with monkeypatch.context() as patched:
        patched.setattr(ctx.provider, "devx_obj_destroy", refuse)
        with pytest.raises(InUseError, match="is still used by 2 object"):
            qp.close()
    assert qp.closed
    assert not ring.closed
    ctx.close()  # destroys first what is left of the handle's objects
    assert ctx.closed
    assert rows(kept) == [0] * (2 * len(TABLES))  # closing the device takes all of it
    for left in list(memory.live().values())[before:]:
        left.close()
