"""Observe running NICs from any process of the same user: read their tables, counters and flow rules."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import InvalidValueError, NotFoundError
from ...fabric.claims import PATIENCE, names
from ...fabric.discovery import look_at_all
from ...memory import MappedMemory

logger: logging.Logger = logging.getLogger("gpunetio.nic")

# Port counters that are derived from other counters unless the NIC counts them itself: name, source, and divisor. The
# specification counts the data of a port in words of four bytes.
_DERIVED = (
    ("port_xmit_data", "rdma_tx_bytes", 4), ("port_rcv_data", "rdma_rx_bytes", 4),
    ("port_xmit_packets", "rdma_tx_packets", 1), ("port_rcv_packets", "rdma_rx_packets", 1),
)
# The table and the fields that contain the counts of Ethernet queues, by type of queue.
QUEUE_COUNTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sq": ("sqs", ("frames", "frame_bytes")),
    "rq": ("rqs", ("frames", "frame_bytes", "no_buffer", "too_long", "not_ready")),
}
_FORMAT = re.compile(r"(\(\d+,\))?[<>|]([iu][1248]|V\d+)")


Description = dict[str, Any]  # JSON from another process; anything unexpected raises an exception


class _MappedTable:
    """A table in shared memory that the NIC writes."""

    def __init__(self, description: Description, fds: list[int], memories: list[MappedMemory]):
        layout = description["dtype"]
        if others := [kind for kind in layout["formats"] if not _FORMAT.fullmatch(kind)]:
            raise InvalidValueError(f"a table has fields of types {others}: use integers and bytes only")
        fields: Any = {key: layout[key] for key in ("names", "formats", "offsets", "itemsize")}
        for name in fields["names"]:
            _printable("the name of a field", name)
        dtype = np.dtype(fields)
        rows, offset, fd = int(description["rows"]), int(description["offset"]), fds[description["fd"]]
        memory = MappedMemory(fd, os.fstat(fd).st_size)
        memories.append(memory)
        if rows < 1 or offset < 0 or offset + rows * dtype.itemsize > memory.nbytes:
            raise InvalidValueError(
                f"{rows} rows of {dtype.itemsize} bytes at offset {offset} do not fit in the {memory.nbytes} bytes of "
                "shared memory"
            )
        self.address = int(description["address"])
        self.number, self.used = description["number"], description["used"]
        self.rows = memory.view(dtype, offset, rows)
        for field in (self.number, self.used):
            if field is not None and field not in (dtype.names or ()):
                raise InvalidValueError(f"a table has no field {field!r}; it has {dtype.names}")
        if self.number is not None:
            _need_number(dtype, self.number)
        if self.used is not None and dtype[self.used].shape:
            raise InvalidValueError(f"the field {self.used!r} is an array: rows in use are marked by a single value")

    def in_use(self) -> np.ndarray:
        """Return a copy of the rows in use."""
        if self.used is None:
            return self.rows.copy()
        column = self.rows[self.used]
        return self.rows[[any(bytes(cell)) for cell in column] if column.dtype.kind == "V" else column != 0]


def _printable(what: str, value: object) -> str:
    """Check that a value is printable text, and return it. InvalidValueError otherwise."""
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidValueError(f"{what} is {value!r}: it must be printable text")
    return value


def _need_number(dtype: np.dtype, field: str) -> None:
    """Refuse a field that is missing or is not a single integer, as may happen with a NIC of another release."""
    kind = dtype[field] if field in (dtype.names or ()) else None
    if kind is None or kind.kind not in "iu":
        raise InvalidValueError(
            f"the field {field!r} of a table is {kind or 'missing'}, and must be an integer: use the release of "
            "gpunetio that runs the NIC"
        )


def number_in(row: np.void, field: str) -> int:
    """Return the integer in a field of a row. InvalidValueError if the field is missing or is no integer."""
    _need_number(row.dtype, field)
    return int(row[field])


class Tables(Mapping[str, np.ndarray]):
    """The tables by name. Each lookup returns a copy of the rows that are in use at that moment.

    The NIC may write during the copy, so the fields of a row may be from different moments.
    """

    def __init__(self, parts: dict[str, _MappedTable]):
        self._tables = parts

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._tables:
            raise NotFoundError(f"the NIC has no table {name!r}; it has {', '.join(self._tables)}")
        return self._tables[name].in_use()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def number_field(self, name: str) -> str:
        """Return the name of the field with a row's number. InvalidValueError if the rows have no number."""
        if (field := self._tables[name].number) is None:
            raise InvalidValueError(
                f"rows of the table {name!r} have no numbers: use the release of gpunetio that runs the NIC"
            )
        return field

    def number_at(self, name: str, address: int) -> int:
        """Return the number of the row at an address in the NIC's process, or 0 if there is no row."""
        part = self._tables.get(name)
        if part is None or part.number is None:
            return 0
        index, rest = divmod(address - part.address, part.rows.dtype.itemsize)
        return int(part.rows[index][part.number]) if rest == 0 and 0 <= index < len(part.rows) else 0


class Observed:
    """A running NIC of any process: `name`, `pid`, `addresses`, `tables` (`.tables["qps"]`) and `counters`.

    If `rules` returned the NIC, its tables are copies from one moment, it has no counters, and `no_ethernet` is the
    reason why it can have no flow rules, or "".

    `close()` or garbage collection unmaps the tables. After the NIC has ended, its last state can still be read.
    """

    pid: int
    name: str
    addresses: list[str]
    tables: Tables
    no_ethernet: str

    def __init__(self, pid: int, description: Description, fds: list[int]):
        memories: list[MappedMemory] = []
        self._finalizer = weakref.finalize(self, _close, memories)
        try:
            self.pid, self.name = pid, _printable("its name", description["name"])
            self.addresses = [_printable("an address", address) for address in description["addresses"]]
            parts = {
                _printable("the name of a table", name): _MappedTable(table, fds, memories)
                for name, table in description["tables"].items()
            }
            counters = parts.pop("counters", None)  # one row per worker
            self._counters: np.ndarray[Any, Any] = np.empty(0) if counters is None else counters.rows
            for counter in self._counters.dtype.names or ():
                _need_number(self._counters.dtype, counter)
            self.no_ethernet = _printable("no_ethernet", description.get("no_ethernet") or "")
        except Exception as error:  # an invalid description must not prevent observing other NICs
            self.close()
            raise InvalidValueError(f"process {pid} sent an invalid description of its NIC: {error!r}") from error
        self.tables = Tables(parts)

    def __repr__(self) -> str:
        return f"Observed({self.name}, process {self.pid}, {', '.join(self.addresses)})"

    @property
    def counters(self) -> dict[str, int]:
        """Return the current values of the counters."""
        counters = {name: int(self._counters[name].sum()) for name in self._counters.dtype.names or ()}
        for name, source, unit in _DERIVED:
            if source in counters:
                counters.setdefault(name, counters[source] // unit)
        return counters

    @property
    def queues(self) -> dict[tuple[str, int], dict[str, int]]:
        """Return the counts of the Ethernet queues, by type ("sq", "rq") and number."""
        found: dict[tuple[str, int], dict[str, int]] = {}
        for kind, (table, fields) in QUEUE_COUNTS.items():
            if table in self.tables:
                number = self.tables.number_field(table)
                for row in self.tables[table]:
                    counts = {name: number_in(row, name) for name in fields if name in (row.dtype.names or ())}
                    found[kind, int(row[number])] = counts
        return found

    def close(self) -> None:
        """Unmap the tables. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(memories: list[MappedMemory]) -> None:
    while memories:
        memories.pop().close()


def running(name: str | None = None, pid: int | None = None, timeout: float = PATIENCE) -> list[Observed]:
    """Return this user's running NICs in this network namespace, sorted by name. `name` and `pid` restrict the result.

    All processes together have `timeout` seconds to answer. NICs of processes that do not answer are left out.
    """
    return _observe("look", name, pid, timeout)


def rules(name: str | None = None, pid: int | None = None, timeout: float = PATIENCE) -> list[Observed]:
    """Return the same NICs as `running`, but with the tables of their flow rules (`rules.rules_of`)."""
    return _observe("rules", name, pid, timeout)


def _observe(op: str, name: str | None, pid: int | None, timeout: float) -> list[Observed]:
    found: list[Observed] = []
    seen: set[tuple[int, str]] = set()
    for claim, (owner, description, fds) in look_at_all(names(), timeout, op=op).items():
        try:
            if (owner, claim) in seen:
                continue
            if isinstance(listening := description.get("listening"), list):
                seen.update((owner, name) for name in listening if isinstance(name, str))
            if "tables" not in description:
                continue
            if name in (None, description.get("name")) and pid in (None, owner):
                found.append(Observed(owner, description, fds))
        except InvalidValueError as error:
            logger.warning("%s", error)
        finally:
            for fd in fds:
                os.close(fd)
    return sorted(found, key=lambda nic: (len(nic.name), nic.name, nic.pid))
