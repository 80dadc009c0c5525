"""The host as a GPU: memory is host memory, and every address is everyone's."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from ..enums import MemType
from ..errors import NotSupportedError
from ..memory import HostMemory

SHARED_FROM = 4 << 20  # bytes: a NIC may lend it to another process (nic/loans.py), at the price of descriptors


class HostBackend:
    """What `Gpu` asks of a machine without CUDA."""

    target = "cpu"
    name = "host"
    integrated = False
    maps_gpu_memory = True  # the CPU sees all memory

    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, Any]:
        """(device address, CPU view, what keeps it allocated)."""
        size = nbytes + max(0, alignment - 1)
        try:
            memory = HostMemory(size, shared=size >= SHARED_FROM)
        except OSError:  # out of descriptors
            memory = HostMemory(size)
        start = -memory.address % max(1, alignment)
        array = memory.array[start : start + nbytes]
        weakref.finalize(array, memory.close).atexit = False  # views of this one keep it mapped, not open
        return int(array.ctypes.data), array, array

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between any two addresses."""
        ctypes.memmove(target, source, nbytes)

    def map(self, address: int, nbytes: int, io: bool = False) -> int:
        """The device address of host memory."""
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`."""

    def dmabuf_fd(self, address: int, nbytes: int) -> int:
        """Host memory has none."""
        raise NotSupportedError("memory of the host target has no dmabufs: register the memory itself")

    def close(self) -> None:
        """Nothing to release."""
