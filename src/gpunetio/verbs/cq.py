"""Completion queues."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..enums import CqOverrun, UarAllocationType
from ..errors import BadStateError, InvalidValueError
from ..formats.commands import CREATE_CQ_IN, CREATE_CQ_OUT, Opcode
from ..formats.cqe import CI_MASK, CQE64, CQE_SIZE, INIT_OP_OWN
from ..formats.doorbell import CQ_DBREC
from .completing import QPN_MASK, completions
from .doorbell import arrived
from .handle import Handle, command, destroy
from .ring import check_both, external_ring, internal_ring
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
    are at `dbr_address`, the consumer index, and `arm_address` (`doca_verbs_cq_get_dbr_addr`).
    """

    _rank = 1
    cqe_size = CQE_SIZE

    def __init__(
        self,
        ctx: Context,
        cqe: int,
        *,
        overrun: CqOverrun,
        collapsed: bool,
        external_umem: tuple[UMEM, int] | None,
        external_dbr_umem: tuple[UMEM, int] | None,
        external_uar: UAR | None,
        context: Any,
    ):
        super().__init__(ctx)
        self._use(ctx, external_uar)
        check_both(external_umem, external_dbr_umem)
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
            self.cqn = int(CREATE_CQ_OUT.get(out, "cqn"))
            self.entries, self.overrun, self.collapsed, self.context = cqe, overrun, collapsed, context
            self.ring_address = ring.address
            self.dbr_address = ring.dbr_address + CQ_DBREC.set_ci
            self.arm_address = ring.dbr_address + CQ_DBREC.arm
            self._ring = ring
            self._queues: dict[int, Posting] = {}  # by number: whose completions come here
            self._consumer = 0  # counts CQEs for ever
            self._lock = threading.Lock()
            self._opened(f"CQ {self.cqn:#x} of {ctx.name}", undo)

    # --- the CPU data path -------------------------------------------------------------------------------------------

    def serve(self, qpn: int, posting: Posting) -> None:
        """A queue pair completes here."""
        self._queues[qpn] = posting

    def forget(self, qp: QP) -> None:
        """It is gone, and with it what of it has not been polled."""
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

    @property
    def _polled(self) -> bool:
        """Whether it can be polled here."""
        return self._ring.memory is not None and not self.collapsed

    def _arrived(self, most: int) -> int:
        return arrived(self.ring_address, self.entries.bit_length() - 1, self._consumer, most)

    def poll(self, most: int = 16) -> list[Completion]:
        """Up to `most` completions, oldest first; an empty list when there are none (`doca_verbs_bridge_poll_cq`).

        What queue pairs with an external data path complete here is passed over.
        """
        self.check_open()
        if most < 1:
            raise InvalidValueError(f"most = {most}: ask for one completion at least")
        if not self._polled:
            what = "is collapsed" if self.collapsed else "has an external data path: its ring is in your memory"
            raise BadStateError(f"{self} {what}: it cannot be polled here")
        with self._lock:
            count = self._arrived(most)
            if not count:
                return []
            start = self._consumer % self.entries
            cqes = self._cqes[start : start + count].tobytes()
            cqes += self._cqes[: count - len(cqes) // CQE_SIZE].tobytes()
            found = completions(cqes, self._queues)
            self._consumer += count
            self._record["set_ci"] = self._consumer & CI_MASK
        return found
