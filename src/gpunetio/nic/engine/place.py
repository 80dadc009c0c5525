"""Where a NIC makes its turns, if not on threads of the CPU (gpu/places.py)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...memory import HostMemory
from .hardware import Opened


class Place(Protocol):
    """Where turns are made, in slices (gpu/slices.py). `sharing`, `share` and `open_shared` are those of `Engine`."""

    sharing: str

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None: ...

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> Opened: ...

    def contains(self, address: int, nbytes: int) -> bool:
        """Return whether a range, which the CPU does not reach, is memory for queues and payload."""
        ...

    def is_near(self, address: int, nbytes: int) -> bool:
        """Return whether a range is memory of the place itself, where a fence of its scope orders stores for all."""
        ...

    def add(self, record: np.void, address: int) -> None:
        """Set up the record of a worker, at `address`, for its slices."""
        ...

    def lines(self, lines: HostMemory) -> int:
        """Return the address of doorbell lines that belong to these in host memory, until `close`.

        As much room is behind them (queues/doorbells.py).
        """
        ...

    def map(self, address: int, nbytes: int) -> None:
        """Let slices reach host memory, which has been registered with the NIC."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a `map`. No slice touches the memory any more."""
        ...

    def why_failed(self, record: np.void) -> str:
        """Return why a worker makes no turns any more; "" while all is well."""
        ...

    def close(self) -> None:
        """Release everything. The engine has stopped."""
        ...
