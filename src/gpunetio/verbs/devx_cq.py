"""Completion queues that are made by mailboxes: rings of CQEs, in host memory or where the user wants them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..enums import UarAllocationType
from ..formats.commands import CREATE_CQ_IN, CREATE_CQ_OUT, Opcode
from ..formats.cqe import CI_MASK, CQE64, CQE_SIZE, INIT_OP_OWN, OPCODE_SHIFT
from ..formats.doorbell import CQ_ARM_SN_MASK, CQ_ARM_SN_SHIFT, CQ_ARM_SOLICITED, CQ_DBREC, UAR_CQ_OFFSET
from ..formats.events import EventType
from ..interrupts import deferred
from .channel import CompChannel
from .completing import OF_SENDS, QPN_MASK, completions
from .cq import CQ, CqInitAttr
from .devx_channel import DevxCompChannel
from .events import OF_CQ
from .handle import command, destroy
from .ring import doorbells, place_ring
from .work import Completion

if TYPE_CHECKING:
    from .qp import QP


class DevxCQ(CQ):
    """See `CQ`."""

    def _create(self, attr: CqInitAttr, undo: ExitStack) -> None:
        ctx, cqe = self.ctx, attr.cqe
        provider = ctx.provider
        ring = place_ring(self, attr, undo, cqe * CQE_SIZE)
        if ring.memory:
            self._cqes = ring.memory.view(CQE64.dtype, count=cqe)
            self._cqes["op_own"] = INIT_OP_OWN
            self._record = ring.memory.view(CQ_DBREC.dtype, ring.dbr_offset)
        if attr.external_uar is None:
            self.uar = ctx.shared_uar(UarAllocationType.NONCACHE, UarAllocationType.BLUEFLAME)
            self._use(self.uar)
        else:
            self.uar = attr.external_uar
        mailbox = CREATE_CQ_IN.pack(
            opcode=Opcode.CREATE_CQ,
            cq_context={
                "cc": attr.collapsed,
                "oi": attr.overrun,
                "log_cq_size": cqe.bit_length() - 1,
                "uar_page": self.uar.page_id,
                "c_eqn": provider.query_eqn(0),
                "dbr_umem_valid": 1,
                "dbr_umem_id": ring.dbr_umem_id,
                "dbr_addr": ring.dbr_offset,
            },
            cq_umem_id=ring.umem_id,
            cq_umem_offset=ring.offset,
            cq_umem_valid=1,
        )
        with command("CREATE_CQ"):
            handle, out = provider.devx_obj_create(bytes(mailbox), CREATE_CQ_OUT.size)
        undo.callback(destroy, provider, "DESTROY_CQ", handle)
        ctx.async_events.subscribe(self, handle, OF_CQ, undo)
        if isinstance(attr.channel, DevxCompChannel):
            attr.channel.reader.subscribe(self, handle, (EventType.COMPLETION,), undo)
        self.cqn = int(CREATE_CQ_OUT.get(out, "cqn"))
        self.ring_address = ring.address
        self.dbr_address = ring.dbr_address + CQ_DBREC.set_ci
        self.arm_address = ring.dbr_address + CQ_DBREC.arm
        self.ring = ring
        if self._polled:
            self._doorbells = doorbells()
        self._arm_sn = 1  # counts the events that were taken: the device hears a request once
        self._any_wanted = 0  # that count, when any completion was asked for last

    def forget(self, qp: QP) -> None:
        """See `CQ`."""
        if qp.init_attr.srq:
            self.drop(qp)  # the receives that it has used are the SRQ's
        self._queues.pop(qp.qpn, None)

    def drop(self, qp: QP) -> None:
        """See `CQ`."""
        if not self._polled:
            return
        with self._lock:
            for index in range(self._consumer, self._consumer + self._arrived(self.entries)):
                cqe = self._cqes[index % self.entries]
                if cqe["sop_drop_qpn"] & QPN_MASK == qp.qpn:
                    cqe["sop_drop_qpn"] = 0
                    if qp.init_attr.srq and cqe["op_own"] >> OPCODE_SHIFT not in OF_SENDS:
                        qp.init_attr.srq.complete(int(cqe["wqe_counter"]))

    @property
    def _polled(self) -> bool:
        return self.ring.memory is not None and super()._polled

    def _arrived(self, most: int) -> int:
        return self._doorbells.arrived(self.ring_address, self.entries.bit_length() - 1, self._consumer, most)

    def _request_event(self, channel: CompChannel, solicited_only: bool) -> None:
        # A request for any completion stands until its event was taken: one for less must not overwrite it.
        if not solicited_only:
            self._any_wanted = self._arm_sn
        wanted = 0 if self._any_wanted == self._arm_sn else CQ_ARM_SOLICITED
        word = (self._arm_sn & CQ_ARM_SN_MASK) << CQ_ARM_SN_SHIFT | wanted | self._consumer & CI_MASK
        self._doorbells.ring_arm(self.arm_address, word, self.uar.page.base_addr + UAR_CQ_OFFSET, self.cqn)
        self.ctx.provider.doorbell_rung()

    def event_taken(self) -> None:
        """See `CQ`."""
        with self._lock:
            self._arm_sn += 1
        super().event_taken()

    def _poll(self, most: int) -> list[Completion]:
        count = self._arrived(min(most, self.entries))
        if not count:
            return []
        start = self._consumer % self.entries
        cqes = self._cqes[start : start + count].tobytes()
        cqes += self._cqes[: count - len(cqes) // CQE_SIZE].tobytes()
        with deferred():  # requests are completed once
            found = completions(cqes, self._queues)
            self._consumer += count
            self._record["set_ci"] = self._consumer & CI_MASK
        return found
