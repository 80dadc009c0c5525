"""The GPU handle (`doca_gpu`): a CUDA device, or host threads behind the same calls."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from ..enums import MemRegType, MemType, NicHandler, QpSendDbrMode, SendDbrModeExt
from ..errors import BadStateError, InvalidValueError, NotFoundError, NotSupportedError
from ..interrupts import Whole, deferred
from ..memory import PAGE
from ..providers.sdk.gpu import create_gpu
from ..verbs import PD, QP, SRQ
from ..verbs.arguments import member, whole
from . import cuda_backend
from .array import ExportedQps
from .backend import Backend
from .cuda_backend import CudaBackend
from .export import ExportedQp, ExportOptions
from .group import QpGroup, QueueOptions, create_group, create_qp
from .host_backend import HostBackend
from .memory import GpuMemory
from .proxy import ProxyService
from .srq import ExportedSrq
from .structure import Place
from .uar import RegisterTable
from .watchdog import Watchdog

logger: logging.Logger = logging.getLogger("gpunetio.gpu")

DEFAULT_TIMEOUT = 30.0  # seconds: the longest that a device wait lasts
QUEUE_MEMORY = ("auto", "gpu", "cpu_gpu")
_GPU_CPU_ALIGNMENT = 1 << 16  # GDRCopy maps GPU pages


def gpu_list() -> list[str]:
    """Return what `Gpu` can open: PCI addresses of CUDA devices, then "host"."""
    return [*(cuda_backend.pci_bus_id(i) for i in range(cuda_backend.device_count())), "host"]


class Gpu(metaclass=Whole):
    """Open a GPU (`doca_gpu_create`).

    `which`: "auto" (the first CUDA device, or the host), "host", a CUDA ordinal, or a PCI address ("8a:00.0").
    `warp`: lanes of a host warp, 1 … 32; a CUDA warp has 32.
    `queue_memory`: where queues lie. With "gpu", their structures are in GPU memory, their rings too if the NIC reaches
    it, and kernels ring the doorbells. "cpu_gpu" is for a system without GPUDirect RDMA: rings are in host memory,
    structures and allocations are CPU_GPU memory by default, and the CPU proxy rings. "auto" is "cpu_gpu" on an
    integrated GPU, whose memory no NIC reaches, and "gpu" elsewhere.
    """

    warp: int
    queue_memory: str
    registers: RegisterTable
    watchdog: Watchdog

    def __init__(self, which: str | int = "auto", *, warp: int = 1, queue_memory: str = "auto"):
        _check_queue_memory(queue_memory)
        self.backend: Backend = self._open_backend(which)
        with ExitStack() as undo:
            undo.callback(self.backend.close)
            self._destroy_sdk = create_gpu(self.name) if self.backend.has_memory else None
            undo.pop_all()
        self.warp = self.backend.lanes or warp
        self.queue_memory = queue_memory
        if queue_memory == "auto":
            self.queue_memory = "cpu_gpu" if self.backend.integrated else "gpu"
            if self.backend.integrated:
                logger.info("GPU %s is integrated, without GPUDirect RDMA: queues are in CPU_GPU memory", self.name)
        self._pid = os.getpid()
        self._open = True
        self._memory: list[GpuMemory] = []
        self._exports: list[ExportedQp] = []
        self._srqs: dict[SRQ, ExportedSrq] = {}
        self._srqs_before: WeakKeyDictionary[SRQ, np.ndarray] = WeakKeyDictionary()
        self._services: list[ProxyService] = []
        self._own_service: ProxyService | None = None
        self._lock = threading.Lock()
        self._warned = False
        self.registers = RegisterTable(self.backend)
        self.watchdog = Watchdog(lambda: list(self._exports))

    @staticmethod
    def _open_backend(which: str | int) -> Backend:
        if which == "host":  # CUDA takes a while to load
            return HostBackend()
        count = cuda_backend.device_count()
        if which == "auto" and count == 0:
            return HostBackend()
        if count == 0:
            raise NotSupportedError(f"GPU {which!r} needs CUDA, and this machine has no CUDA device: use 'host'")
        if which == "auto":
            return CudaBackend(0)
        if isinstance(which, int) or which.isdigit():
            if int(which) >= count:
                raise NotFoundError(f"no GPU {which}; there are {gpu_list()}")
            return CudaBackend(int(which))
        return CudaBackend(cuda_backend.ordinal_of(which))

    @property
    def target(self) -> str:
        """Return what kernels are compiled for: "cuda" or "cpu"."""
        return self.backend.target

    @property
    def name(self) -> str:
        """Return the PCI address, or "host"."""
        return self.backend.name

    @property
    def ordinal(self) -> int:
        """Return the CUDA ordinal of the device. AttributeError for the host."""
        return self.backend.ordinal

    # --- memory ------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, kind: MemType | None = None, alignment: int = PAGE) -> GpuMemory:
        """Allocate zeroed memory (`doca_gpu_mem_alloc`): GPU memory, or CPU_GPU where queues are in CPU_GPU memory.

        `alignment` is a power of two in bytes; 0 means one page of the host. GPU_CPU memory has at least 64 KiB.
        GPU_CPU needs GDRCopy; without it, the memory is CPU_GPU.
        """
        self._check()
        nbytes, alignment = whole("nbytes", nbytes), whole("alignment", alignment) or PAGE
        if nbytes <= 0:
            raise InvalidValueError(f"cannot allocate {nbytes} bytes: the size must be positive")
        if alignment < 0 or alignment & (alignment - 1):
            raise InvalidValueError(f"alignment {alignment} is not a power of two")
        if kind is None:
            kind = MemType.CPU_GPU if self.queue_memory == "cpu_gpu" else MemType.GPU
        kind = member("kind", kind, MemType)
        if kind is MemType.GPU_CPU:
            alignment = max(alignment, _GPU_CPU_ALIGNMENT)
            if not self.backend.maps_memory:
                kind = MemType.CPU_GPU
                if not self._warned:
                    logger.warning("GDRCopy is not available: GPU_CPU memory is pinned host memory (CPU_GPU) instead")
                self._warned = True
        address, array, owner = self.backend.alloc(nbytes, alignment, kind)
        memory = GpuMemory(self, address, nbytes, kind, array, owner)
        self._memory.append(memory)
        return memory

    def forget(self, memory: GpuMemory) -> None:
        """Remove `memory` from the list of what to close. `GpuMemory.close` calls it."""
        self._memory.remove(memory)

    def dmabuf_fd(self, memory: GpuMemory, nbytes: int | None = None) -> int:
        """Return a dmabuf descriptor of the memory's first `nbytes` or of all of it (`doca_gpu_dmabuf_fd`).

        The caller closes it. For `PD.register_dmabuf` and `Context.register_dmabuf_umem` of a device that reaches GPU
        memory. Address and size must be whole pages of the host. NotSupportedError when the GPU, its driver or this
        kind of memory has no dmabufs; then register the memory itself.
        """
        self._check()
        nbytes = memory.nbytes if nbytes is None else whole("nbytes", nbytes)
        if not 0 < nbytes <= memory.nbytes or nbytes % PAGE or memory.device_address % PAGE:
            raise InvalidValueError(
                f"a dmabuf of {nbytes} of {memory.nbytes} bytes at {memory.device_address:#x}: address and size must "
                f"be multiples of {PAGE}, and the range must lie in the memory"
            )
        return self.backend.dmabuf_fd(memory.device_address, nbytes)

    # --- doorbell registers ------------------------------------------------------------------------------------------

    def can_register_uar(self, address: int) -> bool:
        """Return whether kernels can ring a doorbell register (`doca_gpu_verbs_can_gpu_register_uar`)."""
        self._check()
        return self.registers.can_map(address)

    def export_uar(self, address: int) -> int:
        """Map a doorbell register and return its device address (`doca_gpu_verbs_export_uar`).

        Each call counts another user. `export_qp` calls it for its queue. DriverError when the GPU cannot map the
        register.
        """
        self._check()
        return self.registers.export(address)

    def unexport_uar(self, device_address: int) -> None:
        """Release a device address that `export_uar` returned (`doca_gpu_verbs_unexport_uar`)."""
        self._check()
        self.registers.unexport(device_address)

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
        `send_dbr_mode`   who keeps the doorbell record; None: as the queue pair was created
        `queue_memory`    overrides the GPU's own setting
        `proxy_service`   True: a thread of this handle does the CPU's work for the queue. False: `ExportedQp.progress`
                          or a service of yours does it
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
        send_dbr_mode: SendDbrModeExt | QpSendDbrMode = SendDbrModeExt.VALID_DBR,
        nic_handler: NicHandler = NicHandler.AUTO,
        queue_memory: str | None = None,
        mem_reg_type: MemRegType = MemRegType.DEFAULT,
        proxy_service: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> ExportedQp:
        """Create and export a QP of `depth` send slots with a CQ of its own (`doca_gpu_verbs_create_qp_hl`).

        Closing the result also closes QP and CQs. `depth` is rounded up to a power of two. The handler GPU_SM_DB
        becomes GPU_SM_NO_DBR when kernels keep no record. Arguments as for `export_qp`, and:

        `receives`      slots for receives, which have a CQ of their own; `cqe_inline` as in `QpInitAttr`
        `cq_collapsed`  the CQ of sends keeps only its last entry
        `mem_reg_type`  how the NIC is told of rings and records in GPU memory. DEFAULT tries a dmabuf, then the address
                        (nvidia-peermem), then CPU_GPU memory; the log and `ExportedQp.ring_memory` say which one it is.
                        Rings are in host memory from the start if the NIC does not reach GPU memory (as the software
                        NIC), with `queue_memory` "cpu_gpu", and for host threads

        NotSupportedError if the device lacks the `send_dbr_mode`, or if queues are in host memory and another
        `mem_reg_type` than DEFAULT was asked for; DriverError if such a registration fails.
        """
        queue = QueueOptions(
            depth=depth, receives=receives, cq_collapsed=cq_collapsed, cqe_inline=cqe_inline, mem_reg_type=mem_reg_type
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
        """Create two such QPs, the second one a core-direct companion (`doca_gpu_verbs_create_qp_group_hl`).

        Arguments as for `create_qp`; the handler cannot be BlueFlame.
        """
        queue = QueueOptions(depth=depth, cq_collapsed=cq_collapsed, mem_reg_type=mem_reg_type)
        return create_group(
            self, pd, queue, self._options(nic_handler, send_dbr_mode, queue_memory, proxy_service, timeout)
        )

    def create_service(self) -> ProxyService:
        """Start a thread that forwards doorbells of queues with a CPU proxy (`doca_gpu_verbs_create_service`).

        Needed only with `proxy_service=False`, or to spread queues over several threads.
        """
        self._check()
        with self._lock:
            return self._new_service()

    def own_service(self) -> ProxyService:
        """Return the service that this handle runs for its queues; start it if there is none."""
        with self._lock:
            if self._own_service is None or self._own_service.closed:
                self._own_service = self._new_service()
            return self._own_service

    def _new_service(self) -> ProxyService:
        self._services = [service for service in self._services if not service.closed]
        self._services.append(ProxyService())
        return self._services[-1]

    def _options(
        self,
        nic_handler: NicHandler,
        send_dbr_mode: SendDbrModeExt | QpSendDbrMode | None,
        queue_memory: str | None,
        proxy_service: bool,
        timeout: float,
    ) -> ExportOptions:
        self._check()
        _check_queue_memory(queue_memory or "auto")
        where = self.queue_memory if queue_memory in (None, "auto") else queue_memory
        return ExportOptions(
            nic_handler=member("nic_handler", nic_handler, NicHandler),
            send_dbr_mode=None if send_dbr_mode is None else member("send_dbr_mode", send_dbr_mode, SendDbrModeExt),
            cpu_gpu=where == "cpu_gpu",
            proxy_service=bool(proxy_service),
            timeout=timeout,
        )

    def export(self, qp: QP, options: ExportOptions, place: Place | None = None) -> ExportedQp:
        """Export a QP, with its structures at `place` or in memory of their own."""
        exported = ExportedQp(self, qp, options, place)
        self._exports.append(exported)
        return exported

    def export_srq(self, srq: SRQ) -> ExportedSrq:
        """Export a contiguous SRQ, or count another user of its structure. `export_qp` does this for its queue."""
        self._check()
        if srq not in self._srqs:
            self._srqs[srq] = ExportedSrq(self, srq, self._srqs_before.get(srq))
            self._srqs_before.pop(srq, None)
        return self._srqs[srq].use()

    def forget_srq(self, exported: ExportedSrq) -> None:
        """Keep the contents of an SRQ's structure that has no user left."""
        del self._srqs[exported.srq]
        self._srqs_before[exported.srq] = exported.read_all()

    def forget_export(self, exported: ExportedQp) -> None:
        """Remove a closed export. The watchdog does not look at it after this returns."""
        with self.watchdog.looking:
            self._exports.remove(exported)

    # --- life cycle --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close exports, memory and the handle (`doca_gpu_destroy`). Idempotent.

        Waits until no kernel uses any of them. TimedOutError if a kernel does not end.
        """
        if not self._open or self._pid != os.getpid():
            return
        for part in (*self._exports, *self._memory):
            part.wait_idle()
        with deferred(), ExitStack() as steps:  # in reverse order; every step runs, even if others raise
            self.watchdog.close()
            self._open = False
            steps.callback(self.backend.close)
            if self._destroy_sdk:
                steps.callback(self._destroy_sdk)
            for part in (*self._memory, *self._services, *self._exports):
                steps.callback(part.close)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise BadStateError(f"the GPU was opened in process {self._pid}: open it again here, or use spawn")
        if not self._open:
            raise BadStateError(f"GPU {self.name} is closed")

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Gpu({self.name!r}, target={self.target!r}{'' if self._open else ', closed'})"

    def __reduce__(self) -> NoReturn:
        raise BadStateError("a GPU handle cannot be pickled: open the GPU in the other process")


def _check_queue_memory(queue_memory: str) -> None:
    if queue_memory not in QUEUE_MEMORY:
        raise InvalidValueError(f"queue_memory = {queue_memory!r}: it is one of {', '.join(QUEUE_MEMORY)}")
