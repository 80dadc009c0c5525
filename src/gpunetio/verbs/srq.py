"""Shared receive queues: one pool of receives for many queue pairs."""

from __future__ import annotations

import struct
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..enums import SrqType
from ..errors import BadStateError, DocaError, FullError, InvalidValueError, NotSupportedError
from ..formats.commands import (
    CREATE_RMP_IN,
    CREATE_RMP_OUT,
    MODIFY_RMP_IN,
    OUT,
    QUERY_RMP_IN,
    QUERY_RMP_OUT,
    Opcode,
    RmpState,
    WqType,
)  # fmt: skip
from ..formats.doorbell import PI_MASK, QP_DBREC
from ..formats.wqe import INVALID_LKEY, SEGMENT, SRQ_NEXT_SEG
from .arguments import member, whole, within
from .doorbell import ring_receive
from .events import OF_SRQ
from .handle import Handle, command, destroy
from .posting import data_segments
from .ring import check_places, external_ring, internal_ring
from .umem import UMEM
from .work import BadWrError, RecvWr

if TYPE_CHECKING:
    from .pd import PD

_WQ_TYPE = {SrqType.LINKED_LIST: WqType.LINKED_LIST, SrqType.CONTIGUOUS: WqType.CYCLIC}
_END_PADDING_ALIGN = 1  # wq.end_padding_mode


@dataclass(frozen=True)
class SrqAttr:
    """What a shared receive queue holds (`ibv_srq_attr`): requests, entries in each, and the limit that is armed."""

    max_wr: int
    max_sge: int
    srq_limit: int


class SRQ(Handle):
    """A shared receive queue (`doca_verbs_srq`), number `srqn`.

    `entries` WQEs of `stride` bytes are at `ring_address` (`doca_verbs_srq_get_wq`), the doorbell record, whose first
    word counts what was posted, at `dbr_address` (`doca_verbs_srq_get_dbr_addr`); `ring` says in which memory they lie.
    In a linked list the WQEs are used in the order in which they were posted, and become free as their messages
    complete, in any order.
    """

    _rank = 1

    def __init__(
        self,
        pd: PD,
        srq_wr: int,
        receive_max_sges: int,
        srq_type: SrqType,
        external_umem: tuple[UMEM, int] | None,
        external_dbr_umem: tuple[UMEM, int] | None,
        external_datapath: bool,
        context: Any,
    ):
        ctx = pd.ctx
        super().__init__(ctx)
        self._use(pd, ctx)
        check_places(external_umem, external_dbr_umem)
        srq_wr, receive_max_sges = whole("srq_wr", srq_wr), whole("receive_max_sges", receive_max_sges)
        srq_type = member("srq_type", srq_type, SrqType)
        external_datapath = bool(within("external_datapath", external_datapath, 0, 1))
        linked = self._check(srq_wr, receive_max_sges, srq_type, external_datapath or external_umem is not None)
        # One WQE of a linked list stays unused: the list never ends.
        self.entries = 1 << max(srq_wr - 1 + linked, 1).bit_length() if linked else 1 << (srq_wr - 1).bit_length()
        self.stride = 1 << (SEGMENT * (receive_max_sges + linked) - 1).bit_length()
        provider = ctx.provider
        with ExitStack() as undo:
            if external_umem and external_dbr_umem:
                self._use(external_umem[0], external_dbr_umem[0])
                ring = external_ring(external_umem, external_dbr_umem, self.entries * self.stride)
            else:
                ring = internal_ring(ctx, undo, self.entries * self.stride)
            mailbox = CREATE_RMP_IN.pack(
                opcode=Opcode.CREATE_RMP,
                ctx={
                    "state": RmpState.RDY,
                    "basic_cyclic_rcv_wqe": not linked,
                    "wq": {
                        "wq_type": _WQ_TYPE[srq_type], "pd": pd.pdn, "end_padding_mode": _END_PADDING_ALIGN,
                        "log_wq_sz": self.entries.bit_length() - 1, "log_wq_stride": self.stride.bit_length() - 1,
                        "wq_umem_valid": 1, "wq_umem_id": ring.umem_id, "wq_umem_offset": ring.offset,
                        "dbr_umem_valid": 1, "dbr_umem_id": ring.dbr_umem_id, "dbr_addr": ring.dbr_offset,
                    },
                },
            )  # fmt: skip
            with command("CREATE_RMP"):
                self._handle, out = provider.devx_obj_create(bytes(mailbox), CREATE_RMP_OUT.size)
            undo.callback(destroy, provider, "DESTROY_RMP", self._handle)
            ctx.async_events.subscribe(self, self._handle, OF_SRQ, undo)
            self.srqn = int(CREATE_RMP_OUT.get(out, "rmpn"))
            self.pd, self.type, self.max_sge, self.context = pd, srq_type, receive_max_sges, context
            self.ring_address, self.dbr_address = ring.address, ring.dbr_address + QP_DBREC.rcv
            self.ring = ring
            self._list = None
            if ring.memory and linked and not external_datapath:
                wqes = ring.memory.array[: self.entries * self.stride].reshape(self.entries, self.stride)
                self._list = FreeList(self, wqes)
            self._opened(f"SRQ {self.srqn:#x} of {ctx.name}", undo)

    def _check(self, srq_wr: int, max_sges: int, srq_type: SrqType, external: bool) -> bool:
        """Whether it is a linked list; raises for what the device cannot make."""
        device = self.ctx.query_device()
        if srq_type == SrqType.CONTIGUOUS and not external:
            raise InvalidValueError(
                "a CONTIGUOUS shared receive queue needs an external data path: set external_datapath, or choose "
                "LINKED_LIST"
            )
        limits = (("srq_wr", srq_wr, device.max_srq_wr), ("receive_max_sges", max_sges, device.max_srq_sge))
        for name, value, most in limits:
            if value < 1:
                raise InvalidValueError(f"{name} = {value}: it must be 1 to {most}")
            if value > most:
                raise NotSupportedError(f"{name} = {value}: the device has at most {most}")
        return srq_type == SrqType.LINKED_LIST

    def post_recv(self, *requests: RecvWr) -> None:
        """Post receives, in order (`doca_verbs_bridge_post_srq_recv`).

        BadWrError names the first request that is refused; those before it are posted.
        """
        self.check_open()
        if self._list is None:
            raise BadStateError(f"{self} has an external data path: its ring is yours to fill")
        self._list.post(requests)

    @property
    def external_datapath(self) -> bool:
        """Whether somebody else fills the ring."""
        return self._list is None

    def segments(self, index: int) -> bytes:
        """The data segments of the receive in this WQE."""
        return self._list.segments(index) if self._list else b""

    def complete(self, index: int) -> int:
        """The receive in this WQE has completed: its wr_id. The WQE is free again."""
        return self._list.complete(index) if self._list else 0

    def query(self) -> SrqAttr:
        """What it holds, and the limit as the device has it: 0 once its event was made (`doca_verbs_srq_query`)."""
        self.check_open()
        mailbox = QUERY_RMP_IN.pack(opcode=Opcode.QUERY_RMP, rmpn=self.srqn)
        with command("QUERY_RMP"):
            out = self.ctx.provider.devx_obj_query(self._handle, bytes(mailbox), QUERY_RMP_OUT.size)
        usable = self.entries - (self.type == SrqType.LINKED_LIST)
        return SrqAttr(usable, self.max_sge, QUERY_RMP_OUT.get(out, "ctx")["wq"]["lwm"])

    def modify(self, *, srq_limit: int) -> None:
        """Ask for one SRQ_LIMIT_REACHED event, when fewer than `srq_limit` receives are left; 0 for none.

        `ibv_modify_srq` with IBV_SRQ_LIMIT.
        """
        self.check_open()
        within("srq_limit", srq_limit, 0, self.entries)
        mailbox = MODIFY_RMP_IN.pack(
            opcode=Opcode.MODIFY_RMP, rmp_state=RmpState.RDY, rmpn=self.srqn, modify_lwm=1,
            ctx={"state": RmpState.RDY, "wq": {"lwm": srq_limit}},  # the state that is wanted: 0 would be RST
        )  # fmt: skip
        with command("MODIFY_RMP"):
            self.ctx.provider.devx_obj_modify(self._handle, bytes(mailbox), OUT.size)


class FreeList:
    """The WQEs of a linked list as this process fills them.

    Each WQE names the next one, all the way around. The device follows the chain from WQE 0, behind it a chain of free
    ones starts at `_head`, and its end, `_tail`, is never used. A WQE that completes is put behind the end.
    """

    def __init__(self, srq: SRQ, wqes: np.ndarray):
        self._srq, self._wqes = srq, wqes
        self._lock = threading.Lock()
        count = len(wqes)
        self._next = [(index + 1) % count for index in range(count)]
        self._wr_ids = [0] * count
        self._head, self._tail, self._posted = 0, count - 1, 0
        for index, following in enumerate(self._next):
            self._write_next(index, following)

    def _write_next(self, index: int, following: int) -> None:
        at = SRQ_NEXT_SEG.next_wqe_index
        self._wqes[index, at : at + 2] = following >> 8, following & 0xFF

    def post(self, requests: tuple[RecvWr, ...]) -> None:
        """Fill WQEs, and ring once."""
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
                    ring_receive(self._srq.dbr_address, self._posted & PI_MASK)

    def _put(self, request: RecvWr) -> None:
        if self._head == self._tail:
            raise FullError(f"{self._srq} has no room: all its {len(self._next) - 1} receives are posted; poll the CQ")
        data, _ = data_segments(request.sges, self._srq.max_sge, "receive_max_sges")
        room = self._srq.stride - SEGMENT
        if len(data) < room:
            data += struct.pack(">IIQ", 0, INVALID_LKEY, 0)
        index = self._head
        self._wqes[index, SEGMENT:] = np.frombuffer(data.ljust(room, b"\0"), np.uint8)
        self._wr_ids[index] = request.wr_id
        self._head = self._next[index]
        self._posted += 1

    def segments(self, index: int) -> bytes:
        """The data segments of a WQE."""
        return self._wqes[index, SEGMENT:].tobytes()

    def complete(self, index: int) -> int:
        """Put a WQE behind the end of the chain: its wr_id."""
        with self._lock:
            self._write_next(self._tail, index)
            self._next[self._tail] = index
            self._tail = index
            return self._wr_ids[index]
