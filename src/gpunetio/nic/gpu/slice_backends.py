"""What makes a NIC's turns in slices: the twin of a GPU, or a GPU (gpu_backend.py)."""

from __future__ import annotations

import numpy as np

from ...errors import InvalidValueError
from ...jit.c_function import c_function
from ...jit.twin import TwinMemory, twin_memory
from ...memory import HostMemory, MappedMemory
from ..engine.hardware import SharedMapping
from ..engine.slice_backend import SliceBackend
from ..engine.port import TWIN, PortConfig
from .slices import SLICE_NS, take_slice

_SHARED_BYTES = 227 << 10  # most shared memory of a block on an H100


class TwinSliceBackend:
    """The twin of a GPU. Host memory needs no mapping there."""

    def __init__(self) -> None:
        self._memory: TwinMemory = twin_memory()
        self._taken: list[tuple[int, int]] = []

    def contains(self, address: int, nbytes: int) -> bool:
        return self._memory.contains(address, nbytes)

    is_near = contains
    sharing = TWIN

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
        start, size, fd = self._memory.share()
        return start, size, "", fd

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> SharedMapping:
        if len(fds) != 1:
            raise InvalidValueError(f"{len(fds)} descriptors came with memory of a twin, not 1")
        return MappedMemory(fds[0], nbytes, writable=True)

    def add(self, record: np.void, address: int) -> None:
        record["twin"], record["twin_slice"] = self._memory.record, c_function(take_slice, 64)
        record["slice_ns"] = SLICE_NS
        record["shared"], record["shared_bytes"] = self._take(_SHARED_BYTES), _SHARED_BYTES

    def doorbell_lines(self, lines: HostMemory) -> int:
        return self._take(2 * lines.nbytes)

    def _take(self, nbytes: int) -> int:
        self._taken.append((self._memory.alloc(nbytes), nbytes))
        return self._taken[-1][0]

    def map(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def why_failed(self, record: np.void) -> str:
        return ""

    def close(self) -> None:
        for address, nbytes in self._taken:
            self._memory.free(address, nbytes)
        self._taken.clear()


def slice_backend_of(config: PortConfig) -> SliceBackend:
    """Return the backend that makes the turns of a NIC with this port, whose engine is not on CPU threads."""
    if config.engine == TWIN:
        return TwinSliceBackend()
    from .gpu_backend import GpuSliceBackend  # which needs CUDA

    return GpuSliceBackend(config.gpu, config.copiers)
