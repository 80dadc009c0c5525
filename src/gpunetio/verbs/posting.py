"""The CPU data path of a queue pair: its rings as this process fills them, and what waits in them for completion."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..enums import QpState, QpType, SendFlags, WcOpcode, WrOpcode
from ..errors import BadStateError, DocaError, FullError, InvalidValueError
from ..formats.doorbell import PI_MASK, QP_DBREC
from ..formats.wqe import (
    CE_SHIFT,
    FM_SHIFT,
    INLINE_SEG,
    INVALID_LKEY,
    MAX_TRANSFER,
    SEGMENT,
    WQEBB,
    CompletionMode,
    CtrlFlags,
    FenceMode,
    WqeOpcode,
)  # fmt: skip
from .arguments import instance
from .doorbell import ring_receive, ring_send
from .work import BadWrError, RecvWr, SendWr, Sge

if TYPE_CHECKING:
    from ..memory import HostMemory
    from .qp import QP

_U32, _U64 = 1 << 32, 1 << 64
_ATOMIC_BYTES = 8


@dataclass(frozen=True)
class _Kind:
    """What an opcode becomes."""

    wqe: WqeOpcode
    completion: WcOpcode
    remote: bool = False  # it names memory of the peer
    reads: bool = False  # it brings something back
    imm: bool = False

    @property
    def atomic(self) -> bool:
        return self.completion in (WcOpcode.COMP_SWAP, WcOpcode.FETCH_ADD)


_KINDS = {
    WrOpcode.SEND:                 _Kind(WqeOpcode.SEND,           WcOpcode.SEND),
    WrOpcode.SEND_WITH_IMM:        _Kind(WqeOpcode.SEND_IMM,       WcOpcode.SEND, imm=True),
    WrOpcode.RDMA_WRITE:           _Kind(WqeOpcode.RDMA_WRITE,     WcOpcode.RDMA_WRITE, remote=True),
    WrOpcode.RDMA_WRITE_WITH_IMM:  _Kind(WqeOpcode.RDMA_WRITE_IMM, WcOpcode.RDMA_WRITE, remote=True, imm=True),
    WrOpcode.RDMA_READ:            _Kind(WqeOpcode.RDMA_READ,      WcOpcode.RDMA_READ, remote=True, reads=True),
    WrOpcode.ATOMIC_CMP_AND_SWP:   _Kind(WqeOpcode.ATOMIC_CS,      WcOpcode.COMP_SWAP, remote=True, reads=True),
    WrOpcode.ATOMIC_FETCH_AND_ADD: _Kind(WqeOpcode.ATOMIC_FA,      WcOpcode.FETCH_ADD, remote=True, reads=True),
}  # fmt: skip


def _check_range(name: str, value: int, most: int) -> int:
    if not 0 <= value < most:
        raise InvalidValueError(f"{name} = {value:#x} does not fit in {(most - 1).bit_length()} bits")
    return value


def data_segments(sges: Sequence[Sge], most: int, limit: str) -> tuple[bytes, int]:
    """Data segments, up to `most`, and the bytes that they name; `limit` is the attribute that says how many.

    Empty ones are left out: 0 in a segment means 2^31 bytes.
    """
    if len(sges) > most:
        raise InvalidValueError(f"{len(sges)} scatter/gather entries: the queue takes {most} ({limit})")
    packed, total = [], 0
    for sge in sges:
        if not 0 <= sge.length <= MAX_TRANSFER:
            raise InvalidValueError(f"length = {sge.length}: a scatter/gather entry has 0 to {MAX_TRANSFER} bytes")
        _check_range("address", sge.address, _U64)
        _check_range("lkey", sge.lkey, _U32)
        total += sge.length
        if sge.length:
            packed.append(struct.pack(">IIQ", sge.length, sge.lkey, sge.address))
    return b"".join(packed), total


class SendQueue:
    """The send ring. Indices count basic blocks for ever."""

    takes = SendWr

    def __init__(self, qp: QP, ring: np.ndarray):
        self._qp, self._ring = qp, ring.reshape(-1, WQEBB)
        self._posted: deque[tuple[int, int, WcOpcode, int]] = deque()  # index, wr_id, opcode, index behind it
        self.producer = self.consumer = 0

    @property
    def size(self) -> int:
        """Basic blocks of the ring."""
        return len(self._ring)

    def put(self, request: SendWr) -> None:
        """Write the WQE of a request; nothing is rung yet."""
        kind = _KINDS.get(request.opcode)
        if kind is None:
            raise InvalidValueError(f"opcode = {request.opcode}: it must be a WrOpcode")
        if kind.reads and self._qp.init_attr.qp_type != QpType.RC:
            raise InvalidValueError(f"{request.opcode.name} on a UC queue pair: only RC has READs and atomics")
        body = self._body(request, kind)
        segments = 1 + len(body) // SEGMENT
        blocks = -(-segments * SEGMENT // WQEBB)
        if self.producer + blocks - self.consumer > len(self._ring):
            raise FullError(
                f"{self._qp} has no room: {self.producer - self.consumer} of {len(self._ring)} basic blocks of its "
                "send queue wait for completion; poll the CQ, with a signalled request now and then"
            )
        imm = _check_range("imm", request.imm, _U32) if kind.imm else 0
        control = struct.pack(
            ">IIBHBI", (self.producer & PI_MASK) << 8 | kind.wqe, self._qp.qpn << 8 | segments, 0, 0,
            self._flags(request), imm,
        )  # fmt: skip
        wqe = np.frombuffer((control + body).ljust(blocks * WQEBB, b"\0"), np.uint8).reshape(-1, WQEBB)
        for i in range(blocks):
            self._ring[(self.producer + i) % len(self._ring)] = wqe[i]
        self._posted.append((self.producer, request.wr_id, kind.completion, self.producer + blocks))
        self.producer += blocks

    def _flags(self, request: SendWr) -> int:
        """The byte fm_ce_se."""
        signaled = SendFlags.SIGNALED in request.flags or self._qp.init_attr.sq_sig_all
        value = (CompletionMode.ALWAYS if signaled else CompletionMode.ON_ERROR) << CE_SHIFT
        if SendFlags.SOLICITED in request.flags:
            value |= CtrlFlags.SOLICITED
        if SendFlags.FENCE in request.flags:
            value |= FenceMode.FENCE_AND_INITIATOR_SMALL_FENCE << FM_SHIFT
        return value

    def _body(self, request: SendWr, kind: _Kind) -> bytes:
        """The segments behind the control segment."""
        attr, parts = self._qp.init_attr, []
        if kind.remote:
            remote = _check_range("remote_addr", request.remote_addr, _U64)
            parts.append(struct.pack(">QII", remote, _check_range("rkey", request.rkey, _U32), 0))
        if kind.atomic:
            words = (request.add, 0) if kind.completion == WcOpcode.FETCH_ADD else (request.swap, request.compare)
            parts.append(struct.pack(">QQ", *(word & _U64 - 1 for word in words)))
        data, nbytes = data_segments(request.sges, attr.send_max_sges, "send_max_sges")
        if request.inline is not None or SendFlags.INLINE in request.flags:
            return b"".join(parts) + self._inline(request, kind)
        if kind.atomic and nbytes != _ATOMIC_BYTES:
            raise InvalidValueError(f"{nbytes} bytes for the result of an atomic: give one entry of {_ATOMIC_BYTES}")
        if nbytes > MAX_TRANSFER:
            raise InvalidValueError(f"{nbytes} bytes: a request has {MAX_TRANSFER} at most")
        return b"".join(parts) + data

    def _inline(self, request: SendWr, kind: _Kind) -> bytes:
        if kind.reads:
            raise InvalidValueError(f"{request.opcode.name} brings data here: it cannot be inline")
        if request.inline is not None and request.sges:
            raise InvalidValueError("inline bytes and scatter/gather entries: give one of the two")
        payload = request.inline
        if payload is None:
            payload = b"".join(ctypes.string_at(sge.address, sge.length) for sge in request.sges)
        elif not isinstance(payload, bytes):
            payload = memoryview(payload).tobytes()
        most = self._qp.init_attr.max_inline_data
        if len(payload) > most:
            raise InvalidValueError(f"{len(payload)} bytes inline: {self._qp} takes {most} (max_inline_data)")
        if not payload:
            return b""
        packed = struct.pack(">I", INLINE_SEG | len(payload)) + payload
        return packed.ljust(-(-len(packed) // SEGMENT) * SEGMENT, b"\0")

    def ring(self) -> None:
        """Announce what was put."""
        qp = self._qp
        ring_send(qp.dbr_address + QP_DBREC.snd, self.producer & PI_MASK, qp.doorbell_register, qp.qpn)

    def complete(self, counter: int) -> tuple[int, WcOpcode]:
        """The request whose index ends in these 16 bits has completed, and with it all before: (wr_id, opcode)."""
        while True:
            index, wr_id, opcode, self.consumer = self._posted.popleft()
            if index & PI_MASK == counter:
                return wr_id, opcode


class ReceiveQueue:
    """The receive ring. Indices count WQEs for ever."""

    takes = RecvWr

    def __init__(self, qp: QP, ring: np.ndarray):
        self._qp, self._ring = qp, ring.reshape(-1, qp.rq_stride or SEGMENT)
        self._wr_ids = [0] * qp.rq_entries
        self.producer = self.consumer = 0

    @property
    def size(self) -> int:
        """WQEs of the ring."""
        return len(self._ring)

    def put(self, request: RecvWr) -> None:
        """Write the WQE of a request; nothing is rung yet."""
        if self.producer - self.consumer == len(self._ring):
            raise FullError(f"{self._qp} has no room: all {len(self._ring)} receives are posted; poll the CQ first")
        data, _ = data_segments(request.sges, self._qp.init_attr.receive_max_sges, "receive_max_sges")
        if len(data) < self._qp.rq_stride:
            data += struct.pack(">IIQ", 0, INVALID_LKEY, 0)
        slot = self.producer % len(self._ring)
        self._ring[slot] = np.frombuffer(data.ljust(self._qp.rq_stride, b"\0"), np.uint8)
        self._wr_ids[slot] = request.wr_id
        self.producer += 1

    def ring(self) -> None:
        """Announce what was put."""
        ring_receive(self._qp.dbr_address + QP_DBREC.rcv, self.producer & PI_MASK)

    def complete(self) -> int:
        """The oldest receive has completed: its wr_id."""
        wr_id = self._wr_ids[self.consumer % len(self._ring)]
        self.consumer += 1
        return wr_id


class Posting:
    """Both queues of a QP whose rings are ours. `state` is the last one that this process has asked for."""

    def __init__(self, qp: QP, memory: HostMemory):
        self._qp, self.lock = qp, threading.Lock()
        sends = qp.sq_address - memory.address
        self._rings = memory.array[sends : sends + qp.sq_entries * WQEBB], memory.array[: qp.rq_entries * qp.rq_stride]
        self.state = QpState.RST
        self.reset()

    def reset(self) -> None:
        """The QP is in RST: nothing is posted."""
        self.send, self.receive = SendQueue(self._qp, self._rings[0]), ReceiveQueue(self._qp, self._rings[1])

    @property
    def used(self) -> bool:
        """Whether anything was posted since the last reset."""
        return self.send.producer + self.receive.producer != 0

    def post(self, queue: SendQueue | ReceiveQueue, requests: Iterable[SendWr] | Iterable[RecvWr]) -> None:
        """Post requests, and ring once."""
        if queue.size == 0:
            raise InvalidValueError(f"{self._qp} has no such queue: create it with sq_wr or rq_wr above 0")
        with self.lock:
            index = -1
            try:
                for index, request in enumerate(requests):
                    try:
                        instance("request", request, queue.takes)
                        queue.put(request)  # type: ignore[arg-type]
                    except DocaError as error:
                        raise BadWrError(index, request, error) from error
                    except (AttributeError, TypeError, ValueError, struct.error) as error:  # a value of no use in a WQE
                        cause = InvalidValueError(f"a value is of the wrong type in {request}: {error}")
                        raise BadWrError(index, request, cause) from error
            finally:
                if index >= 0:
                    queue.ring()

    def check(self, what: str, least: QpState) -> None:
        """Raise BadStateError in a state that takes no such request."""
        if self.state < least:
            raise BadStateError(f"{self._qp} is in {self.state.name}: it takes {what} from {least.name} on")
