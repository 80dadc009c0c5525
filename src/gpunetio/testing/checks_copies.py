"""Queue pairs that copy local memory: MEMCPY."""

from __future__ import annotations

from ..enums import Access, QpState, WcOpcode, WcStatus
from ..verbs import BadWrError, Sge, memcpy
from .kit import check
from .rig import Rig, Side, refused, same

_PAIRS = ((0, 0, 1), (1, 0, 63), (0, 63, 64), (7, 9, 65), (4095, 1, 4097), (64, 17, 60_000))  # two offsets, and bytes
_HALF = 1 << 17  # of a side's memory: source and target do not overlap


def _alone(rig: Rig, access: Access | None = None) -> Side:
    """Return a queue pair that is connected to itself. NotSupportedError if the device copies no memory."""
    side = rig.side(rig.near, access=access, memcpy=True)
    side.qp.connect(side.qp)
    return side


@check
def memcpy_copies(rig: Rig) -> None:
    """A MEMCPY copies local memory, whatever the alignment of its ends, and changes nothing else.

    Source: mlx5dv_wr_memcpy (mlx5dv_wr_post(3)); PRM, MMO WQE (DMA).
    """
    side = _alone(rig)
    memory = side.memory
    for number, (begin, to, nbytes) in enumerate(_PAIRS):
        to += _HALF
        side.qp.post_send(memcpy(memory.sge(to, nbytes), memory.sge(begin, nbytes), wr_id=number))
        done = side.succeed(number)
        same("opcode", done[0].opcode, WcOpcode.MEMCPY)
        memory.expect_copy(to, memory, begin, nbytes)
        memory.verify(f"a MEMCPY of {nbytes} bytes from {begin} to {to}")


@check
def memcpy_between_regions(rig: Rig) -> None:
    """The source needs no right but that to be read here, and the target LOCAL_WRITE; neither is a peer's.

    Source: mlx5dv_wr_memcpy (mlx5dv_wr_post(3)); IBTA 10.6, 11.6.2 (Local Protection Error).
    """
    side = _alone(rig, Access.LOCAL_READ)
    target = rig.memory(side.pd, access=Access.LOCAL_WRITE)
    side.qp.post_send(memcpy(target.sge(5, 3000), side.memory.sge(11, 3000), wr_id=1))
    side.succeed(1)
    target.expect_copy(5, side.memory, 11, 3000)
    target.verify("a MEMCPY to another region")
    side.qp.post_send(memcpy(side.memory.sge(0, 8), target.sge(0, 8), wr_id=2))
    side.fail(WcStatus.LOC_PROT_ERR, 2)
    side.memory.verify("a MEMCPY to a region without LOCAL_WRITE")


@check
def memcpy_outside_of_a_region(rig: Rig) -> None:
    """A MEMCPY with a wrong key, or beyond the end of its region, fails, and flushes what is behind it.

    Source: mlx5dv_wr_memcpy (mlx5dv_wr_post(3)); IBTA 10.6, 11.6.2 (Local Protection Error).
    """
    for source in (False, True):
        for wrong in ("key", "end"):
            side = _alone(rig)
            memory = side.memory
            good, bad = memory.sge(0, 64), memory.sge(memory.nbytes - 63, 64)
            if wrong == "key":
                bad = Sge(memory.mr.iova + 64, 64, memory.mr.lkey ^ 0x5500)
            first = memcpy(good, bad, wr_id=0) if source else memcpy(bad, good, wr_id=0)
            side.qp.post_send(first, memcpy(memory.sge(128, 64), memory.sge(256, 64), wr_id=1))
            side.fail(WcStatus.LOC_PROT_ERR, 0, 1)
            memory.verify(f"a MEMCPY with a wrong {wrong}")


@check
def memcpy_needs_its_queue_pair(rig: Rig) -> None:
    """A MEMCPY on a queue pair without memcpy, of unequal lengths, or of more than the device copies is not posted.

    Source: mlx5dv_create_qp(3) (MLX5DV_QP_EX_WITH_MEMCPY), mlx5dv_query_device(3) (wr_memcpy_length).
    """
    side = _alone(rig)
    memory, most = side.memory, side.ctx.query_device().max_wr_memcpy_length
    plain = rig.side(rig.near, pd=side.pd)
    plain.qp.connect(plain.qp)
    good, long = memcpy(memory.sge(0, 8), memory.sge(8, 8)), Sge(memory.mr.iova, most + 1, memory.mr.lkey)
    refused("a MEMCPY without memcpy", BadWrError, lambda: plain.qp.post_send(good))
    refused("unequal lengths", BadWrError, lambda: side.qp.post_send(memcpy(memory.sge(0, 8), memory.sge(8, 9))))
    refused("more than the device copies", BadWrError, lambda: side.qp.post_send(memcpy(long, long)))
    same("state", side.qp.state, QpState.RTS)
    memory.verify("requests that were not posted")
