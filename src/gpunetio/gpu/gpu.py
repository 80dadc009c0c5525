"""The GPU handle (`doca_gpu`): a CUDA device, or host threads behind the same calls, and its queues."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from ..arguments import member
from ..dropped import living
from ..enums import MemRegType, MemType, NicHandler, QpSendDbrMode, SendDbrModeExt
from ..interrupts import deferred
from ..verbs import PD, QP, SRQ
from .array import ExportedQps
from .device import check_queue_memory
from .export import ExportedQp, Exporter, ExportOptions
from .group import QpGroup, QueueOptions, create_group, create_qp
from .memory import GpuMemory, Part
from .proxy import ProxyService
from .semaphore import Semaphore
from .srq import ExportedSrq
from .structure import Place
from .watchdog import Watchdog

DEFAULT_TIMEOUT = 30.0  # seconds: the longest that a device wait lasts


class Gpu(Exporter):
    """Open a GPU (`doca_gpu_create`).

    `which`: "auto" (the first CUDA device, or the host), "host" or "cpu", a CUDA ordinal, a PCI address ("8a:00.0"), or
    "twin": host threads with memory that only kernels reach, as on a GPU.
    `warp`: lanes of a host warp, 1 … 32; a CUDA warp has 32.
    `queue_memory`: where queues are. With "gpu", their structures are in GPU memory, and so are their rings if the NIC
    reaches GPU memory; kernels ring the doorbells. "cpu_gpu" is for a system without GPUDirect RDMA: rings are in host
    memory, structures and allocations are CPU_GPU memory by default, and the CPU proxy rings. "auto" is "cpu_gpu" on an
    integrated GPU, whose memory no NIC reaches, and "gpu" elsewhere.
    """

    watchdog: Watchdog

    def __init__(self, which: str | int = "auto", *, warp: int = 1, queue_memory: str = "auto"):
        super().__init__(which, warp, queue_memory)
        self._exports: WeakValueDictionary[int, ExportedQp] = WeakValueDictionary()  # by id(), in order
        self._sharing = threading.RLock()  # guards the structures of SRQs, which several queues share
        self._srqs: dict[SRQ, ExportedSrq] = {}
        self._srqs_before: WeakKeyDictionary[SRQ, np.ndarray] = WeakKeyDictionary()
        self._services: WeakValueDictionary[int, ProxyService] = WeakValueDictionary()
        self._own_service: ProxyService | None = None
        self._parts: WeakValueDictionary[int, Part] = WeakValueDictionary()
        self._lock = threading.Lock()
        exports = self._exports
        with ExitStack() as undo:
            undo.callback(self._release)
            self.watchdog = Watchdog(lambda: living(exports))
            undo.pop_all()
        self._opened()

    # --- queues ------------------------------------------------------------------------------------------------------

    def export_qp(
        self,
        qp: QP,
        nic_handler: NicHandler = NicHandler.AUTO,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        send_dbr_mode: SendDbrModeExt | None = None,
        queue_memory: str | None = None,
        proxy_service: bool = True,
    ) -> ExportedQp:
        """Make a QP usable by kernels (`doca_gpu_verbs_export_qp`, `doca_gpu_verbs_get_qp_dev`).

        Reset a QP that has been used before you export it. The QP needs a CQ for its sends and another one for its
        receives. No other exported queue may complete in them.

        `nic_handler`     how doorbells reach the NIC. AUTO: kernels ring, or else the CPU proxy does, and the log says
                          why
        `timeout`         seconds after which any device wait on this queue ends with ETIMEDOUT
        `send_dbr_mode`   which side keeps the doorbell record; None: as the queue pair was created
        `queue_memory`    overrides the GPU's own setting
        `proxy_service`   True: a thread of this handle does the CPU's work for the queue. False: you call
                          `ExportedQp.progress` or use your own service
        """
        return self.export(qp, self._options(nic_handler, send_dbr_mode, queue_memory, proxy_service, timeout))

    def export_qps(
        self,
        qps: Sequence[QP | ExportedQp],
        nic_handler: NicHandler = NicHandler.AUTO,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        send_dbr_mode: SendDbrModeExt | None = None,
        queue_memory: str | None = None,
        proxy_service: bool = True,
    ) -> ExportedQps:
        """Export QPs as one array of structures (`doca_gpu_verbs_export_multi_qps_dev`); arguments as for `export_qp`.

        Queues that are already exported move into the array, where `doca_gpu_verbs_qp_flat_list_create_hl` would copy
        them. No kernel may be using them, and their `device_address` changes.
        """
        self._check()
        return ExportedQps(
            self, qps, self._options(nic_handler, send_dbr_mode, queue_memory, proxy_service, timeout)
        )

    def create_qp(
        self,
        pd: PD,
        depth: int = 1024,
        *,
        receives: int = 0,
        cq_collapsed: bool = False,
        cqe_inline: bool = False,
        srq: SRQ | None = None,
        memcpy: bool = False,
        send_dbr_mode: SendDbrModeExt | QpSendDbrMode = SendDbrModeExt.VALID_DBR,
        nic_handler: NicHandler = NicHandler.AUTO,
        queue_memory: str | None = None,
        mem_reg_type: MemRegType = MemRegType.DEFAULT,
        proxy_service: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> ExportedQp:
        """Create and export a QP of `depth` send slots with its own CQ (`doca_gpu_verbs_create_qp_hl`).

        Closing the result also closes QP and CQs. `depth` is rounded up to a power of two. The handler GPU_SM_DB
        becomes GPU_SM_NO_DBR when kernels keep no record. Arguments as for `export_qp`, and:

        `receives`      slots for receives, which get their own CQ
        `cqe_inline`, `memcpy`  as in `QpInitAttr`
        `srq`           a contiguous shared receive queue, which replaces `receives`
        `cq_collapsed`  the CQ of sends keeps only its last entry
        `mem_reg_type`  how rings and records in GPU memory are registered with the NIC. DEFAULT tries a dmabuf, then
                        the address (nvidia-peermem), then CPU_GPU memory; the log and `ExportedQp.ring_memory` say
                        which one is used. Rings are in host memory from the start if the NIC does not reach GPU memory
                        (as the software NIC), with `queue_memory` "cpu_gpu", and for host threads

        NotSupportedError if the device lacks the `send_dbr_mode`, or if queues are in host memory and a `mem_reg_type`
        other than DEFAULT was requested; DriverError if such a registration fails.
        """
        queue = QueueOptions(
            depth=depth, receives=receives, cq_collapsed=cq_collapsed, cqe_inline=cqe_inline, srq=srq, memcpy=memcpy,
            mem_reg_type=mem_reg_type,
        )
        return create_qp(
            self, pd, queue, self._options(nic_handler, send_dbr_mode, queue_memory, proxy_service, timeout)
        )

    def create_qp_group(
        self,
        pd: PD,
        depth: int = 1024,
        *,
        cq_collapsed: bool = False,
        send_dbr_mode: SendDbrModeExt | QpSendDbrMode = SendDbrModeExt.VALID_DBR,
        nic_handler: NicHandler = NicHandler.AUTO,
        queue_memory: str | None = None,
        mem_reg_type: MemRegType = MemRegType.DEFAULT,
        proxy_service: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> QpGroup:
        """Create two QPs, the second one a core-direct companion (`doca_gpu_verbs_create_qp_group_hl`).

        Arguments as for `create_qp`; the handler cannot be BlueFlame.
        """
        queue = QueueOptions(depth=depth, cq_collapsed=cq_collapsed, mem_reg_type=mem_reg_type)
        return create_group(
            self, pd, queue, self._options(nic_handler, send_dbr_mode, queue_memory, proxy_service, timeout)
        )

    def create_semaphore(
        self,
        items: int,
        *,
        memory: MemType = MemType.CPU_GPU,
        info: np.dtype[np.generic] | str | None = None,
        info_memory: MemType | None = None,
        rings: int = 1,
    ) -> Semaphore:
        """Create a semaphore of `items` items (`doca_gpu_semaphore_create`); arguments as for `Semaphore`."""
        self._check()
        return Semaphore(self, items, memory, info, info_memory, rings)

    def create_service(self) -> ProxyService:
        """Start a thread that forwards doorbells of queues with a CPU proxy (`doca_gpu_verbs_create_service`).

        Needed only with `proxy_service=False`, or to spread queues over several threads.
        """
        self._check()
        with self._lock:
            return self._new_service()

    def own_service(self) -> ProxyService:
        with self._lock:
            if self._own_service is None or self._own_service.closed:
                self._own_service = self._new_service()
            return self._own_service

    def _new_service(self) -> ProxyService:
        service = ProxyService()
        self._services[id(service)] = service
        return service

    def _options(
        self,
        nic_handler: NicHandler,
        send_dbr_mode: SendDbrModeExt | QpSendDbrMode | None,
        queue_memory: str | None,
        proxy_service: bool,
        timeout: float,
    ) -> ExportOptions:
        self._check()
        check_queue_memory(queue_memory or "auto")
        where = self.queue_memory if queue_memory in (None, "auto") else queue_memory
        return ExportOptions(
            nic_handler=member("nic_handler", nic_handler, NicHandler),
            send_dbr_mode=None if send_dbr_mode is None else member("send_dbr_mode", send_dbr_mode, SendDbrModeExt),
            cpu_gpu=where == "cpu_gpu",
            proxy_service=bool(proxy_service),
            timeout=timeout,
        )

    def export(self, qp: QP, options: ExportOptions, place: Place | None = None) -> ExportedQp:
        self.dropped.close_all()
        exported = ExportedQp(self, qp, options, place)
        self._exports[id(exported)] = exported
        return exported

    def export_srq(self, srq: SRQ) -> ExportedSrq:
        self._check()
        with self._sharing:
            if srq not in self._srqs:
                before = self._srqs_before.get(srq)
                self._srqs[srq] = ExportedSrq(self, srq, self._sharing, self._forget_srq, before)
                self._srqs_before.pop(srq, None)
            return self._srqs[srq].use()

    def _forget_srq(self, exported: ExportedSrq) -> None:
        """Save the contents of an SRQ's structure that has no users left."""
        del self._srqs[exported.srq]
        self._srqs_before[exported.srq] = exported.read_all()

    def attach(self, part: Part) -> None:
        """Register `part`, an object of a library: closing this handle closes the part first."""
        self._check()
        self._parts[id(part)] = part

    def detach(self, part: Part) -> None:
        """Forget a part that has closed."""
        self._parts.pop(id(part), None)

    def forget_export(self, exported: ExportedQp) -> None:
        with self.watchdog.looking:
            self._exports.pop(id(exported), None)

    # --- life cycle --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self.open_here:
            return
        dropped = self.dropped.take()  # the collector has cleared weak references to some of these
        self._memory.update({id(part): part for part in dropped if isinstance(part, GpuMemory)})
        parts = [part for part in dropped if not isinstance(part, GpuMemory)]
        parts += [*living(self._exports), *living(self._parts)]
        for part in (*parts, *living(self._memory)):
            part.wait_idle()
        with deferred(), self.dropped.closing, ExitStack() as steps:  # in reverse order; every step runs
            self.watchdog.close()
            self._open = False
            steps.callback(self._release)
            for owned in (*living(self._services), *parts):
                steps.callback(owned.close)
