"""Tables of rows, as Python code reads them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import NotFoundError
from ...formats.layout import Entry
from ...memory import HostMemory


Row = np.void | np.ndarray  # a row of a table, or a new one for it


class Table:
    """Rows of one `Entry`, looked up by number: its low bits select the row, whose first field must hold the number.

    A row is free if its first field is 0. Row 0 is never used. Other processes can look at a table that is `shared`.
    """

    name: str
    entry: Entry
    mask: int
    memory: HostMemory
    rows: np.ndarray
    address: int

    def __init__(self, name: str, entry: Entry, rows: int, shared: bool = True):
        self.name, self.entry = name, entry
        self.mask = rows - 1
        self.memory = HostMemory(rows * entry.size, shared=shared)
        self.rows = self.memory.view(entry.dtype, 0, rows)
        self.address = self.memory.address
        self._number = entry.dtype.names[0]  # type: ignore[index]
        self._last = self._highest = 0

    @property
    def given(self) -> np.ndarray:
        """Return the rows up to the highest that `free_slot` has given: reading others would allocate their pages."""
        return self.rows[: self._highest + 1]

    def __len__(self) -> int:
        return int(np.count_nonzero(self.rows[self._number]))

    def __iter__(self) -> Iterator[np.void]:
        return iter(self.rows[np.flatnonzero(self.rows[self._number])])

    def __contains__(self, number: int) -> bool:
        return number > 0 and int(self.rows[self._slot(number)][self._number]) == number

    def __getitem__(self, number: int) -> np.void:
        if number not in self:
            raise NotFoundError(f"no {self.name} {number:#x}; there are {[hex(r[self._number]) for r in self]}")
        return self.rows[self._slot(number)]

    def copy(self, number: int) -> np.void:
        """Return a copy of the row of `number`, made of its bytes: NumPy copies a structure field by field."""
        return np.frombuffer(bytearray(self[number].tobytes()), self.entry.dtype)[0]

    def row_address(self, number: int) -> int:
        """Return the address of the row of `number`."""
        return self.address + self._slot(number) * self.entry.size

    def free_slot(self, start: int | None = None) -> int | None:
        """Return the first free row from `start` on, wrapping around, or None if the table is full.

        By default, `start` is the row after the last one that was returned. That row is usually free, and numbers are
        not reused at once.
        """
        slot = self._free_from(self._last % self.mask + 1 if start is None else start)
        if slot is not None:
            self._highest = max(self._highest, slot)
            self._last = slot if start is None else self._last
        return slot

    def _free_from(self, start: int) -> int | None:
        numbers = self.rows[self._number]
        if numbers[start] == 0:
            return start
        for slots in (range(start, len(numbers)), range(1, start)):
            free = np.flatnonzero(numbers[slots.start : slots.stop] == 0)
            if len(free):
                return slots.start + int(free[0])
        return None

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()

    def _slot(self, number: int) -> int:
        return number & self.mask


class MkeyTable(Table):
    """Memory keys: the upper 24 bits of a key are its index, the low 8 bits vary."""

    def _slot(self, number: int) -> int:
        return (number >> 8) & self.mask
