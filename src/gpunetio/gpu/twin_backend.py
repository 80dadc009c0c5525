"""The twin of a GPU as a device: kernels on host threads, and memory that only they reach (jit/twin.py)."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from ..enums import MemType
from ..errors import NotSupportedError
from ..jit.twin import twin_memory
from .backend import hidden
from .host_backend import HostBackend


class _Pages:
    """Memory of the twin, freed with the last reference to this object."""

    def __init__(self, nbytes: int):
        memory = twin_memory()
        self.address = memory.alloc(nbytes)
        weakref.finalize(self, memory.free, self.address, nbytes).atexit = False


class TwinBackend(HostBackend):
    """Host threads. GPU memory is out of the CPU's reach; CPU_GPU memory is host memory."""

    name = engine = "twin"
    has_memory = True
    maps_memory = False

    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, object]:
        if kind is not MemType.GPU:
            return super().alloc(nbytes, alignment, kind)
        pages = _Pages(nbytes + max(0, alignment - 1))
        return pages.address + -pages.address % max(1, alignment), None, hidden(pages)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        with twin_memory().open():
            ctypes.memmove(target, source, nbytes)

    def count_kernel(self, change: int) -> None:
        twin_memory().count_user(change)

    def dmabuf_fd(self, address: int, nbytes: int) -> int:
        """Raise NotSupportedError: this memory has no dmabufs."""
        raise NotSupportedError("memory of the twin of a GPU has no dmabuf: register the memory itself")
