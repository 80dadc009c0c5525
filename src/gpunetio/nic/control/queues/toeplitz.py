"""Tables by which the engine hashes packets: one for each key, which TIRs share."""

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
        """Count one more user of a key. Return the address of its table."""
        if key not in self._memory:
            table = toeplitz_table(key)
            memory = HostMemory(table.nbytes)
            memory.array[: table.nbytes] = table.reshape(-1).view(np.uint8)
            self._memory[key] = memory
        self._users[key] = self._users.get(key, 0) + 1
        return self._memory[key].address

    def release(self, key: bytes) -> None:
        """Count one user of a key less. The engine must not read its table for that user any more."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._memory.pop(key).close()

    def close(self) -> None:
        """Release the memory. The engine must have stopped."""
        for memory in self._memory.values():
            memory.close()
