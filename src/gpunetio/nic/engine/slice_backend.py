"""The interface of a place for turns other than CPU threads: a GPU or its twin (gpu/slice_backends.py)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...memory import HostMemory
from .hardware import SharedMapping


class SliceBackend(Protocol):
    """A place where turns are made in slices (gpu/slices.py). `sharing`, `share`, `open_shared`: see `Engine`."""

    sharing: str

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None: ...

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> SharedMapping: ...

    def contains(self, address: int, nbytes: int) -> bool:
        """Return whether a range is memory of this place that may hold queues and payload and the CPU cannot access."""
        ...

    def is_near(self, address: int, nbytes: int) -> bool:
        """Return whether a range is memory of the place itself, where a fence of GPU scope orders stores."""
        ...

    def add(self, record: np.void, address: int) -> None:
        """Set up the record of a worker, which lies at `address`, for slices."""
        ...

    def doorbell_lines(self, lines: HostMemory) -> int:
        """Allocate doorbell lines for the lines in host memory, and return their address. Valid until `close`.

        They are followed by as much room again (queues/doorbells.py).
        """
        ...

    def map(self, address: int, nbytes: int) -> None:
        """Make host memory that is registered with the NIC accessible to slices."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`. No slice may touch the memory any more."""
        ...

    def why_failed(self, record: np.void) -> str:
        """Return why a worker can make no more turns; "" if it can."""
        ...

    def close(self) -> None:
        """Free all memory of the place. The engine must have stopped."""
        ...
