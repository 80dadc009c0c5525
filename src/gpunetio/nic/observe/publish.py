"""Publish a NIC's tables and counters, read-only, to other processes of the same user.

A `fabric.control_socket.ControlSocket` sends a `Publication` to each process that requests it (running.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import numpy as np

from ...fabric.control_message import Body
from ...memory import HostMemory
from ..state.counters import COUNTERS
from ..state.tables import Table
from ..state.wire import WIRE

# Attributes of a NIC.
TABLES = ("qps", "cqs", "srqs", "mkeys", "pds", "umems", "uar_pages", "eqs", "gids", "sqs", "rqs")
_USED = {"gids": "gid"}  # the field that marks a row as in use, where it is not the number


@functools.cache
def describe_dtype(dtype: np.dtype) -> dict[str, object]:
    """Return a structured type as values for JSON."""
    names = dtype.names or ()
    fields = [dtype.fields[name] for name in names]  # type: ignore[index]
    formats = [f"{field[0].shape}{field[0].base.str}" if field[0].shape else field[0].str for field in fields]
    return {
        "names": list(names), "formats": formats, "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _describe(name: str, fd: int, address: int, offset: int, dtype: np.dtype, rows: int) -> dict[str, object]:
    """Describe a table: index of its descriptor, offset in that memory, and address in the NIC's process."""
    number = dtype.names[0] if dtype.names and name != "counters" else None
    return {
        "fd": fd, "offset": offset, "rows": rows, "dtype": describe_dtype(dtype), "address": address + offset,
        "number": number, "used": _USED.get(name, number),
    }


def _read_only(memory: HostMemory) -> int:
    """Return a new read-only descriptor of shared memory."""
    return os.open(f"/proc/thread-self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)


def copies(tables: Mapping[str, np.ndarray]) -> tuple[Body, list[int]]:
    """Copy tables. Return a description like a `Publication`'s, and the descriptor of the copies' memory.

    The caller owns the descriptor. The memory is freed when its last descriptor is closed.
    """
    described: dict[str, dict[str, object]] = {}
    memory = HostMemory(sum(max(len(rows), 1) * rows.dtype.itemsize for rows in tables.values()), shared=True)
    try:
        offset = 0
        for name, rows in tables.items():
            count = max(len(rows), 1)  # an empty table gets one row, marked as not in use
            memory.view(rows.dtype, offset, count)[: len(rows)] = rows
            described[name] = _describe(name, 0, 0, offset, rows.dtype, count)
            offset += count * rows.dtype.itemsize
        return {"tables": described}, [_read_only(memory)]
    finally:
        memory.close()


class Publication:
    """The description of a NIC's `tables`, `wires` and `counters`, all in shared memory.

    `counters` is a memory, the byte offset of the first counters record in it, and the number of records. Calling the
    object returns the description and read-only file descriptors, which the object still owns.
    """

    def __init__(
        self, tables: Mapping[str, Table], counters: tuple[HostMemory, int, int], wires: HostMemory | None = None
    ):
        self.fds: list[int] = []
        self._tables: dict[str, dict[str, object]] = {}
        try:
            for name, table in tables.items():
                self._add(name, table.memory, 0, table.rows.dtype, len(table.rows))
            if wires is not None:
                self._add("wires", wires, 0, WIRE.dtype, wires.nbytes // WIRE.size)
            memory, offset, workers = counters
            self._add("counters", memory, offset, COUNTERS.dtype, workers)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, memory: HostMemory, offset: int, dtype: np.dtype, rows: int) -> None:
        self._tables[name] = _describe(name, len(self.fds), memory.address, offset, dtype, rows)
        self.fds.append(_read_only(memory))

    def __call__(self) -> tuple[Body, list[int]]:
        return {"tables": self._tables}, self.fds

    def close(self) -> None:
        """Close the descriptors. Processes that have mapped the memory keep their mappings."""
        while self.fds:
            os.close(self.fds.pop())
