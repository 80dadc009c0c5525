"""The GPU handle (`doca_gpu`): a CUDA device, or the host's threads behind the same calls."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..enums import CqOverrun, MemType, NicHandler, QpSendDbrMode
from ..errors import BadStateError, InvalidValueError, NotFoundError, NotSupportedError
from ..memory import PAGE
from ..verbs import PD, QP
from . import cuda_backend
from .cuda_backend import CudaBackend
from .export import ExportedQp
from .host_backend import HostBackend
from .memory import GpuMemory
from .watchdog import Watchdog

logger = logging.getLogger("gpunetio.gpu")

DEFAULT_TIMEOUT = 30.0  # seconds that a device wait lasts at most


def gpu_list() -> list[str]:
    """What `Gpu` can open: PCI addresses of CUDA devices, then "host"."""
    return [*(cuda_backend.pci_bus_id(i) for i in range(cuda_backend.device_count())), "host"]


class Gpu:
    """Open a GPU (`doca_gpu_create`).

    `which`: "auto" (the first CUDA device, or the host), "host", a CUDA ordinal, or a PCI address ("8a:00.0").
    `warp`: lanes of a host warp, 1 … 32; a CUDA warp has 32.
    """

    def __init__(self, which: str | int = "auto", *, warp: int = 1):
        self.backend: Any = self._open_backend(which)
        self.warp = 32 if self.target == "cuda" else warp
        self._pid = os.getpid()
        self._open = True
        self._memory: list[GpuMemory] = []
        self._exports: list[ExportedQp] = []
        self.watchdog = Watchdog(lambda: list(self._exports))

    @staticmethod
    def _open_backend(which: str | int) -> Any:
        count = cuda_backend.device_count()
        if which == "host" or (which == "auto" and count == 0):
            return HostBackend()
        if count == 0:
            raise NotSupportedError(f"GPU {which!r} needs CUDA, and this machine has no CUDA device: use the host")
        if which == "auto":
            return CudaBackend(0)
        if isinstance(which, int) or which.isdigit():
            if int(which) >= count:
                raise NotFoundError(f"no GPU {which}; there are {gpu_list()}")
            return CudaBackend(int(which))
        return CudaBackend(cuda_backend.ordinal_of(which))

    @property
    def target(self) -> str:
        """"cuda" or "cpu": what kernels are compiled for."""
        return self.backend.target

    @property
    def name(self) -> str:
        """PCI address, or "host"."""
        return self.backend.name

    @property
    def stream(self) -> Any:
        """The CUDA stream that kernels are launched on."""
        return self.backend.stream

    def alloc(self, nbytes: int, kind: MemType = MemType.GPU, alignment: int = PAGE) -> GpuMemory:
        """Zeroed memory (`doca_gpu_mem_alloc`). GPU_CPU needs GDRCopy, without which it becomes CPU_GPU."""
        self._check()
        if nbytes <= 0:
            raise InvalidValueError(f"cannot allocate {nbytes} bytes: the size must be positive")
        if alignment <= 0 or alignment & (alignment - 1):
            raise InvalidValueError(f"alignment {alignment} is not a power of two")
        kind = MemType(kind)
        if kind is MemType.GPU_CPU and self.target == "cuda":
            logger.warning("GDRCopy is not available: GPU_CPU memory is pinned host memory (CPU_GPU) instead")
            kind = MemType.CPU_GPU
        address, array, owner = self.backend.alloc(nbytes, alignment, kind)
        memory = GpuMemory(self, address, nbytes, kind, array, owner)
        self._memory.append(memory)
        return memory

    def forget(self, memory: GpuMemory) -> None:
        """Called by `GpuMemory.close`."""
        self._memory.remove(memory)

    def export_qp(
        self, qp: QP, nic_handler: NicHandler = NicHandler.AUTO, timeout: float = DEFAULT_TIMEOUT
    ) -> ExportedQp:
        """Make a QP usable by kernels (`doca_gpu_verbs_export_qp`, `doca_gpu_verbs_get_qp_dev`).

        `timeout`: seconds after which any device wait on this queue ends with ETIMEDOUT.
        """
        self._check()
        exported = ExportedQp(self, qp, NicHandler(nic_handler), timeout)
        self._exports.append(exported)
        return exported

    def create_qp(
        self,
        pd: PD,
        depth: int = 1024,
        *,
        cq_collapsed: bool = False,
        send_dbr_mode: QpSendDbrMode = QpSendDbrMode.DBR_VALID,
        nic_handler: NicHandler = NicHandler.AUTO,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> ExportedQp:
        """A QP of `depth` send slots with a CQ of its own, exported (`doca_gpu_verbs_create_qp_hl`).

        Closing the result closes QP and CQ too. `depth` is rounded up to a power of two.
        """
        self._check()
        if depth < 1:
            raise InvalidValueError(f"a send queue of {depth} slots is not possible")
        slots = 1 << (depth - 1).bit_length()
        cq = pd.ctx.create_cq(slots, overrun=CqOverrun.ENABLE, collapsed=cq_collapsed)
        try:
            qp = pd.create_qp(sq_wr=slots, send_cq=cq, send_dbr_mode=send_dbr_mode)
            try:
                exported = self.export_qp(qp, nic_handler, timeout)
            except BaseException:
                qp.close()
                raise
        except BaseException:
            cq.close()
            raise
        exported.owned = (qp, cq)
        return exported

    def forget_export(self, exported: ExportedQp) -> None:
        """Called by `ExportedQp.close`."""
        self._exports.remove(exported)

    def close(self) -> None:
        """Close exports, memory and the handle (`doca_gpu_destroy`). Idempotent."""
        if not self._open or self._pid != os.getpid():
            return
        self.watchdog.close()
        for part in (*reversed(self._exports), *reversed(self._memory)):
            part.close()
        self._open = False
        self.backend.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise BadStateError(f"the GPU was opened in process {self._pid}: open it anew here, or use spawn, not fork")
        if not self._open:
            raise BadStateError(f"GPU {self.name} is closed")

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Gpu({self.name!r}, target={self.target!r})"

    def __reduce__(self):
        raise BadStateError("a GPU handle cannot be pickled: open the GPU in the other process")
