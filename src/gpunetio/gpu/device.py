"""A GPU as a device: its identity, its memory, and the doorbell registers that its kernels reach."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from contextlib import ExitStack
from typing import NoReturn
from weakref import WeakValueDictionary

from ..arguments import instance, member, text, whole, within
from ..closing import Closing
from ..dropped import Droppable, Dropped, drop_root, hold, living
from ..enums import MemType
from ..errors import BadStateError, InvalidValueError, NotFoundError, NotSupportedError
from ..interrupts import Whole
from ..memory import PAGE
from ..nic.engine.port import CPU
from ..providers.sdk.gpu import create_gpu
from . import cuda_backend
from .backend import Backend
from .cuda_backend import CudaBackend
from .host_backend import HostBackend
from .memory import GpuMemory, Part
from .twin_backend import TwinBackend
from .uar import RegisterTable

logger: logging.Logger = logging.getLogger("gpunetio.gpu")

QUEUE_MEMORY = ("auto", "gpu", "cpu_gpu")
# "cpu" is the name of the target.
WITHOUT_CUDA: dict[str, type[HostBackend]] = {"host": HostBackend, "cpu": HostBackend, "twin": TwinBackend}
_LARGEST = 1 << 47  # bytes: what a process can address at most
_GPU_CPU_ALIGNMENT = 1 << 16  # GDRCopy maps GPU pages


def gpu_list() -> list[str]:
    """Return the devices that `Gpu` can open: PCI addresses of CUDA devices, then "host"."""
    return [*(cuda_backend.pci_bus_id(i) for i in range(cuda_backend.device_count())), "host"]


def engine_of(which: str, queue_memory: str) -> str:
    """Return the engine (PortConfig) of a software NIC that runs where `Gpu(which, queue_memory=…)` has its queues."""
    check_queue_memory(queue_memory)
    on_cpu = WITHOUT_CUDA.get(which) is HostBackend or (which == "auto" and cuda_backend.device_count() == 0)
    if queue_memory == "cpu_gpu" or on_cpu:
        return CPU
    if which in WITHOUT_CUDA:
        return which
    return f"gpu{0 if which == 'auto' else which if which.isdigit() else cuda_backend.ordinal_of(which)}"


def check_queue_memory(queue_memory: str) -> None:
    """Raise InvalidValueError unless `queue_memory` is a known setting."""
    if queue_memory not in QUEUE_MEMORY:
        raise InvalidValueError(f"queue_memory = {queue_memory!r}: it is one of {', '.join(QUEUE_MEMORY)}")


class GpuDevice(Closing, Droppable, metaclass=Whole):
    """The part of `Gpu` that does not depend on queues."""

    warp: int
    queue_memory: str
    registers: RegisterTable
    _open = False

    def __init__(self, which: str | int, warp: int, queue_memory: str):
        check_queue_memory(queue_memory)
        self.backend: Backend = self._open_backend(which)
        with ExitStack() as undo:
            undo.callback(self.backend.close)
            self._destroy_sdk = create_gpu(self.name) if self.backend.sdk else None
            undo.pop_all()
        self.warp = self.backend.lanes or warp
        self.queue_memory = queue_memory
        if queue_memory == "auto":
            self.queue_memory = "cpu_gpu" if self.backend.integrated else "gpu"
            if self.backend.integrated:
                logger.info("GPU %s is integrated, without GPUDirect RDMA: queues are in CPU_GPU memory", self.name)
        self._pid = os.getpid()
        self._memory: WeakValueDictionary[int, GpuMemory] = WeakValueDictionary()  # by id()
        self.dropped: Dropped[Part] = Dropped()
        self._warned = False
        self.registers = RegisterTable(self.backend)

    @staticmethod
    def _open_backend(which: str | int) -> Backend:
        if not isinstance(which, int):
            text("which", which)
        if which in WITHOUT_CUDA:  # which takes a while to load
            return WITHOUT_CUDA[str(which)]()
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
        """Return the PCI address, "host" or "twin"."""
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

        Keep a reference to the memory as long as kernels use its address: memory without references is freed, with a
        ResourceWarning.
        """
        self._check()
        self.dropped.close_all()
        nbytes, alignment = whole("nbytes", nbytes), within("alignment", alignment, 0, _LARGEST) or PAGE
        if not 0 < nbytes <= _LARGEST:
            raise InvalidValueError(f"cannot allocate {nbytes} bytes: it must be 1 to {_LARGEST}")
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
        self._memory[id(memory)] = memory
        return memory

    def forget_memory(self, memory: GpuMemory) -> None:
        """Forget memory that has closed. Called by the memory."""
        self._memory.pop(id(memory), None)

    def dmabuf_fd(self, memory: GpuMemory, nbytes: int | None = None) -> int:
        """Return a dmabuf descriptor of the memory's first `nbytes` or of all of it (`doca_gpu_dmabuf_fd`).

        Pass it to `PD.register_dmabuf` or `Context.register_dmabuf_umem` of a device that reaches GPU memory, and close
        it. Address and size must be whole pages of the host. NotSupportedError when the GPU, its driver or this kind of
        memory has no dmabufs; then register the memory itself.
        """
        self._check()
        instance("memory", memory, GpuMemory)
        nbytes = memory.nbytes if nbytes is None else whole("nbytes", nbytes)
        if not 0 < nbytes <= memory.nbytes or nbytes % PAGE or memory.device_address % PAGE:
            raise InvalidValueError(
                f"a dmabuf of {nbytes} of {memory.nbytes} bytes at {memory.device_address:#x}: address and size must "
                f"be multiples of {PAGE}, and the range must lie in the memory"
            )
        return self.backend.dmabuf_fd(memory.device_address, nbytes)

    def count_kernel(self, change: int) -> None:
        self.backend.count_kernel(change)

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

    # --- life cycle --------------------------------------------------------------------------------------------------

    @property
    def open_here(self) -> bool:
        """Return whether the handle is open, and was opened by this process."""
        return self._open and self.opened_here

    def when_dropped(self) -> None:
        drop_root(self)

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called."""
        return not self._open

    @property
    def opened_here(self) -> bool:
        """Return whether this process has opened the GPU. A forked child has not."""
        return self._pid == os.getpid()

    def _opened(self) -> None:
        """Mark the handle as open, as the last step of a constructor."""
        self._open = True
        hold(self)

    @abstractmethod
    def close(self) -> None:
        """Close everything made from the handle, then the handle itself (`doca_gpu_destroy`). Idempotent.

        Wait until no kernel uses any of this. TimedOutError if a kernel does not end.
        """

    def _release(self) -> None:
        """Free the memory and the device. Nothing else of the handle is open by now."""
        with ExitStack() as steps:  # in reverse order; every step runs, even if others raise
            steps.callback(self.backend.close)
            if self._destroy_sdk:
                steps.callback(self._destroy_sdk)
            for memory in living(self._memory):
                steps.callback(memory.close)

    def _check(self) -> None:
        if not self.opened_here:
            raise BadStateError(f"the GPU was opened in process {self._pid}: open it again here, or use spawn")
        if not self._open:
            raise BadStateError(f"GPU {self.name} is closed")

    def __repr__(self) -> str:
        return f"Gpu({self.name!r}, target={self.target!r}{'' if self._open else ', closed'})"

    def __reduce__(self) -> NoReturn:
        raise BadStateError("a GPU handle cannot be pickled: open the GPU in the other process")
