"""The base class of Ethernet send queues, for kernels and for CPU programs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from contextlib import ExitStack

from ..arguments import instance, whole
from ..enums import UarAllocationType
from ..errors import InvalidValueError, NotSupportedError
from ..formats.commands import Opcode, WqType
from ..formats.ethernet_queues import InlineMode, QueueState, TimestampFormat
from ..formats.wqe import WQEBB_SHIFT, EthChecksum
from ..verbs import CQ, PD, UAR, DevxObject, Handle
from ..verbs.devx.ring import Ring
from .caps import EthCaps, query_caps

LEAST_DEPTH = 64  # basic blocks: enough for the longest WQEs and their completions


class SendQueue(Handle, ABC):
    """A send queue of Ethernet packets: SQ number `sqn`.

    `depth`               basic blocks of 64 bytes in its ring at `sq_address`; a packet takes one
    `dbr_address`         doorbell record
    `doorbell_register`   register that a post rings
    `cq`                  the CQ where packets complete
    `caps`                the device's capabilities

    `qpn` and `sq_entries` equal `sqn` and `depth`; these are the names of a queue pair's attributes.
    """

    _rank = 0
    sqn: int
    qpn: int
    sq_address: int
    sq_entries: int
    dbr_address: int
    pd: PD
    cq: CQ
    uar: UAR
    caps: EthCaps
    depth: int
    ring: Ring
    doorbell_register: int
    cs_flags: int

    def __init__(self, pd: PD, depth: int, checksum: bool, inline: InlineMode):
        """`inline` is the headers that this queue can copy into its WQEs."""
        super().__init__(instance("pd", pd, PD).ctx)
        self._use(pd, pd.ctx)
        self.pd, self.caps = pd, query_caps(pd.ctx)
        if (depth := whole("depth", depth)) < 1:
            raise InvalidValueError(f"depth = {depth}: a send queue has one basic block at least")
        if depth > self.caps.max_send_depth:
            raise NotSupportedError(
                f"depth = {depth}: a send queue of {self.ctx} has {self.caps.max_send_depth} basic blocks at most"
            )
        if checksum and not self.caps.checksum:
            raise NotSupportedError(f"checksum: {self.ctx} computes no checksums of Ethernet packets; do it yourself")
        if self.caps.min_inline > inline:
            raise NotSupportedError(
                f"{self.ctx} wants the headers of each packet up to {self.caps.min_inline.name} in the WQE; a "
                f"{type(self).__name__} has {inline.name}"
            )
        self.depth = max(LEAST_DEPTH, 1 << (depth - 1).bit_length())
        self.cs_flags = EthChecksum.L3 | EthChecksum.L4 if checksum else EthChecksum(0)

    def _details(self) -> Iterable[str]:
        yield f"SQ {self.sqn:#x}"
        yield f"{self.depth} basic blocks"

    def _create(self, cq: CQ, ring: Ring, uar: UAR, undo: ExitStack) -> None:
        """Create the TIS and the SQ, and move the SQ to RDY."""
        devx, self.cq, self.ring, self.uar = self.ctx.devx, cq, ring, uar
        tis = devx.create(Opcode.CREATE_TIS, ctx={"transport_domain": devx.transport_domain().number})
        undo.callback(tis.close)
        real_time = self.caps.real_time_send
        self._sq = devx.create(
            Opcode.CREATE_SQ, uses=(cq, tis, uar),
            ctx={
                "cqn": cq.cqn, "tis_lst_sz": 1, "tis_num_0": tis.number, "flush_in_error_en": 1,
                "allow_multi_pkt_send_wqe": self.caps.multi_packet, "min_wqe_inline_mode": self.caps.min_inline,
                "ts_format": TimestampFormat.REAL_TIME if real_time else TimestampFormat.FREE_RUNNING,
                "wq": {
                    "wq_type": WqType.CYCLIC, "pd": self.pd.pdn, "uar_page": uar.page_id,
                    "log_wq_sz": self.depth.bit_length() - 1, "log_wq_stride": WQEBB_SHIFT,
                    "wq_umem_valid": 1, "wq_umem_id": ring.umem_id, "wq_umem_offset": ring.offset,
                    "dbr_umem_valid": 1, "dbr_umem_id": ring.dbr_umem_id, "dbr_addr": ring.dbr_offset,
                },
            },
        )
        undo.callback(self._sq.close)
        self.sqn = self.qpn = self._sq.number
        self.sq_address, self.sq_entries, self.dbr_address = ring.address, self.depth, ring.dbr_address
        self.doorbell_register = self.ctx.provider.doorbell_register(uar.page, self.sqn)
        self._ready()

    def _stop(self) -> None:
        """Move the SQ to RST, where it sends nothing and the device forgets its position."""
        self._sq.modify(Opcode.MODIFY_SQ, sq_state=self.state, ctx={"state": QueueState.RST})

    def _ready(self) -> None:
        """Move the SQ from RST to RDY."""
        self._sq.modify(Opcode.MODIFY_SQ, sq_state=QueueState.RST, ctx={"state": QueueState.RDY})

    def _shared_uar(self) -> UAR:
        return self.ctx.shared_uar(UarAllocationType.NONCACHE_DEDICATED, UarAllocationType.NONCACHE)

    @property
    def sq(self) -> DevxObject:
        """Return the SQ, for commands of your choice."""
        self.check_open()
        return self._sq

    @property
    def state(self) -> QueueState:
        """Return the SQ's state on the device. A WQE that fails moves it to ERR."""
        self.check_open()
        return QueueState(self._sq.query()["ctx"]["state"])
