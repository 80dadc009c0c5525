"""What a NIC shows to other processes of its user: its tables and counters, to be read and not written.

A `Publication` is what a `fabric.neighbours.Door` hands to whoever looks; observe.py is the looker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..memory import HostMemory
from .tables import COUNTERS, WIRE, Table

TABLES = ("qps", "cqs", "srqs", "mkeys", "pds", "umems", "uar_pages", "eqs", "gids")  # attributes of a NIC
_USED = {"gids": "gid"}  # what tells that a row is in use, where it is not its number


def describe_dtype(dtype: np.dtype) -> dict[str, Any]:
    """A structured type for JSON."""
    names = dtype.names or ()
    fields = [dtype.fields[name] for name in names]  # type: ignore[index]
    formats = [f"{field[0].shape}{field[0].base.str}" if field[0].shape else field[0].str for field in fields]
    return {
        "names": list(names), "formats": formats, "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }  # fmt: skip


class Publication:
    """Descriptions of `tables`, of the `wires`, and of the counters, whose record is at a byte offset of a memory.

    All of it is shared memory. Calling it gives the description and descriptors, which are read-only and stay ours.
    """

    def __init__(self, tables: Mapping[str, Table], counters: tuple[HostMemory, int], wires: HostMemory | None = None):
        self.fds: list[int] = []
        self._tables: dict[str, dict[str, Any]] = {}
        try:
            for name, table in tables.items():
                self._add(name, table.memory, 0, table.rows.dtype, len(table.rows))
            if wires is not None:
                self._add("wires", wires, 0, WIRE.dtype, wires.nbytes // WIRE.size)
            self._add("counters", *counters, COUNTERS.dtype, 1)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, memory: HostMemory, offset: int, dtype: np.dtype, rows: int) -> None:
        number = dtype.names[0] if dtype.names and name != "counters" else None
        self._tables[name] = {
            "fd": len(self.fds), "offset": offset, "rows": rows, "dtype": describe_dtype(dtype),
            "address": memory.address + offset, "number": number, "used": _USED.get(name, number),
        }  # fmt: skip
        self.fds.append(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC))

    def __call__(self) -> tuple[dict[str, Any], list[int]]:
        return {"tables": self._tables}, self.fds

    def close(self) -> None:
        """Close the descriptors. Whoever has mapped the memory keeps it."""
        while self.fds:
            os.close(self.fds.pop())
