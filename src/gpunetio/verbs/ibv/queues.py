"""Requests passed to libibverbs: the CPU data path of devices without DEVX.

libibverbs gets the number of a request as its wr_id. So completions are matched here as for gpunetio's own rings:
polling frees slots, and the opcode of a failed request is known.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ...arguments import instance
from ...enums import SendFlags, WcOpcode, WrOpcode
from ...errors import InvalidValueError
from ...formats.operations import Operation
from ...providers.plain_verbs import Entries, PlainVerbs, Refused, Send
from ..devx.posting import Form, Note, Packed, Posting, Request, Sent, WorkQueue
from ..requests import (
    U32,
    U64,
    check_entry,
    check_range,
    check_size,
    destination_of,
    entries_of,
    inline_payload,
    operation_of,
    remote_of,
)
from ..work import RecvWr, SendWr
from .device import RECEIVED

if TYPE_CHECKING:
    from .qp import PlainQP

_SIGNALED, _INLINE = int(SendFlags.SIGNALED), int(SendFlags.INLINE)


def entries_for(request: SendWr | RecvWr, most: int, limit: str) -> tuple[Entries, int]:
    """Return the scatter/gather entries of a request in libibverbs' form, and their total bytes."""
    sges, total = entries_of(request, most, limit)
    for sge in sges:
        check_entry(sge)
    return tuple((sge.address, sge.length, sge.lkey) for sge in sges), total


class _PlainQueue(WorkQueue[Request, Form, Note]):
    """A queue of libibverbs. A slot is a request."""

    def __init__(self, qp: PlainQP, plain: PlainVerbs, size: int):
        super().__init__(size)
        self._qp, self._plain = qp, plain
        self._posted = cast("list[Note]", [None] * size)  # by number, from the post on

    def _carry_out(self, taken: list[Form], firsts: list[int], posted: list[Note]) -> Refused | None:
        for number, what in enumerate(posted, self.producer):
            self._posted[number % self.size] = what
        refused = self._hand_over(taken, self.producer)
        self.producer += refused.index if refused else len(taken)
        return refused

    @abstractmethod
    def _hand_over(self, requests: Sequence[Form], first: int) -> Refused | None:
        """Post requests, numbered from `first` on."""

    def complete(self, number: int) -> Note:
        """Complete the request with this number, and all before it. Return its note."""
        self.consumer = number + 1
        return self._posted[number % self.size]


class PlainSendQueue(_PlainQueue[SendWr, Send, Sent]):
    """The send queue."""

    def _pack(self, request: SendWr) -> Packed[Send, Sent]:
        attr = self._qp.init_attr
        operation = operation_of(request, attr.qp_type)
        if request.opcode == WrOpcode.WAIT_CQ_PI:
            raise InvalidValueError(f"WAIT_CQ_PI on {self._qp}, which cannot be a core_direct_master: that takes DEVX")
        if request.opcode == WrOpcode.MEMCPY:
            raise InvalidValueError(f"MEMCPY on {self._qp}, which cannot have memcpy: that takes DEVX")
        flags = int(request.flags) | (_SIGNALED if attr.sq_sig_all else 0)
        inline = request.inline is not None or flags & _INLINE != 0
        entries, nbytes = entries_for(request, attr.send_max_sges, "send_max_sges")
        payload = None
        if inline:
            payload, entries = inline_payload(request, operation, attr.max_inline_data), ()
            flags = flags | _INLINE if payload else flags & ~_INLINE
        else:
            check_size(operation, nbytes)
        form = self._form(request, operation, flags, entries, payload)
        slots = ((request.wr_id, cast(WcOpcode, operation.completion), operation.returns),)
        if inline and type(request.inline) is not bytes:
            return self._token, form, slots  # not kept: the inline bytes may differ next time
        return self._keep(request, form, slots)

    def _form(
        self, request: SendWr, operation: Operation, flags: int, entries: Entries, payload: bytes | None
    ) -> Send:
        address, key = remote_of(request) if operation.remote else (0, 0)
        destination = ()
        if self._qp.type.datagrams:
            destination = destination_of(request).handle, request.remote_qpn, request.remote_qkey
        compare_add = request.add if request.opcode == WrOpcode.ATOMIC_FETCH_AND_ADD else request.compare
        return Send(
            int(request.opcode), flags, entries, payload,
            address, key,
            check_range("imm", request.imm, U32) if operation.imm else 0,
            compare_add & U64 - 1 if operation.atomic else 0, request.swap & U64 - 1 if operation.atomic else 0,
            *destination,
        )

    def _hand_over(self, requests: Sequence[Send], first: int) -> Refused | None:
        return self._plain.post_send(self._qp.handle, requests, first)

    def _no_room(self) -> str:
        return (
            f"{self._qp} has no room: {self.producer - self.consumer} of the {self.size} requests that its send queue "
            "holds wait for completion; poll the CQ, with a signalled request now and then"
        )


class PlainReceiveQueue(_PlainQueue[RecvWr, Entries, int]):
    """The receive queue. `_posted` holds wr_ids."""

    def _pack(self, request: RecvWr) -> Packed[Entries, int]:
        most = self._qp.init_attr.receive_max_sges
        entries, _ = entries_for(instance("request", request, RecvWr), most, "receive_max_sges")
        return self._keep(request, entries, (request.wr_id,))

    def _hand_over(self, requests: Sequence[Entries], first: int) -> Refused | None:
        return self._plain.post_recv(self._qp.handle, requests, RECEIVED | first)

    def _no_room(self) -> str:
        return f"{self._qp} has no room: all {self.size} receives are posted; poll the CQ first"


class PlainPosting(Posting):
    """Both queues of a QP of libibverbs."""

    send: PlainSendQueue
    receive: PlainReceiveQueue

    def __init__(self, qp: PlainQP, plain: PlainVerbs):
        self._plain = plain
        super().__init__(qp)

    def reset(self) -> None:
        qp = self._qp
        self.send = PlainSendQueue(qp, self._plain, qp.sq_entries)
        self.receive = PlainReceiveQueue(qp, self._plain, qp.rq_entries)
        self.complete_receive = (qp.init_attr.srq or self.receive).complete
