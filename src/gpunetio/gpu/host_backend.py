"""The host as a GPU: its memory is host memory, and all addresses are the same for CPU, kernels and NIC."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from ..enums import MemType
from ..errors import NotSupportedError
from ..memory import HostMemory
from .backend import Backend

# Memory of this many bytes or more has a descriptor each, so that a NIC can grant it to other processes
# (nic/control/regions/grants.py).
SHARED_FROM = 4 << 20


class HostBackend(Backend):
    """Host threads, and host memory."""

    target = "cpu"
    name, engine = "host", "cpu"
    has_memory = False
    maps_memory = True  # the CPU sees all memory
    integrated = False
    lanes: int | None = None

    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, object]:
        size = nbytes + max(0, alignment - 1)
        try:
            memory = HostMemory(size, shared=size >= SHARED_FROM)
        except OSError:  # out of descriptors
            memory = HostMemory(size)
        start = -memory.address % max(1, alignment)
        array = memory.array[start : start + nbytes]
        weakref.finalize(array, memory.close).atexit = False  # views keep the memory mapped, but no descriptor open
        return int(array.ctypes.data), array, array

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def map(self, address: int, nbytes: int, io: bool = False) -> int:
        """Return the address: kernels see host memory as the CPU does."""
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def count_kernel(self, change: int) -> None:
        """Do nothing."""

    def dmabuf_fd(self, address: int, nbytes: int) -> int:
        """Raise NotSupportedError: host memory has no dmabufs."""
        raise NotSupportedError("memory of the host target has no dmabuf: register the memory itself")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
