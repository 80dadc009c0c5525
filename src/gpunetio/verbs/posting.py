"""The CPU data path of a queue pair: its rings as this process fills them, and what waits in them for completion."""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..enums import QpState, QpType, SendFlags, WcOpcode, WcStatus, WrOpcode
from ..errors import BadStateError, DocaError, FullError, InvalidValueError
from ..formats.doorbell import PI_MASK, QP_DBREC
from ..formats.wqe import (
    CE_SHIFT,
    CTRL_SEG,
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
from .ring import doorbells
from .scatter import scatter
from .work import BadWrError, RecvWr, SendWr, Sge

if TYPE_CHECKING:
    from ..memory import HostMemory
    from .qp import QP

_U24, _U32, _U64 = 1 << 24, 1 << 32, 1 << 64
_ATOMIC_BYTES = 8
_CONTROL, _REMOTE, _DATA = struct.Struct(">IIBHBI"), struct.Struct(">QII"), struct.Struct(">IIQ")
_WAIT = struct.Struct(">8xII")
_SIGNALED, _INLINE = int(SendFlags.SIGNALED), int(SendFlags.INLINE)  # plain ints: those of an enumeration are slow
_FM_CE_SE = [  # the byte of that name, for the SendFlags FENCE, SIGNALED and SOLICITED
    (FenceMode.FENCE_AND_INITIATOR_SMALL_FENCE << FM_SHIFT if flags & SendFlags.FENCE else 0)
    | (CompletionMode.ALWAYS if flags & SendFlags.SIGNALED else CompletionMode.ON_ERROR) << CE_SHIFT
    | (CtrlFlags.SOLICITED if flags & SendFlags.SOLICITED else 0)
    for flags in range(8)
]
_INDEX = CTRL_SEG.opmod_idx_opcode + 1  # the 16 bits of a control segment that hold the WQE's index


@dataclass(frozen=True)
class _Kind:
    """What an opcode becomes."""

    wqe: WqeOpcode
    completion: WcOpcode
    remote: bool = False  # it names memory of the peer
    reads: bool = False  # it brings something back
    imm: bool = False

    @cached_property
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
    WrOpcode.WAIT_CQ_PI:           _Kind(WqeOpcode.WAIT,           WcOpcode.WAIT_CQ_PI),
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
    packed, total = b"", 0
    for sge in sges:
        if not 0 <= sge.length <= MAX_TRANSFER:
            raise InvalidValueError(f"length = {sge.length}: a scatter/gather entry has 0 to {MAX_TRANSFER} bytes")
        try:
            segment = _DATA.pack(sge.length, sge.lkey, sge.address)
        except struct.error:
            _check_range("address", sge.address, _U64)
            _check_range("lkey", sge.lkey, _U32)
            raise
        total += sge.length
        if sge.length:
            packed += segment
    return packed, total


class _Queue(ABC):
    """A ring of WQEs, and what waits in it. Indices count slots for ever.

    A request is packed once, without its index: `_packed` is that and keeps it on the request, under a token of this
    queue. The poster moves `producer` and the poller `consumer`, so that the two need no lock between them.
    """

    def __init__(self, qp: QP, ring: np.ndarray):
        self._qp, self._ring = qp, ring
        self._token = object()
        self._doorbells = doorbells()
        self._mask = len(ring) - 1
        self._posted: list[Any] = [None] * len(ring)  # by slot: what `complete` needs to know
        self.producer = self.consumer = 0

    @property
    def size(self) -> int:
        """Slots of the ring."""
        return len(self._ring)

    def post(self, requests: Iterable[SendWr] | Iterable[RecvWr]) -> None:
        """Write the WQEs of requests, up to the first that is refused, and announce them."""
        token, room = self._token, len(self._ring) - (self.producer - self.consumer)
        wqes: list[bytes] = []
        firsts: list[int] = []  # of each WQE: its first slot
        posted: list[Any] = []
        request: Any = None
        try:
            for request in requests:
                packed = getattr(request, "packed", None)
                if packed is None or packed[0] is not token:
                    packed = self._pack(request)
                _, wqe, slots = packed
                if len(posted) + len(slots) > room:
                    raise FullError(self._no_room())
                firsts.append(len(posted))
                posted += slots
                wqes.append(wqe)
        except DocaError as error:
            raise BadWrError(len(wqes), request, error) from error
        except (AttributeError, TypeError, ValueError, struct.error) as error:  # a value of no use in a WQE
            cause = InvalidValueError(f"a value is of the wrong type in {request}: {error}")
            raise BadWrError(len(wqes), request, cause) from error
        finally:
            if wqes:
                self._write(bytearray(b"".join(wqes)), firsts, posted)
                self._ring_doorbell()

    def _write(self, wqes: bytearray, firsts: list[int], posted: list[Any]) -> None:
        self._number(wqes, firsts)
        block = np.frombuffer(wqes, np.uint8).reshape(len(posted), -1)
        start = self.producer & self._mask
        before_end = len(self._ring) - start
        for at, part in ((start, slice(before_end)), (0, slice(before_end, None))):
            count = len(posted[part])
            self._ring[at : at + count] = block[part]
            self._posted[at : at + count] = posted[part]
        self.producer += len(posted)

    def _keep(self, request: SendWr | RecvWr, wqe: bytes, slots: tuple) -> tuple[object, bytes, tuple]:
        packed = self._token, wqe, slots
        object.__setattr__(request, "packed", packed)
        return packed

    @abstractmethod
    def _pack(self, request: Any) -> tuple[object, bytes, tuple]:
        """Token, WQE with index 0, and what `_posted` gets for each of its slots."""

    @abstractmethod
    def _number(self, wqes: bytearray, firsts: list[int]) -> None:
        """Give WQEs the indices that they will have."""

    @abstractmethod
    def _ring_doorbell(self) -> None:
        """Announce all up to `producer`."""

    @abstractmethod
    def _no_room(self) -> str:
        """What is wrong when there is no room, and the cure."""


class SendQueue(_Queue):
    """The send ring. A slot is a basic block; `_posted` has (wr_id, opcode, whether it brings data, blocks)."""

    def __init__(self, qp: QP, ring: np.ndarray):
        super().__init__(qp, ring)
        self._always = _SIGNALED if qp.init_attr.sq_sig_all else 0

    def _pack(self, request: SendWr) -> tuple[object, bytes, tuple]:
        kind = _KINDS.get(instance("request", request, SendWr).opcode)
        if kind is None:
            raise InvalidValueError(f"opcode = {request.opcode}: it must be a WrOpcode")
        if kind.reads and self._qp.init_attr.qp_type != QpType.RC:
            raise InvalidValueError(f"{request.opcode.name} on a UC queue pair: only RC has READs and atomics")
        flags = int(request.flags)
        inline = request.inline is not None or flags & _INLINE != 0
        body = self._body(request, kind, inline)
        imm = _check_range("imm", request.imm, _U32) if kind.imm else 0
        segments = 1 + len(body) // SEGMENT
        blocks = -(-segments * SEGMENT // WQEBB)
        fm_ce_se = _FM_CE_SE[(flags | self._always) & 7]
        control = _CONTROL.pack(kind.wqe, self._qp.qpn << 8 | segments, 0, 0, fm_ce_se, imm)
        wqe = (control + body).ljust(blocks * WQEBB, b"\0")
        slots = ((request.wr_id, kind.completion, kind.reads, blocks), *(None,) * (blocks - 1))
        if inline and type(request.inline) is not bytes:
            return self._token, wqe, slots  # its bytes may be others next time
        return self._keep(request, wqe, slots)

    def _number(self, wqes: bytearray, firsts: list[int]) -> None:
        places = np.array(firsts)
        indices = np.ndarray(len(wqes) // WQEBB, ">u2", wqes, _INDEX, (WQEBB,))
        indices[places] = self.producer + places & PI_MASK

    def _no_room(self) -> str:
        return (
            f"{self._qp} has no room: {self.producer - self.consumer} of {len(self._ring)} basic blocks of its "
            "send queue wait for completion; poll the CQ, with a signalled request now and then"
        )

    def _body(self, request: SendWr, kind: _Kind, inline: bool) -> bytes:
        """The segments behind the control segment."""
        if kind.wqe == WqeOpcode.WAIT:
            return self._wait(request)
        head = b""
        if kind.remote:
            try:
                head = _REMOTE.pack(request.remote_addr, request.rkey, 0)
            except struct.error:
                _check_range("remote_addr", request.remote_addr, _U64)
                _check_range("rkey", request.rkey, _U32)
                raise
        if kind.atomic:
            words = (request.add, 0) if kind.completion == WcOpcode.FETCH_ADD else (request.swap, request.compare)
            head += struct.pack(">QQ", *(word & _U64 - 1 for word in words))
        data, nbytes = data_segments(request.sges, self._qp.init_attr.send_max_sges, "send_max_sges")
        if inline:
            return head + self._inline(request, kind)
        if kind.atomic and nbytes != _ATOMIC_BYTES:
            raise InvalidValueError(f"{nbytes} bytes for the result of an atomic: give one entry of {_ATOMIC_BYTES}")
        if nbytes > MAX_TRANSFER:
            raise InvalidValueError(f"{nbytes} bytes: a request has {MAX_TRANSFER} at most")
        return head + data

    def _wait(self, request: SendWr) -> bytes:
        if not self._qp.init_attr.core_direct_master:
            raise InvalidValueError(f"WAIT_CQ_PI on {self._qp}: create it with core_direct_master")
        if request.sges or request.inline is not None:
            raise InvalidValueError("WAIT_CQ_PI carries no data: leave out sges and inline")
        _check_range("wait_cqn", request.wait_cqn, _U24)
        return _WAIT.pack(request.wait_pi & _U32 - 1, request.wait_cqn)

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

    def _ring_doorbell(self) -> None:
        qp = self._qp
        self._doorbells.ring_send(qp.dbr_address + QP_DBREC.snd, self.producer & PI_MASK, qp.doorbell_register, qp.qpn)

    def complete(self, counter: int) -> tuple[int, WcOpcode, bool]:
        """The request whose index ends in these 16 bits has completed, and with it all before: what it was."""
        wr_id, opcode, reads, blocks = self._posted[counter & self._mask]
        self.consumer += (counter - self.consumer & PI_MASK) + blocks
        return wr_id, opcode, reads


class ReceiveQueue(_Queue):
    """The receive ring. A slot is a WQE; `_posted` has its wr_id."""

    def _pack(self, request: RecvWr) -> tuple[object, bytes, tuple]:
        sges = instance("request", request, RecvWr).sges
        data, _ = data_segments(sges, self._qp.init_attr.receive_max_sges, "receive_max_sges")
        if len(data) < self._qp.rq_stride:
            data += struct.pack(">IIQ", 0, INVALID_LKEY, 0)
        return self._keep(request, data.ljust(self._qp.rq_stride, b"\0"), (request.wr_id,))

    def _number(self, wqes: bytearray, firsts: list[int]) -> None:
        """Receives have no indices."""

    def _no_room(self) -> str:
        return f"{self._qp} has no room: all {len(self._ring)} receives are posted; poll the CQ first"

    def _ring_doorbell(self) -> None:
        self._doorbells.ring_receive(self._qp.dbr_address + QP_DBREC.rcv, self.producer & PI_MASK)

    def segments(self, counter: int) -> bytes:
        """The data segments of the oldest receive."""
        return self._ring[self.consumer & self._mask].tobytes()

    def complete(self, counter: int) -> int:
        """The oldest receive has completed: its wr_id. They complete in order."""
        wr_id = self._posted[self.consumer & self._mask]
        self.consumer += 1
        return wr_id


class Posting:
    """Both queues of a QP whose rings are ours. `state` is the last one that this process has asked for."""

    def __init__(self, qp: QP, memory: HostMemory):
        self._qp, self.lock = qp, threading.Lock()
        self._doorbell_rung = qp.ctx.provider.doorbell_rung
        sends = qp.sq_address - memory.address
        self._rings = memory.array[sends : sends + qp.sq_entries * WQEBB], memory.array[: qp.rq_entries * qp.rq_stride]
        self.state = QpState.RST
        self.reset()

    def reset(self) -> None:
        """The QP is in RST: nothing is posted."""
        sends, receives = self._rings
        self.send = SendQueue(self._qp, sends.reshape(-1, WQEBB))
        self.receive = ReceiveQueue(self._qp, receives.reshape(-1, self._qp.rq_stride or SEGMENT))
        receives = self._qp.init_attr.srq or self.receive
        self._segments, self.complete_receive = receives.segments, receives.complete
        self._receiving_pd = (self._qp.init_attr.srq or self._qp).pd

    def deliver(self, counter: int, payload: bytes) -> WcStatus:
        """Put what a completion carries into the buffers of its receive, which is not complete before."""
        return scatter(self._segments(counter), payload, self._qp.ctx.name, self._receiving_pd.pdn)

    @property
    def used(self) -> bool:
        """Whether anything was posted since the last reset, or may have been used of what was posted for many."""
        return self._qp.init_attr.srq is not None or self.send.producer + self.receive.producer != 0

    def post(self, queue: SendQueue | ReceiveQueue, requests: Iterable[SendWr] | Iterable[RecvWr]) -> None:
        """Post requests, and ring once."""
        if queue.size == 0:
            raise InvalidValueError(f"{self._qp} has no such queue: create it with sq_wr or rq_wr above 0")
        try:
            with self.lock:
                queue.post(requests)
        finally:
            if queue is self.send:
                self._doorbell_rung()

    def check(self, what: str, least: QpState) -> None:
        """Raise BadStateError in a state that takes no such request."""
        if self.state < least:
            raise BadStateError(f"{self._qp} is in {self.state.name}: it takes {what} from {least.name} on")
