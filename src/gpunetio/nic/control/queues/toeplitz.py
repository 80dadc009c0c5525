"""Tables with which the engine computes Toeplitz hashes: one per key, shared by TIRs."""

from __future__ import annotations

import numpy as np

from ....memory import HostMemory
from ...steering.rss import toeplitz_table


class ToeplitzTables:
    """The tables of a NIC, by key."""

    def __init__(self) -> None:
        self._memory: dict[bytes, HostMemory] = {}
        self._users: dict[bytes, int] = {}

    def hold(self, key: bytes) -> int:
        """Add a user of a key, and create its table for the first user. Return the table's address."""
        if key not in self._memory:
            table = toeplitz_table(key)
            memory = HostMemory(table.nbytes)
            memory.array[: table.nbytes] = table.reshape(-1).view(np.uint8)
            self._memory[key] = memory
        self._users[key] = self._users.get(key, 0) + 1
        return self._memory[key].address

    def release(self, key: bytes) -> None:
        """Remove a user of a key. The engine must no longer read the table for that user."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._memory.pop(key).close()

    def close(self) -> None:
        """Release the memory. The engine must have stopped."""
        for memory in self._memory.values():
            memory.close()
