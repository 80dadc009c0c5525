"""A NIC whose tables are full: who asks for one more is told so, the rest works, and one that is closed makes room."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from command_rig import limit_tables
from gpunetio import memory, verbs
from gpunetio.enums import WcStatus, WrOpcode
from gpunetio.errors import DocaErrorCode, NoMemoryError
from gpunetio.memory import HostMemory
from gpunetio.verbs import SendWr
from nic_rig import until

ROWS = {"QP": 16, "CQ": 16, "PD": 8, "UMEM": 32, "UAR": 8, "MR": 16, "SRQ": 8}
TABLES = ("qps", "cqs", "pds", "umems", "uar_pages", "mkeys", "srqs")


@dataclass
class World:
    """A queue pair connected to itself, on a NIC with room for few."""

    ctx: verbs.Context
    pd: verbs.PD
    cq: verbs.CQ
    qp: verbs.QP
    target: bytearray
    mr: verbs.MR
    queue_memory: HostMemory
    umem: verbs.UMEM

    @property
    def nic(self) -> Any:
        return self.ctx.provider.nic  # type: ignore[attr-defined]

    def place(self) -> dict[str, Any]:
        """Where queues may lie that are never used: they need no UMEM of their own."""
        return {"external_umem": (self.umem, 0), "external_dbr_umem": (self.umem, 4096)}

    def used(self) -> list[int]:
        """How many objects of each kind there are, pieces of memory too."""
        return [len(getattr(self.nic, table)) for table in TABLES] + [len(memory._live)]

    def write(self, text: bytes) -> None:
        """A write arrives."""
        self.qp.post_send(
            SendWr(opcode=WrOpcode.RDMA_WRITE, inline=text, remote_addr=self.mr.address, rkey=self.mr.rkey)
        )
        (done,) = until(self.cq.poll, "the write's completion")
        assert done.status == WcStatus.SUCCESS
        assert self.target == text


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    limit_tables(monkeypatch, ROWS)
    with verbs.open("soft7") as ctx:
        pd, cq, target, queues = ctx.create_pd(), ctx.create_cq(16), bytearray(8), HostMemory(8192)
        qp = pd.create_qp(sq_wr=4, send_cq=cq)
        qp.connect(qp)
        yield World(ctx, pd, cq, qp, target, pd.register(target), queues, ctx.register_umem(queues))
    queues.close()


# kind: (how one is made, what the error says, its table)
KINDS: dict[str, tuple[Callable[[World], verbs.Handle], str, str]] = {
    "QP": (lambda w: w.pd.create_qp(**w.place()), "all 15 QPs are in use", "QP"),
    "CQ": (lambda w: w.ctx.create_cq(4, **w.place()), "all 15 CQs are in use", "CQ"),
    "PD": (lambda w: w.ctx.create_pd(), "soft7 has no free PD: all 7 are in use", "PD"),
    "UMEM": (lambda w: w.ctx.register_umem(bytearray(64)), "soft7 has no free UMEM: all 31 are in use", "UMEM"),
    "UAR": (lambda w: w.ctx.create_uar(), "soft7 has no free UAR page: all 7 are in use", "UAR"),
    "MR": (lambda w: w.pd.register(bytearray(64)), "soft7 has no free memory key: all 15 are in use", "MR"),
    "SRQ": (lambda w: w.pd.create_srq(4, **w.place()), "all 7 SRQs are in use", "SRQ"),
    "QP with rings": (lambda w: w.pd.create_qp(sq_wr=4, send_cq=w.cq), "all 15 QPs are in use", "QP"),
    "CQ with a ring": (lambda w: w.ctx.create_cq(4), "all 15 CQs are in use", "CQ"),
}


def refuse(world: World, make: Callable[[World], verbs.Handle], words: str) -> None:
    """There is no room, and nothing is lost by asking for it."""
    used = world.used()
    with pytest.raises(NoMemoryError, match=f"{words}.*; close one first$") as caught:
        make(world)
    assert caught.value.code == DocaErrorCode.NO_MEMORY
    assert world.used() == used
    world.write(b"all well")


@pytest.mark.parametrize("kind", KINDS)
def test_full_table(world, kind):
    make, words, table = KINDS[kind]
    before = world.used()
    with ExitStack() as stack:
        made = [stack.enter_context(make(world)) for _ in range(ROWS[table] - 1 - before[list(ROWS).index(table)])]
        for handle in (made[0], made[-1], made[len(made) // 2]):  # whichever goes makes room for one
            refuse(world, make, words)
            handle.close()
            stack.enter_context(make(world))
        refuse(world, make, words)
    assert world.used() == before
    make(world).close()
    world.write(b"then on.")


@pytest.mark.parametrize("kind", ["QP with rings", "CQ with a ring"])
def test_rings_need_a_umem(world, kind):
    """A queue that finds no room for its ring leaves nothing behind."""
    before = world.used()
    with ExitStack() as stack:
        while len(world.nic.umems) < ROWS["UMEM"] - 1:
            last = stack.enter_context(world.ctx.register_umem(bytearray(64)))
        refuse(world, KINDS[kind][0], "soft7 has no free UMEM")
        last.close()
        stack.enter_context(KINDS[kind][0](world))
        refuse(world, KINDS[kind][0], "soft7 has no free UMEM")
    assert world.used() == before


def test_the_first_queue_needs_a_page(world):
    """Queues of one context share pages, so that only a new context wants one more."""
    with ExitStack() as stack:
        other = stack.enter_context(verbs.open("soft7"))
        while len(world.nic.uar_pages) < ROWS["UAR"] - 1:
            last = stack.enter_context(world.ctx.create_uar())
        stack.enter_context(world.ctx.create_cq(4))
        refuse(world, lambda w: other.create_cq(4), "soft7 has no free UAR page")
        last.close()
        with other.create_cq(4) as cq:
            assert cq.poll() == []
