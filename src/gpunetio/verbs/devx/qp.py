"""Queue pairs created with DEVX commands: rings of WQEs in host memory or in the user's UMEM."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ...enums import QpAttrMask, QpSendDbrMode, QpState, QpType
from ...enums import UarAllocationType as UarKind
from ...formats.commands import (
    CREATE_QP_IN,
    CREATE_QP_OUT,
    OUT,
    QUERY_QP_IN,
    QUERY_QP_OUT,
    RTS2RTS_QP_IN,
    Opcode,
    OptParam32,
    ResponsesToCqe,
    RqType,
    ScatterToCqe,
    ServiceType,
)
from ...formats.contexts import QPC_EXT
from ...formats.cqe import WIDE_CQE_SIZE
from ...formats.doorbell import QP_DBREC
from ...formats.layout import Fields
from ...formats.wqe import OPAQUE_BYTES, SEGMENT
from ...memory import HostMemory
from ..ah import ah_of, path_to, path_update
from ..commands import command, destroy
from ..events import OF_QP
from ..qp import QP
from ..qp_init import QpInitAttr, QueueSizes, queue_sizes
from ..qp_state import FROM_ANY_TO, PATH, QpAttr, Transition, attributes_of, carry, state_of, without_reads
from .queues import RingPosting
from .ring import Ring, place_ring

if TYPE_CHECKING:
    from ..cq import CQ
    from ..mr import MR
    from ..pd import PD

_SERVICE = {
    QpType.RC: ServiceType.RC, QpType.UC: ServiceType.UC, QpType.UD: ServiceType.UD, QpType.GSI: ServiceType.QP1,
}


class DevxQP(QP):
    """A queue pair created with DEVX commands.

    It resolves the path to its peer itself, because the peer's address vector is part of its context.
    """

    _answers = True  # whether the peer may read, i.e. `max_dest_rd_atomic` is not 0

    def __init__(self, pd: PD, attr: QpInitAttr):
        super().__init__(pd, attr)
        if self._dpa:
            self._closes_users = True  # its only user is the DPA's export, for the DPA's kernels
            with ExitStack() as undo:
                undo.callback(self.close)
                self._dpa.attach(self)
                undo.pop_all()

    def _create(self, undo: ExitStack) -> None:
        ctx, attr = self.ctx, self.init_attr
        provider = ctx.provider
        sizes = queue_sizes(attr, ctx.query_device())
        self.init_attr = replace(attr, max_inline_data=sizes.max_inline_data)
        ring = place_ring(ctx, attr, undo, sizes.rq_bytes + sizes.sq_bytes)
        self._use(*ring.umems)
        if attr.external_uar is None:
            self.uar = ctx.shared_uar(UarKind.BLUEFLAME, UarKind.NONCACHE)
            self._use(self.uar)
        else:
            self.uar = attr.external_uar
        extension: Fields = {}
        if attr.memcpy:
            self.opaque = self._opaque(undo)
            extension = {"qpc_ext": 1, "pas": QPC_EXT.pack(mmo=1)}
        mailbox = CREATE_QP_IN.pack(
            opcode=Opcode.CREATE_QP,
            qpc=self._context(sizes, ring),
            wq_umem_offset=ring.offset,
            wq_umem_id=ring.umem_id,
            wq_umem_valid=1,
            **extension,
        )
        undo.callback(self._step(DevxQP.forget))
        with command("CREATE_QP"):
            self._handle, out = provider.devx_obj_create(bytes(mailbox), CREATE_QP_OUT.size)
        undo.callback(destroy, provider, "DESTROY_QP", self._handle)
        ctx.async_events.subscribe(self, self._handle, OF_QP, undo)
        self.qpn = int(CREATE_QP_OUT.get(out, "qpn"))
        page = self.uar.page
        if attr.send_dbr_mode == QpSendDbrMode.NO_DBR_EXT:
            page = replace(page, reg_addr=self.uar.dbr_less_addr)
        self.doorbell_register = provider.doorbell_register(page, self.qpn)
        self.rq_address, self.rq_entries, self.rq_stride = ring.address, sizes.rq_entries, sizes.rq_stride
        self.sq_address, self.sq_entries = ring.address + sizes.rq_bytes, sizes.sq_entries
        self.dbr_address = ring.dbr_address
        self.ring = ring
        if ring.memory and not attr.external_datapath and self._dpa is None:
            self._serve(RingPosting(self, ring.memory))
        if self._dpa:
            undo.callback(self._step(DevxQP._leave_dpa))

    def _leave_dpa(self) -> None:
        assert self._dpa is not None
        self._dpa.detach(self)

    def _opaque(self, undo: ExitStack) -> MR:
        """Register the buffer that the device uses for copies (`formats.wqe.MMO_SEG`)."""
        memory = HostMemory(OPAQUE_BYTES)
        undo.callback(memory.close)
        mr = self.pd.register(memory.address, nbytes=OPAQUE_BYTES)
        undo.callback(mr.close)
        self._use(mr)
        return mr

    def _context(self, sizes: QueueSizes, ring: Ring) -> Fields:
        """Return the QPC for CREATE_QP."""
        attr = self.init_attr
        qpc: Fields = {
            "st": _SERVICE[attr.qp_type],
            "pd": self.pd.pdn,
            "user_index": attr.user_index,
            "uar_page": self.uar.page_id,
            "send_dbr_mode": attr.send_dbr_mode,
            "cd_master": attr.core_direct_master,
            **_payload_in_completions(attr),
            "dbr_umem_valid": 1,
            "dbr_umem_id": ring.dbr_umem_id,
            "dbr_addr": ring.dbr_offset,
        }
        if sizes.sq_entries and self.send_cq:
            qpc |= {"cqn_snd": self.send_cq.cqn, "log_sq_size": sizes.sq_entries.bit_length() - 1}
        else:
            qpc["no_sq"] = 1
        if sizes.rq_entries and self.receive_cq:
            qpc |= {
                "rq_type": RqType.REGULAR,
                "cqn_rcv": self.receive_cq.cqn,
                "log_rq_size": sizes.rq_entries.bit_length() - 1,
                "log_rq_stride": (sizes.rq_stride // SEGMENT).bit_length() - 1,
            }
        elif attr.srq and self.receive_cq:
            qpc |= {"rq_type": RqType.SRQ_RMP, "cqn_rcv": self.receive_cq.cqn, "srqn_rmpn_xrqn": attr.srq.srqn}
        else:
            qpc["rq_type"] = RqType.ZERO_SIZE
        return qpc

    @property
    def used(self) -> bool:
        """Return whether requests were posted, according to the device's 16-bit counters."""
        self.check_open()
        qpc = self._query()
        return bool(qpc["sw_sq_wqebb_counter"] or qpc["hw_sq_wqebb_counter"])

    def _answer(self) -> bytes:
        mailbox = QUERY_QP_IN.pack(opcode=Opcode.QUERY_QP, qpn=self.qpn)
        with command("QUERY_QP"):
            return self.ctx.provider.devx_obj_query(self._handle, bytes(mailbox), QUERY_QP_OUT.size)

    def _query(self) -> Fields:
        return QUERY_QP_OUT.get(self._answer(), "qpc")

    def _now(self, mask: QpAttrMask, following: QpState | None) -> QpAttr:
        claimed = QpAttrMask.CURRENT_STATE in mask and QpAttrMask.AH_ATTR not in mask  # needs the port
        if claimed or following in FROM_ANY_TO:
            return QpAttr()
        out = self._answer()
        port = QUERY_QP_OUT.get(out, f"qpc.{PATH}.vhca_port_num")
        return QpAttr(current_state=state_of(QUERY_QP_OUT.get(out, "qpc.state")), port_num=port)

    def _ask(self) -> QpAttr:
        qpc = self._query()
        attr = attributes_of(qpc)
        if qpc["remote_qpn"] and not self.type.datagrams:  # INIT2RTR sets both the number and the path
            attr.ah_attr = ah_of(qpc[PATH], self.ctx.query_device().link_layer)
        return attr

    def _move(self, move: Transition, attr: QpAttr, mask: QpAttrMask, now: QpAttr) -> None:
        values: Fields = {}
        answers = self._answers or move.opcode == Opcode.QP_2RST
        if QpAttrMask.MAX_DEST_RD_ATOMIC in mask:
            answers = attr.max_dest_rd_atomic > 0
        if not answers:
            attr, mask = without_reads(attr, mask, move)
        if move.opcode not in (Opcode.QP_2RST, Opcode.QP_2ERR):
            fields, opt = carry(attr, mask, move)
            if QpAttrMask.AH_ATTR in mask and attr.ah_attr:
                if move.opcode == Opcode.INIT2RTR_QP:
                    port = now.port_num or 1  # there is no port before INIT: the device reports the mistake
                    fields[PATH] |= path_to(self.ctx, port, attr.ah_attr)
                else:
                    path, path_opt = path_update(self.ctx, attr.ah_attr)
                    fields[PATH] |= path
                    opt |= path_opt
            values = {"qpc": fields, "opt_param_mask": opt}
        mailbox = move.mailbox.pack(opcode=move.opcode, qpn=self.qpn, **values)
        with command(move.opcode.name):
            self.ctx.provider.devx_obj_modify(self._handle, bytes(mailbox), OUT.size)
        self._answers = answers

    def _set_udp_sport(self, port: int) -> None:
        mailbox = RTS2RTS_QP_IN.pack(
            opcode=Opcode.RTS2RTS_QP, qpn=self.qpn, opt_param_mask_95_32=OptParam32.UDP_SPORT,
            qpc={PATH: {"udp_sport": port}},
        )
        with command("RTS2RTS_QP"):
            self.ctx.provider.devx_obj_modify(self._handle, bytes(mailbox), OUT.size)

    def _restart(self) -> None:
        if self.ring.memory:  # the device counts from 0 again, so the record must as well
            self.ring.memory.view(QP_DBREC.dtype, self.ring.dbr_offset)[:] = 0
            super()._restart()
        if self._dpa:
            self._dpa.restart(self)


def _payload_in_completions(attr: QpInitAttr) -> Fields:
    """Return the QPC fields that put payloads into CQEs. A 64-byte CQE has room for 32 bytes, a 128-byte CQE for 64.

    `CQ.poll` reads only 32 bytes.
    """
    fields: Fields = {}
    if attr.cqe_inline:
        wide = attr.external_datapath and _has_wide_entries(attr.receive_cq)
        fields["cs_res"] = ScatterToCqe.DATA_64 if wide else ScatterToCqe.DATA_32
    if attr.cqe_inline_responses:
        wide = _has_wide_entries(attr.send_cq)
        fields["cs_req"] = ResponsesToCqe.DATA_64 if wide else ResponsesToCqe.DATA_32
    return fields


def _has_wide_entries(cq: CQ | None) -> bool:
    return cq is not None and cq.cqe_size == WIDE_CQE_SIZE
