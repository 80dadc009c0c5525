"""Completion queues."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..enums import CqOverrun, UarAllocationType
from ..errors import BadStateError, InvalidValueError, NotSupportedError
from ..formats.commands import CREATE_CQ_IN, CREATE_CQ_OUT, Opcode
from ..formats.cqe import CI_MASK, CQE64, CQE_SIZE, INIT_OP_OWN, OPCODE_SHIFT
from ..formats.doorbell import CQ_ARM_SN_MASK, CQ_ARM_SN_SHIFT, CQ_ARM_SOLICITED, CQ_DBREC, UAR_CQ_OFFSET
from ..formats.events import EventType
from .arguments import instance, member, whole, within
from .channel import CompChannel
from .completing import OF_SENDS, QPN_MASK, completions
from .doorbell import arrived, ring_arm
from .events import OF_CQ
from .handle import Handle, command, destroy
from .ring import check_places, external_ring, internal_ring
from .uar import UAR
from .umem import UMEM
from .work import Completion

if TYPE_CHECKING:
    from .context import Context
    from .posting import Posting
    from .qp import QP


class CQ(Handle):
    """A completion queue (`doca_verbs_cq`), number `cqn`.

    `entries` CQEs of `cqe_size` bytes are at `ring_address` (`doca_verbs_cq_get_wq`); the words of the doorbell record
    are at `dbr_address`, the consumer index, and `arm_address` (`doca_verbs_cq_get_dbr_addr`). `ring` says in which
    memory they lie.
    """

    _rank = 1
    cqe_size = CQE_SIZE

    def __init__(
        self,
        ctx: Context,
        cqe: int,
        *,
        cqe_size: int,
        channel: CompChannel | None,
        external_datapath: bool,
        overrun: CqOverrun,
        collapsed: bool,
        external_umem: tuple[UMEM, int] | None,
        external_dbr_umem: tuple[UMEM, int] | None,
        external_uar: UAR | None,
        context: Any,
    ):
        super().__init__(ctx)
        self._use(ctx)
        if external_uar is not None:
            self._use(instance("external_uar", external_uar, UAR))
        if channel is not None:
            self._use(instance("channel", channel, CompChannel))
        if whole("cqe_size", cqe_size) != CQE_SIZE:
            raise NotSupportedError(f"cqe_size = {cqe_size}: completion queue entries have {CQE_SIZE} bytes here")
        check_places(external_umem, external_dbr_umem)
        overrun, collapsed = member("overrun", overrun, CqOverrun), bool(within("collapsed", collapsed, 0, 1))
        external_datapath = bool(within("external_datapath", external_datapath, 0, 1))
        cqe = whole("cqe", cqe)
        limit = ctx.query_device().max_cqe
        if cqe < 1 or cqe & (cqe - 1) or cqe > limit:
            raise InvalidValueError(f"cqe = {cqe}: the size must be a power of two, and at most {limit} on {ctx.name}")
        provider = ctx.provider
        with ExitStack() as undo:
            if external_umem and external_dbr_umem:
                self._use(external_umem[0], external_dbr_umem[0])
                ring = external_ring(external_umem, external_dbr_umem, cqe * CQE_SIZE)
            else:
                ring = internal_ring(ctx, undo, cqe * CQE_SIZE)
            if ring.memory:
                self._cqes = ring.memory.view(CQE64.dtype, count=cqe)
                self._cqes["op_own"] = INIT_OP_OWN
                self._record = ring.memory.view(CQ_DBREC.dtype, ring.dbr_offset)
            if external_uar is None:
                self.uar = ctx.shared_uar(UarAllocationType.NONCACHE, UarAllocationType.BLUEFLAME)
                self._use(self.uar)
            else:
                self.uar = external_uar
            mailbox = CREATE_CQ_IN.pack(
                opcode=Opcode.CREATE_CQ,
                cq_context={
                    "cc": collapsed,
                    "oi": overrun,
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
            if channel:
                channel.reader.subscribe(self, handle, (EventType.COMPLETION,), undo)
            self.cqn = int(CREATE_CQ_OUT.get(out, "cqn"))
            self.channel, self.external_datapath = channel, external_datapath
            self.entries, self.overrun, self.collapsed, self.context = cqe, overrun, collapsed, context
            self.ring_address = ring.address
            self.dbr_address = ring.dbr_address + CQ_DBREC.set_ci
            self.arm_address = ring.dbr_address + CQ_DBREC.arm
            self.ring = ring
            self._queues: dict[int, Posting] = {}  # by number: whose completions come here
            self._consumer = 0  # counts CQEs for ever
            self._arm_sn = 1  # counts the events that were taken: the device hears a request once
            self._any_wanted = 0  # that count, when any completion was asked for last
            self._lock = threading.Lock()
            self._opened(f"CQ {self.cqn:#x} of {ctx.name}", undo)

    # --- the CPU data path -------------------------------------------------------------------------------------------

    def serve(self, qpn: int, posting: Posting) -> None:
        """A queue pair completes here."""
        self._queues[qpn] = posting

    def forget(self, qp: QP) -> None:
        """It is gone, and with it what of it has not been polled."""
        if qp.init_attr.srq:
            self.drop(qp)  # the receives that it has used are the SRQ's
        self._queues.pop(qp.qpn, None)

    def drop(self, qp: QP) -> None:
        """It was reset: what has completed so far belongs to requests that are forgotten, and is nobody's from now."""
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
        """Whether it can be polled here."""
        return self.ring.memory is not None and not self.collapsed and not self.external_datapath

    def _arrived(self, most: int) -> int:
        return arrived(self.ring_address, self.entries.bit_length() - 1, self._consumer, most)

    def _not_ours(self, what: str) -> BadStateError:
        why = "is collapsed" if self.collapsed else "has an external data path: its entries are yours to read"
        return BadStateError(f"{self} {why}: it cannot be {what} here")

    @property
    def consumer_index(self) -> int:
        """How many completions have been polled so far (`doca_verbs_bridge_get_current_cq_ci`)."""
        self.check_open()
        return self._consumer

    def req_notify(self, solicited_only: bool = False) -> None:
        """Ask the channel for one event: at the next completion that has not been polled (`ibv_req_notify_cq`).

        It comes at once when there is such a completion already, so that none is missed. `solicited_only`: only those
        of requests whose sender set SOLICITED, and errors.
        """
        self.check_open()
        if self.channel is None:
            raise BadStateError(f"{self} has no completion channel: give create_cq() one")
        if not self._polled:
            raise self._not_ours("asked for events")
        with self._lock:
            # A request for any completion stands until its event was taken: one for less must not overwrite it.
            if not solicited_only:
                self._any_wanted = self._arm_sn
            command = 0 if self._any_wanted == self._arm_sn else CQ_ARM_SOLICITED
            word = (self._arm_sn & CQ_ARM_SN_MASK) << CQ_ARM_SN_SHIFT | command | self._consumer & CI_MASK
            ring_arm(self.arm_address, word, self.uar.page.base_addr + UAR_CQ_OFFSET, self.cqn)
        self.ctx.provider.doorbell_rung()

    def event_taken(self) -> None:
        """The channel has given an event of this queue away."""
        with self._lock:
            self._arm_sn += 1
        self.hold_for_event()

    def ack_events(self, count: int = 1) -> None:
        """Done with events from the channel (`doca_verbs_ack_cq_events`): the queue cannot be closed before."""
        self.check_open()
        self.acknowledge(count)

    def poll(self, most: int = 16) -> list[Completion]:
        """Up to `most` completions, oldest first; an empty list when there are none (`doca_verbs_bridge_poll_cq`).

        What queue pairs with an external data path complete here is passed over.
        """
        self.check_open()
        if whole("most", most) < 1:
            raise InvalidValueError(f"most = {most}: ask for one completion at least")
        if not self._polled:
            raise self._not_ours("polled")
        with self._lock:
            count = self._arrived(min(most, self.entries))
            if not count:
                return []
            start = self._consumer % self.entries
            cqes = self._cqes[start : start + count].tobytes()
            cqes += self._cqes[: count - len(cqes) // CQE_SIZE].tobytes()
            found = completions(cqes, self._queues)
            self._consumer += count
            self._record["set_ci"] = self._consumer & CI_MASK
        return found
