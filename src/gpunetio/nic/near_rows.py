"""Room for the copies of rows that slices borrow (borrowed.py)."""

from __future__ import annotations

import numpy as np

from ..jit.twin import TwinMemory
from ..memory import HostMemory


class NearRows:
    """A copy of each of the parts of a NIC's state, in the memory of the twin. `record` learns how far each is away.

    `parts` are the control block and the tables, by the names of their distances in NIC.
    """

    def __init__(self, memory: TwinMemory, record: np.void, parts: dict[str, HostMemory]):
        self._memory = memory
        self._nbytes = sum(part.nbytes for part in parts.values())
        self._address = at = memory.alloc(self._nbytes)
        for name, part in parts.items():
            record[name] = at - part.address
            at += part.nbytes

    def close(self) -> None:
        """Give the room back. The engine has stopped."""
        self._memory.free(self._address, self._nbytes)
