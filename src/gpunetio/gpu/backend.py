"""The interface of the device below a `Gpu`: its memory, and host memory that is mapped for kernels.

There is one backend for CUDA (cuda_backend.py), one for host threads (host_backend.py), and one for host threads with
memory that the CPU does not reach (twin_backend.py). `Gpu` chooses the backend; no other code asks which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..enums import MemType


def hidden(owner: object) -> np.ndarray:
    """Return an array that holds an object and hides it from Python's collector, which does not look into arrays.

    The collector finalizes all objects of a cycle at once. But memory must stay allocated until the regions over it are
    closed (dropped.py).
    """
    holder = np.empty((), object)
    holder[()] = owner
    return holder


class Backend(ABC):
    """A device where kernels run, from its opening to `close`.

    `target` is what kernels are compiled for, "cuda" or "cpu"; `name` is the PCI address, "host" or "twin"; `ordinal`
    is the number of a CUDA device, and no attribute of the host.

    `has_memory`: the device has its own memory, which the CPU does not reach at the same addresses. `maps_memory`: the
    CPU can map this memory (GPU_CPU). `integrated`: no NIC reaches the device's memory. `lanes`: lanes of a warp, None
    if not fixed. `sdk`: DOCA's SDK knows the device by the same name. `engine`: the engine with which a software NIC
    runs on the device.
    """

    target: str
    name: str
    ordinal: int
    has_memory: bool
    maps_memory: bool
    integrated: bool
    lanes: int | None
    sdk: bool = False
    engine: str

    @abstractmethod
    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, object]:
        """Allocate zeroed memory. Return its device address, the CPU's view or None, and what keeps it allocated."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between any two addresses while kernels run."""

    @abstractmethod
    def map(self, address: int, nbytes: int, io: bool = False) -> int:
        """Map host memory, or with `io` a device's registers, for kernels. Return the address that they use."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a `map`."""

    @abstractmethod
    def dmabuf_fd(self, address: int, nbytes: int) -> int:
        """Return a dmabuf descriptor of a range of the device's memory. NotSupportedError if there are none."""

    @abstractmethod
    def count_kernel(self, change: int) -> None:
        """Take note that a kernel starts (+1) or has ended (-1)."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that was acquired on opening."""
