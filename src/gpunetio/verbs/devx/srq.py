"""Shared receive queues created with DEVX commands: RMPs whose receives are a linked list or a ring."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from weakref import proxy

import numpy as np

from ...enums import SrqType
from ...errors import BadStateError, DocaError, FullError, InvalidValueError
from ...formats.commands import (
    CREATE_RMP_IN,
    CREATE_RMP_OUT,
    MODIFY_RMP_IN,
    OUT,
    QUERY_RMP_IN,
    QUERY_RMP_OUT,
    Opcode,
    RmpState,
    WqType,
)
from ...formats.doorbell import PI_MASK, QP_DBREC
from ...formats.wqe import INVALID_LKEY, SEGMENT, SRQ_NEXT_SEG
from ..commands import command, destroy
from ..events import OF_SRQ
from ..srq import SRQ, SrqAttr, SrqInitAttr
from ..work import BadWrError, RecvWr
from .queues import data_segments
from .ring import doorbells, in_its_place, internal_ring, place_ring

_WQ_TYPE = {SrqType.LINKED_LIST: WqType.LINKED_LIST, SrqType.CONTIGUOUS: WqType.CYCLIC}
_END_PADDING_ALIGN = 1  # wq.end_padding_mode


def srq_sizes(srq_wr: int, receive_max_sges: int, srq_type: SrqType) -> tuple[int, int]:
    """Return the number of WQEs in a ring for this many receives, and the bytes of each WQE."""
    linked = srq_type == SrqType.LINKED_LIST
    # One WQE of a linked list stays unused, because the list never ends.
    entries = 1 << (max(srq_wr, 1) if linked else srq_wr - 1).bit_length()
    return entries, 1 << (SEGMENT * (receive_max_sges + linked) - 1).bit_length()


class DevxSRQ(SRQ):
    """A shared receive queue created with DEVX commands."""

    def _create(self, attr: SrqInitAttr, undo: ExitStack) -> None:
        ctx, provider = self.ctx, self.ctx.provider
        linked = attr.srq_type == SrqType.LINKED_LIST
        self.entries, self.stride = srq_sizes(attr.srq_wr, attr.receive_max_sges, attr.srq_type)
        ring = place_ring(ctx, attr, undo, self.entries * self.stride)
        self._use(*ring.umems)
        mailbox = CREATE_RMP_IN.pack(
            opcode=Opcode.CREATE_RMP,
            ctx={
                "state": RmpState.RDY,
                "basic_cyclic_rcv_wqe": not linked,
                "wq": {
                    "wq_type": _WQ_TYPE[attr.srq_type], "pd": self.pd.pdn, "end_padding_mode": _END_PADDING_ALIGN,
                    "log_wq_sz": self.entries.bit_length() - 1, "log_wq_stride": self.stride.bit_length() - 1,
                    "wq_umem_valid": 1, "wq_umem_id": ring.umem_id, "wq_umem_offset": ring.offset,
                    "dbr_umem_valid": 1, "dbr_umem_id": ring.dbr_umem_id, "dbr_addr": ring.dbr_offset,
                },
            },
        )
        with command("CREATE_RMP"):
            self._handle, out = provider.devx_obj_create(bytes(mailbox), CREATE_RMP_OUT.size)
        self._larger = ExitStack()  # frees the rings that replaced the first one
        undo.callback(self._larger.close)
        undo.callback(destroy, provider, "DESTROY_RMP", self._handle)
        ctx.async_events.subscribe(self, self._handle, OF_SRQ, undo)
        self.srqn = int(CREATE_RMP_OUT.get(out, "rmpn"))
        self.ring_address, self.dbr_address = ring.address, ring.dbr_address + QP_DBREC.rcv
        self.ring = ring
        self._list = None
        if ring.memory and linked and not attr.external_datapath:
            wqes = ring.memory.array[: self.entries * self.stride].reshape(self.entries, self.stride)
            self._list = FreeList(self, wqes)

    def _resize(self, max_wr: int) -> None:
        if self._list is None:
            raise BadStateError(f"{self} has an external data path: its ring cannot be resized here")
        entries = 1 << max_wr.bit_length()
        if entries < self.entries:
            raise InvalidValueError(f"max_wr = {max_wr}: {self} has room for {self.entries - 1} and can only grow")
        if entries > self.entries:
            self._grow(self._list, entries)

    def _grow(self, receives: FreeList, entries: int) -> None:
        """Replace the ring with a larger one, which begins with the old ring's contents.

        The old ring stays allocated: the device may be using one of its receives.
        """
        with ExitStack() as undo:
            ring = internal_ring(self.ctx, undo, entries * self.stride)
            assert ring.memory
            wqes = ring.memory.array[: entries * self.stride].reshape(entries, self.stride)
            mailbox = MODIFY_RMP_IN.pack(
                opcode=Opcode.MODIFY_RMP, rmp_state=RmpState.RDY, rmpn=self.srqn, modify_size=1,
                ctx={"state": RmpState.RDY, "wq": {
                    "log_wq_sz": entries.bit_length() - 1, "log_wq_stride": self.stride.bit_length() - 1,
                    "wq_umem_valid": 1, "wq_umem_id": ring.umem_id, "wq_umem_offset": ring.offset,
                }},
            )
            with receives.moved_to(wqes), command("MODIFY_RMP"):
                self.ctx.provider.devx_obj_modify(self._handle, bytes(mailbox), OUT.size)
            self._larger.callback(undo.pop_all().close)
        self.ring_address, self.entries = ring.address, entries
        self.ring = in_its_place(self.ring, ring)

    def _post(self, requests: tuple[RecvWr, ...]) -> None:
        if self._list is None:
            raise BadStateError(f"{self} has an external data path: its ring is yours to fill")
        self._list.post(requests)

    @property
    def external_datapath(self) -> bool:
        return self._list is None

    def segments(self, index: int) -> bytes:
        """Return the data segments of the receive in this WQE."""
        return self._list.segments(index) if self._list else b""

    def complete(self, index: int) -> int:
        """Complete the receive in this WQE, and return its wr_id."""
        return self._list.complete(index) if self._list else 0

    def _query(self) -> SrqAttr:
        mailbox = QUERY_RMP_IN.pack(opcode=Opcode.QUERY_RMP, rmpn=self.srqn)
        with command("QUERY_RMP"):
            out = self.ctx.provider.devx_obj_query(self._handle, bytes(mailbox), QUERY_RMP_OUT.size)
        usable = self.entries - (self.type == SrqType.LINKED_LIST)
        return SrqAttr(usable, self.max_sge, QUERY_RMP_OUT.get(out, "ctx")["wq"]["lwm"])

    def _arm(self, srq_limit: int) -> None:
        mailbox = MODIFY_RMP_IN.pack(
            opcode=Opcode.MODIFY_RMP, rmp_state=RmpState.RDY, rmpn=self.srqn, modify_lwm=1,
            ctx={"state": RmpState.RDY, "wq": {"lwm": srq_limit}},  # the state to be in; 0 would be RST
        )
        with command("MODIFY_RMP"):
            self.ctx.provider.devx_obj_modify(self._handle, bytes(mailbox), OUT.size)


class FreeList:
    """The WQEs of a linked list, as this process fills them.

    Each WQE names its successor, in a circle. The device follows the chain from WQE 0. The free WQEs follow the posted
    ones, from `_head` to `_tail`; `_tail` itself is never used. A completed WQE is appended after `_tail`.
    """

    def __init__(self, srq: DevxSRQ, wqes: np.ndarray):
        self._srq, self._wqes = proxy(srq), wqes
        self._lock, self._doorbells = threading.Lock(), doorbells()
        count = len(wqes)
        self._next = [(index + 1) % count for index in range(count)]
        self._wr_ids = [0] * count
        self._head, self._tail, self._posted = 0, count - 1, 0
        for index, following in enumerate(self._next):
            _write_next(wqes, index, following)

    @contextmanager
    def moved_to(self, wqes: np.ndarray) -> Iterator[None]:
        """Move to a larger ring. The block must tell the device about it.

        Posted receives keep their indices.
        """
        with self._lock:
            before, count = len(self._wqes), len(wqes)
            wqes[:before] = self._wqes
            for index, following in pairwise((self._tail, *range(before, count))):
                _write_next(wqes, index, following)
            yield
            self._wqes = wqes
            self._next[self._tail] = before
            self._next += [*range(before + 1, count), 0]
            self._wr_ids += [0] * (count - before)
            self._tail = count - 1

    def post(self, requests: tuple[RecvWr, ...]) -> None:
        """Fill WQEs, and ring the doorbell once."""
        with self._lock:
            before = self._posted
            try:
                for number, request in enumerate(requests):
                    try:
                        self._put(request)
                    except DocaError as error:
                        raise BadWrError(number, request, error) from error
            finally:
                if self._posted != before:
                    self._doorbells.ring_receive(self._srq.dbr_address, self._posted & PI_MASK)

    def _put(self, request: RecvWr) -> None:
        if self._head == self._tail:
            raise FullError(f"{self._srq} has no room: all its {len(self._next) - 1} receives are posted; poll the CQ")
        data, _ = data_segments(request, self._srq.max_sge, "receive_max_sges")
        room = self._srq.stride - SEGMENT
        if len(data) < room:
            data += struct.pack(">IIQ", 0, INVALID_LKEY, 0)
        index = self._head
        self._wqes[index, SEGMENT:] = np.frombuffer(data.ljust(room, b"\0"), np.uint8)
        self._wr_ids[index] = request.wr_id
        self._head = self._next[index]
        self._posted += 1

    def segments(self, index: int) -> bytes:
        """Return the data segments of a WQE."""
        return self._wqes[index, SEGMENT:].tobytes()

    def complete(self, index: int) -> int:
        """Append the WQE to the chain, and return its wr_id."""
        with self._lock:
            _write_next(self._wqes, self._tail, index)
            self._next[self._tail] = index
            self._tail = index
            return self._wr_ids[index]


def _write_next(wqes: np.ndarray, index: int, following: int) -> None:
    at = SRQ_NEXT_SEG.next_wqe_index
    wqes[index, at : at + 2] = following >> 8, following & 0xFF
