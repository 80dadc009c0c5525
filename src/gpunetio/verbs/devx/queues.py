"""Rings of WQEs that this process fills: the CPU data path of queue pairs created by mailboxes."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from ...arguments import instance
from ...enums import LinkLayer, SendFlags, WcOpcode, WcStatus, WrOpcode
from ...errors import InvalidValueError
from ...formats.doorbell import PI_MASK, QP_DBREC
from ...formats.operations import Operation
from ...formats.wqe import (
    ATOMIC_SEG,
    CE_SHIFT,
    CTRL_SEG,
    EXTENDED_AV,
    FM_SHIFT,
    INLINE_SEG,
    INVALID_LKEY,
    MMO_DMA,
    MMO_SEG,
    OPMOD_SHIFT,
    RADDR_SEG,
    SEGMENT,
    WAIT_SEG,
    WQEBB,
    CompletionMode,
    CtrlFlags,
    FenceMode,
    WqeOpcode,
)
from ..requests import (
    OPERATIONS_OF,
    U24,
    U32,
    U64,
    check_entry,
    check_range,
    check_size,
    destination_of,
    entries_of,
    inline_payload,
    memcpy_of,
    no_operation,
    remote_of,
)
from ..scatter import scatter
from ..work import RecvWr, SendWr
from .posting import Note, Packed, Posting, Queue, Request, Sent, WorkQueue
from .ring import doorbells

if TYPE_CHECKING:
    from ...memory import HostMemory
    from ..qp import QP
    from .srq import DevxSRQ

_ADDRESS = struct.Struct(">III")
_CONTROL, _REMOTE, _DATA = struct.Struct(">IIBHBI"), struct.Struct(">QII"), struct.Struct(">IIQ")
_OPERANDS, _WAIT, _MMO = struct.Struct(">QQ"), struct.Struct(">8xII"), struct.Struct(">IIQ")
_SIGNALED, _INLINE = int(SendFlags.SIGNALED), int(SendFlags.INLINE)  # plain ints, because enumerations are slow
_FM_CE_SE = [  # the byte fm_ce_se of a control segment, indexed by the SendFlags FENCE, SIGNALED and SOLICITED
    (FenceMode.FENCE_AND_INITIATOR_SMALL_FENCE << FM_SHIFT if flags & SendFlags.FENCE else 0)
    | (CompletionMode.ALWAYS if flags & SendFlags.SIGNALED else CompletionMode.ON_ERROR) << CE_SHIFT
    | (CtrlFlags.SOLICITED if flags & SendFlags.SOLICITED else 0)
    for flags in range(8)
]
_INDEX = CTRL_SEG.opmod_idx_opcode + 1  # offset of the 16 bits in a control segment that hold the WQE's index


def data_segments(request: SendWr | RecvWr, most: int, limit: str) -> tuple[bytes, int]:
    """Return the data segments of a request, and their total bytes (`entries_of`)."""
    sges, total = entries_of(request, most, limit)
    packed = b""
    for sge in sges:
        try:
            packed += _DATA.pack(sge.length, sge.lkey, sge.address)
        except struct.error:
            check_entry(sge)
            raise
    return packed, total


class _RingQueue(WorkQueue[Request, bytes, Note]):
    """A ring of WQEs, each of one or several slots."""

    def __init__(self, qp: QP, ring: np.ndarray):
        super().__init__(len(ring))
        self._qp, self._ring = qp, ring
        self._doorbells = doorbells()
        self._mask = len(ring) - 1
        self._posted = cast("list[Note]", [None] * len(ring))  # by slot, from the post on

    def _carry_out(self, taken: list[bytes], firsts: list[int], posted: list[Note]) -> None:
        wqes = bytearray(b"".join(taken))
        self._number(wqes, firsts)
        block = np.frombuffer(wqes, np.uint8).reshape(len(posted), -1)
        start = self.producer & self._mask
        before_end = self.size - start
        for at, part in ((start, slice(before_end)), (0, slice(before_end, None))):
            count = len(posted[part])
            self._ring[at : at + count] = block[part]
            self._posted[at : at + count] = posted[part]
        self.producer += len(posted)
        self._ring_doorbell()

    @abstractmethod
    def _number(self, wqes: bytearray, firsts: list[int]) -> None:
        """Write the final indices into WQEs that were packed with index 0."""

    @abstractmethod
    def _ring_doorbell(self) -> None:
        """Announce all WQEs up to `producer`."""


_Packers = Sequence[Callable[["SendQueue", SendWr], bytes]]


class SendQueue(_RingQueue[SendWr, tuple[int, WcOpcode, bool, int]]):
    """The send ring. A slot is a basic block; `_posted` holds (wr_id, opcode, whether it returns data, blocks)."""

    def __init__(self, qp: QP, ring: np.ndarray):
        super().__init__(qp, ring)
        self._always = _SIGNALED if qp.init_attr.sq_sig_all else 0
        self._datagrams = qp.type.datagrams
        self._rows = _ROWS[qp.type]

    def _pack(self, request: SendWr) -> Packed[bytes, tuple[int, WcOpcode, bool, int]]:
        row = self._rows.get(instance("request", request, SendWr).opcode)
        if row is None:
            raise no_operation(request.opcode, self._qp.type)
        operation, word, completion, packers = row
        flags = int(request.flags)
        inline = request.inline is not None or flags & _INLINE != 0
        body = self._body(request, operation, packers, inline)
        imm = check_range("imm", request.imm, U32) if operation.imm else 0
        segments = 1 + len(body) // SEGMENT
        blocks = -(-segments * SEGMENT // WQEBB)
        fm_ce_se = _FM_CE_SE[(flags | self._always) & 7]
        control = _CONTROL.pack(word, self._qp.qpn << 8 | segments, 0, 0, fm_ce_se, imm)
        wqe = (control + body).ljust(blocks * WQEBB, b"\0")
        slots = ((request.wr_id, completion, operation.returns, blocks),) * blocks
        if inline and type(request.inline) is not bytes:
            return self._token, wqe, slots  # not kept: the inline bytes may differ next time
        return self._keep(request, wqe, slots)

    def _number(self, wqes: bytearray, firsts: list[int]) -> None:
        places = np.array(firsts)
        indices = np.ndarray(len(wqes) // WQEBB, ">u2", wqes, _INDEX, (WQEBB,))
        indices[places] = self.producer + places & PI_MASK

    def _no_room(self) -> str:
        return (
            f"{self._qp} has no room: {self.producer - self.consumer} of {self.size} basic blocks of its "
            "send queue wait for completion; poll the CQ, with a signalled request now and then"
        )

    def _body(self, request: SendWr, operation: Operation, packers: _Packers, inline: bool) -> bytes:
        """Return the segments after the control segment."""
        head = self._destination(request) if self._datagrams and not operation.local else b""
        for pack in packers:
            head += pack(self, request)
        if operation.data is not None:
            return head
        data, nbytes = data_segments(request, self._qp.init_attr.send_max_sges, "send_max_sges")
        if inline:
            return head + self._inline(request, operation)
        check_size(operation, nbytes)
        return head + data

    def _destination(self, request: SendWr) -> bytes:
        av = destination_of(request).av
        address = _ADDRESS.pack(request.remote_qkey, 0, request.remote_qpn | EXTENDED_AV)
        return address + av[len(address) :]

    def _remote(self, request: SendWr) -> bytes:
        try:
            return _REMOTE.pack(request.remote_addr, request.rkey, 0)
        except struct.error:  # a number is too large or missing
            return _REMOTE.pack(*remote_of(request), 0)

    def _operands(self, request: SendWr) -> bytes:
        adds = request.opcode == WrOpcode.ATOMIC_FETCH_AND_ADD
        words = (request.add, 0) if adds else (request.swap, request.compare)
        return _OPERANDS.pack(*(word & U64 - 1 for word in words))

    def _wait(self, request: SendWr) -> bytes:
        if not self._qp.init_attr.core_direct_master:
            raise InvalidValueError(f"WAIT_CQ_PI on {self._qp}: create it with core_direct_master")
        if request.sges or request.inline is not None:
            raise InvalidValueError("WAIT_CQ_PI carries no data: leave out sges and inline")
        check_range("wait_cqn", request.wait_cqn, U24)
        return _WAIT.pack(request.wait_pi & U32 - 1, request.wait_cqn)

    def _memcpy(self, request: SendWr) -> bytes:
        opaque = self._qp.opaque
        if opaque is None:
            raise InvalidValueError(f"MEMCPY on {self._qp}: create it with memcpy")
        source, target = memcpy_of(request, self._qp.ctx.query_device().max_wr_memcpy_length)
        packed = _MMO.pack(0, opaque.lkey, opaque.address)
        for sge in (source, target):
            packed += _DATA.pack(sge.length & INLINE_SEG - 1, sge.lkey, sge.address)
        return packed

    def _inline(self, request: SendWr, operation: Operation) -> bytes:
        payload = inline_payload(request, operation, self._qp.init_attr.max_inline_data)
        if not payload:
            return b""
        packed = struct.pack(">I", INLINE_SEG | len(payload)) + payload
        return packed.ljust(-(-len(packed) // SEGMENT) * SEGMENT, b"\0")

    def _ring_doorbell(self) -> None:
        qp = self._qp
        self._doorbells.ring_send(qp.dbr_address + QP_DBREC.snd, self.producer & PI_MASK, qp.doorbell_register, qp.qpn)

    def complete(self, counter: int) -> Sent:
        """Complete the request whose index ends in these 16 bits, and all before it. Return that request's `Sent`."""
        wr_id, opcode, reads, blocks = self._posted[counter & self._mask]
        self.consumer += (counter - self.consumer & PI_MASK) + blocks
        return wr_id, opcode, reads


_OPMODS = {WqeOpcode.MMO: MMO_DMA}
_SEGMENTS = {
    type(RADDR_SEG): SendQueue._remote, type(ATOMIC_SEG): SendQueue._operands, type(WAIT_SEG): SendQueue._wait,
    type(MMO_SEG): SendQueue._memcpy,
}
# By type and opcode: the operation, the opmod and opcode of its control segment, its completion, and the functions that
# pack the segments between control segment and data.
_ROWS = {
    qp_type: {
        opcode: (
            operation, operation.opcode | _OPMODS.get(operation.opcode, 0) << OPMOD_SHIFT,
            cast(WcOpcode, operation.completion),
            [_SEGMENTS[type(segment)] for segment in operation.segments],
        )
        for opcode, operation in operations.items()
    }
    for qp_type, operations in OPERATIONS_OF.items()
}


class ReceiveQueue(_RingQueue[RecvWr, int]):
    """The receive ring. A slot is a WQE; `_posted` holds its wr_id."""

    def _pack(self, request: RecvWr) -> Packed[bytes, int]:
        most = self._qp.init_attr.receive_max_sges
        data, _ = data_segments(instance("request", request, RecvWr), most, "receive_max_sges")
        if len(data) < self._qp.rq_stride:
            data += struct.pack(">IIQ", 0, INVALID_LKEY, 0)
        return self._keep(request, data.ljust(self._qp.rq_stride, b"\0"), (request.wr_id,))

    def _number(self, wqes: bytearray, firsts: list[int]) -> None:
        """Do nothing: receive WQEs contain no index."""

    def _no_room(self) -> str:
        return f"{self._qp} has no room: all {self.size} receives are posted; poll the CQ first"

    def _ring_doorbell(self) -> None:
        self._doorbells.ring_receive(self._qp.dbr_address + QP_DBREC.rcv, self.producer & PI_MASK)

    def segments(self, counter: int) -> bytes:
        """Return the data segments of the oldest receive."""
        return self._ring[self.consumer & self._mask].tobytes()

    def complete(self, counter: int) -> int:
        """Complete the oldest receive and return its wr_id. Receives complete in order."""
        wr_id = self._posted[self.consumer & self._mask]
        self.consumer += 1
        return wr_id


class RingPosting(Posting):
    """Both queues of a QP whose rings this process fills."""

    send: SendQueue
    receive: ReceiveQueue

    def __init__(self, qp: QP, memory: HostMemory):
        self._doorbell_rung = qp.ctx.provider.doorbell_rung
        sends = qp.sq_address - memory.address
        self._rings = memory.array[sends : sends + qp.sq_entries * WQEBB], memory.array[: qp.rq_entries * qp.rq_stride]
        self.infiniband = qp.ctx.query_device().link_layer == LinkLayer.INFINIBAND
        self._device = qp.ctx.name
        super().__init__(qp)

    def reset(self) -> None:
        sends, receives = self._rings
        self.send = SendQueue(self._qp, sends.reshape(-1, WQEBB))
        self.receive = ReceiveQueue(self._qp, receives.reshape(-1, self._qp.rq_stride or SEGMENT))
        # All objects of a device are of the same kind.
        shared = cast("DevxSRQ | None", self._qp.init_attr.srq) or self.receive
        self._segments, self.complete_receive = shared.segments, shared.complete
        self._receiving_pd = (self._qp.init_attr.srq or self._qp).pd

    def post(self, queue: Queue[Request, object], requests: Sequence[Request]) -> None:
        try:
            super().post(queue, requests)
        finally:
            if queue is self.send:
                self._doorbell_rung()

    def deliver(self, counter: int, payload: bytes) -> WcStatus:
        """Copy a completion's payload to the buffers of its receive. The caller completes the receive afterwards."""
        return scatter(self._segments(counter), payload, self._device, self._receiving_pd.pdn)
