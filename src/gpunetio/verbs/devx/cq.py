"""Completion queues created with DEVX commands: rings of CQEs in host memory or in the user's UMEM."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ...enums import UarAllocationType
from ...errors import FullError, UnexpectedError
from ...formats.commands import CQ_RESIZE, CREATE_CQ_IN, CREATE_CQ_OUT, MODIFY_CQ_IN, OUT, CqResize, Opcode
from ...formats.cqe import CI_MASK, CQE64, CQE_SIZE, CQE_SIZES, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ...formats.doorbell import CQ_ARM_SN_MASK, CQ_ARM_SN_SHIFT, CQ_ARM_SOLICITED, CQ_DBREC, UAR_CQ_OFFSET
from ...formats.events import EventType
from ...interrupts import deferred
from ..channel import CompChannel
from ..commands import command, destroy
from ..cq import CQ, CqInitAttr
from ..events import OF_CQ
from ..work import Completion
from .channel import DevxCompChannel
from .completing import OF_SENDS, QPN_MASK, completions
from .ring import doorbells, in_its_place, internal_ring, place_ring

if TYPE_CHECKING:
    from ...memory import HostMemory
    from ..qp import QP
    from .queues import RingPosting


class DevxCQ(CQ):
    """A completion queue created with DEVX commands."""

    _queues: dict[int, RingPosting]  # all objects of a device are of the same kind
    _resized: ExitStack | None = None  # frees the ring that replaced the first one

    def _create(self, attr: CqInitAttr, undo: ExitStack) -> None:
        ctx, cqe = self.ctx, _round_up(attr.cqe)
        provider = ctx.provider
        ring = place_ring(ctx, attr, undo, cqe * self.cqe_size)
        self._use(*ring.umems)
        if ring.memory:
            self._cqes = self._empty(ring.memory, cqe)
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
                "cqe_sz": CQE_SIZES.index(self.cqe_size),
                "log_cq_size": cqe.bit_length() - 1,
                "uar_page": self.uar.page_id,
                "c_eqn": provider.query_eqn(attr.comp_vector),
                "dbr_umem_valid": 1,
                "dbr_umem_id": ring.dbr_umem_id,
                "dbr_addr": ring.dbr_offset,
            },
            cq_umem_id=ring.umem_id,
            cq_umem_offset=ring.offset,
            cq_umem_valid=1,
        )
        with command("CREATE_CQ"):
            self._handle, out = provider.devx_obj_create(bytes(mailbox), CREATE_CQ_OUT.size)
        undo.callback(self._step(DevxCQ._free_resized))
        undo.callback(destroy, provider, "DESTROY_CQ", self._handle)
        ctx.async_events.subscribe(self, self._handle, OF_CQ, undo)
        if isinstance(attr.channel, DevxCompChannel):
            attr.channel.reader.subscribe(self, self._handle, (EventType.COMPLETION,), undo)
        self.cqn = int(CREATE_CQ_OUT.get(out, "cqn"))
        self.entries = cqe
        self.ring_address = ring.address
        self.dbr_address = ring.dbr_address + CQ_DBREC.set_ci
        self.arm_address = ring.dbr_address + CQ_DBREC.arm
        self.ring = ring
        if self._polled:
            self._doorbells = doorbells()
        self._arm_sn = 1  # counts delivered events; the device acts only once on a request with the same number
        self._any_wanted = 0  # the value of `_arm_sn` when any completion was last requested

    def _empty(self, memory: HostMemory, count: int) -> np.ndarray:
        """Return the first `count` entries in `memory`, the last 64 bytes of each, and mark them all invalid."""
        whole = memory.array[: count * self.cqe_size].reshape(count, self.cqe_size)
        cqes = whole[:, self.cqe_size - CQE_SIZE :].view(CQE64.dtype)[:, 0]
        cqes["op_own"] = INIT_OP_OWN
        return cqes

    def _free_resized(self) -> None:
        if self._resized:
            self._resized.close()

    def _resize(self, cqe: int) -> None:
        cqe, waiting = _round_up(cqe), self._arrived(self.entries)
        if waiting >= min(cqe, self.entries):  # one more entry marks the end of the old ring
            raise FullError(
                f"{waiting} completions wait in {self} of {self.entries} entries, and do not fit in {cqe}: poll first"
            )
        with ExitStack() as undo:
            ring = internal_ring(self.ctx, undo, cqe * self.cqe_size)
            assert ring.memory
            cqes = self._empty(ring.memory, cqe)
            mailbox = MODIFY_CQ_IN.pack(
                opcode=Opcode.MODIFY_CQ, op_mod=CQ_RESIZE, cqn=self.cqn, resize_field_select=sum(CqResize),
                cq_context={"log_cq_size": cqe.bit_length() - 1, "cqe_sz": CQE_SIZES.index(self.cqe_size)},
                cq_umem_id=ring.umem_id, cq_umem_offset=ring.offset, cq_umem_valid=1,
            )
            with command("MODIFY_CQ"):
                self.ctx.provider.devx_obj_modify(self._handle, bytes(mailbox), OUT.size)
            before, self._resized = self._resized, undo.pop_all()
        self._move_to(cqes)
        self.ring_address, self.entries = ring.address, cqe
        self.ring = in_its_place(self.ring, ring)
        if before:
            before.close()

    def _move_to(self, cqes: np.ndarray) -> None:
        """Copy the waiting completions to another ring, each one slot further: the old ring's end mark takes one."""
        old, new = len(self._cqes), len(cqes)
        for index in range(self._consumer, self._consumer + old):
            cqe = self._cqes[index % old]
            if cqe["op_own"] >> OPCODE_SHIFT == CqeOpcode.RESIZE_CQ:
                break
            following = index + 1
            cqes[following % new] = cqe
            cqes[following % new]["op_own"] = int(cqe["op_own"]) & ~OWNER_MASK | following // new & OWNER_MASK
        else:
            raise UnexpectedError(f"{self.ctx.name} has resized {self}, but did not mark the end of the old ring")
        self._cqes = cqes
        self._consumer += 1
        self._record["set_ci"] = self._consumer & CI_MASK

    def forget(self, qp: QP) -> None:
        if qp.init_attr.srq:
            self.drop(qp)  # gives the receives that it used back to the SRQ
        self._queues.pop(qp.qpn, None)

    def drop(self, qp: QP) -> None:
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
        first = self.ring_address + self.cqe_size - CQE_SIZE
        shift, log = self.cqe_size.bit_length() - 1, self.entries.bit_length() - 1
        return self._doorbells.arrived(first, shift, log, self._consumer, most)

    def _request_event(self, channel: CompChannel, solicited_only: bool) -> None:
        # A request for any completion stands until its event is delivered: a solicited-only request must not replace
        # it.
        if not solicited_only:
            self._any_wanted = self._arm_sn
        wanted = 0 if self._any_wanted == self._arm_sn else CQ_ARM_SOLICITED
        word = (self._arm_sn & CQ_ARM_SN_MASK) << CQ_ARM_SN_SHIFT | wanted | self._consumer & CI_MASK
        self._doorbells.ring_arm(self.arm_address, word, self.uar.page.base_addr + UAR_CQ_OFFSET, self.cqn)
        self.ctx.provider.doorbell_rung()

    def event_taken(self) -> None:
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
        with deferred():  # Ctrl+C must not complete requests twice
            found = completions(cqes, self._queues)
            self._consumer += count
            self._record["set_ci"] = self._consumer & CI_MASK
        return found


def _round_up(cqe: int) -> int:
    """Round up to a power of two, the only sizes that rings have."""
    return 1 << (cqe - 1).bit_length()
