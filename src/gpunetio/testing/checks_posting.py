"""Refused posts, and what happens to the other requests."""

from __future__ import annotations

from collections.abc import Callable

from ..enums import WrOpcode
from ..errors import DocaErrorCode, InvalidValueError
from ..verbs import BadWrError, RecvWr, SendWr, wait_cq_pi
from .kit import check
from .rig import Rig, Violation, same


@check
def bad_requests(rig: Rig) -> None:
    """The error names the first refused request; earlier requests are executed, later ones are not posted.

    Source: ibv_post_send(3), ibv_post_recv(3) (bad_wr).
    """
    a, b = rig.pair(near={"max_inline_data": 28})
    good = SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.memory.sge()], wr_id=1, **b.memory.remote())
    too_long = bytes(a.qp.init_attr.max_inline_data + 1)
    for what, bad in (
        ("more entries than the queue has", SendWr(opcode=WrOpcode.SEND, sges=[a.memory.sge(0, 1)] * 4)),
        ("more inline bytes than the queue takes", SendWr(opcode=WrOpcode.SEND, inline=too_long)),
        ("a READ that is inline", SendWr(opcode=WrOpcode.RDMA_READ, inline=b"", **b.memory.remote())),
        ("an atomic of 4 bytes", SendWr(opcode=WrOpcode.ATOMIC_FETCH_AND_ADD, sges=[a.memory.sge(0, 4)])),
        ("a WAIT of an ordinary queue pair", wait_cq_pi(a.sent, 0)),
    ):
        error = _bad_wr(what, lambda bad=bad: a.qp.post_send(good, bad, good))
        same("the request that was named", (error.index, error.code), (1, InvalidValueError.code))
        a.succeed(1)
    error = _bad_wr("a receive of 4 entries", lambda: b.qp.post_recv(RecvWr(), RecvWr(sges=[b.memory.sge()] * 4)))
    same("the receive that was named", error.index, 1)


def _bad_wr(what: str, call: Callable[[], None]) -> BadWrError:
    try:
        call()
    except BadWrError as error:
        return error
    raise Violation(f"{what} was not refused")


@check
def full_queues(rig: Rig) -> None:
    """A queue accepts as many requests as it has room for, and refuses the next until completions were polled.

    Source: ibv_post_send(3), ibv_post_recv(3) (ENOMEM); DOCA_ERROR_FULL.
    """
    a, b = rig.pair(near={"sq_wr": 4, "send_max_sges": 1})
    room = a.qp.sq_entries
    writes = [SendWr(opcode=WrOpcode.RDMA_WRITE, wr_id=number, **b.memory.remote()) for number in range(room + 1)]
    for _ in range(3):
        error = _bad_wr("one request more than there is room", lambda: a.qp.post_send(*writes))
        same("the request that was named", (error.index, error.code), (room, DocaErrorCode.FULL))
        a.succeed(*range(room))
    room = b.qp.rq_entries
    receives = [RecvWr(wr_id=number) for number in range(room + 1)]
    error = _bad_wr("one receive more than there is room", lambda: b.qp.post_recv(*receives))
    same("the receive that was named", (error.index, error.code), (room, DocaErrorCode.FULL))
