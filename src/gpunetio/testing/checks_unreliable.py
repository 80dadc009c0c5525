"""Unreliable connections: SENDs and WRITEs, and silent losses."""

from __future__ import annotations

from ..enums import QpState, QpType, WcOpcode, WrOpcode
from ..verbs import BadWrError, SendWr
from .kit import check
from .rig import Rig, Side, refused, same

_LENGTHS = (0, 1, 4095, 4096, 4097, 1 << 16)


def _pair(rig: Rig) -> tuple[Side, Side]:
    return rig.pair({"qp_type": QpType.UC}, {"qp_type": QpType.UC})


@check
def unreliable_send(rig: Rig) -> None:
    """A SEND on UC goes into the oldest receive.

    Source: IBTA 9.8.2; ibv_post_send(3).
    """
    a, b = _pair(rig)
    for number, nbytes in enumerate(_LENGTHS):
        b.receive(b.memory.sge(100_000, nbytes), wr_id=number)
        a.post(WrOpcode.SEND_WITH_IMM, a.memory.sge(number, nbytes), imm=number, wr_id=number)
        a.succeed(number)
        (arrived,) = b.arrive(number)
        same("what arrived", (arrived.opcode, arrived.byte_len, arrived.imm), (WcOpcode.RECV, nbytes, number))
        b.memory.expect_copy(100_000, a.memory, number, nbytes)
        b.memory.verify(f"a SEND of {nbytes} bytes")


@check
def unreliable_write(rig: Rig) -> None:
    """A WRITE on UC goes to its address; with immediate data it uses up a receive.

    Source: IBTA 9.8.2; ibv_post_send(3).
    """
    a, b = _pair(rig)
    for number, nbytes in enumerate(_LENGTHS):
        b.receive(wr_id=number)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(number, nbytes), wr_id=1, **b.memory.remote(0))
        a.post(WrOpcode.RDMA_WRITE_WITH_IMM, a.memory.sge(number, nbytes), imm=9, wr_id=2, **b.memory.remote(100_000))
        a.succeed(1, 2)
        (arrived,) = b.arrive(number)
        same("what arrived", (arrived.opcode, arrived.byte_len), (WcOpcode.RECV_RDMA_WITH_IMM, nbytes))
        for at in (0, 100_000):
            b.memory.expect_copy(at, a.memory, number, nbytes)
        b.memory.verify(f"WRITEs of {nbytes} bytes")


@check
def unreliable_losses_are_silent(rig: Rig) -> None:
    """A SEND without a receive succeeds at the sender and has no effect; the next one is received.

    Source: IBTA 9.8.2, 9.9.3 (the responder drops the message silently); both stay in RTS.
    """
    a, b = _pair(rig)
    a.post(WrOpcode.SEND, a.memory.sge(0, 100), wr_id=1)
    a.succeed(1)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(300, 8), wr_id=2, **b.memory.remote(100_000))
    a.succeed(2)
    rig.until("a WRITE behind it", lambda: b.memory.word(100_000) == a.memory.word(300))  # the SEND was dropped by then
    b.memory.expect_copy(100_000, a.memory, 300, 8)
    rig.quiet("completions of a SEND without a receive", b.received.poll)
    b.receive(b.memory.sge(0, 100), wr_id=2)
    a.post(WrOpcode.SEND, a.memory.sge(200, 50), wr_id=3)
    a.succeed(3)
    (arrived,) = b.arrive(2)
    same("the length of the next message", arrived.byte_len, 50)
    b.memory.expect_copy(0, a.memory, 200, 50)
    b.memory.verify("a SEND behind a lost one")
    same("states", (a.qp.state, b.qp.state), (QpState.RTS, QpState.RTS))


@check
def unreliable_has_no_reads(rig: Rig) -> None:
    """READs and atomics are refused on UC.

    Source: IBTA 9.8.2, table of operations by service; ibv_post_send(3).
    """
    a, b = _pair(rig)
    for opcode in (WrOpcode.RDMA_READ, WrOpcode.ATOMIC_CMP_AND_SWP, WrOpcode.ATOMIC_FETCH_AND_ADD):
        request = SendWr(opcode=opcode, sges=[a.memory.sge(0, 8)], **b.memory.remote())
        refused(f"{opcode.name} on UC", BadWrError, lambda request=request: a.qp.post_send(request))
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.succeed(0)
