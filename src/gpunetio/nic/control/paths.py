"""Paths of datagrams, which address handles ask for: a WQE names its destination, and the engine must know the wire."""

from __future__ import annotations

import numpy as np

from ...errors import NoMemoryError
from ...memory import HostMemory
from .. import step
from ..hardware import Hardware
from ..state.path import MAX_PATHS, PATH, PROBES, path_slot
from .links import Links
from .routes import Routes

Destination = tuple[int, int, int]  # high, low and own of a PATH


class Paths:
    """The paths of a NIC. A path stays while address handles lead to its destination."""

    def __init__(self, hardware: Hardware, links: Links, routes: Routes):
        self._name, self._port, self._engine = hardware.name, hardware.port, hardware.engine
        self._links, self._routes = links, routes
        self._memory = HostMemory(MAX_PATHS * PATH.size)
        self._rows = self._memory.view(PATH.dtype, 0, MAX_PATHS)
        self._users: dict[Destination, int] = {}  # address handles
        hardware.record["paths"] = self._memory.address
        links.lost.append(self._lose)

    def close(self) -> None:
        """Release the memory. The engine must have stopped."""
        self._memory.close()

    def open(self, gid: bytes, lid: int, source: int) -> Destination:
        """Return the destination for `find_path`, after the wire to it was laid. `source` is this NIC's GID index.

        NotFoundError if there is no way.
        """
        wire, peer, index = self._routes.datagrams(gid, lid, source)
        high, low = (0, lid) if self._port.infiniband else np.frombuffer(gid, np.int64).tolist()
        destination = high, low, 0 if self._port.infiniband else source
        row = np.zeros((), PATH.dtype)
        row["used"], row["wire"], row["source"] = 1, wire, index
        row["high"], row["low"], row["own"] = destination
        row["peer_high"], row["peer_low"] = np.frombuffer(peer, np.int64)
        row["egress"] = self._links.egress(wire, peer, index, 0, ())
        self._write(self._slot(destination), row)
        self._users[destination] = self._users.get(destination, 0) + 1
        return destination

    def release(self, destination: Destination) -> None:
        """Note that an address handle to a destination is gone."""
        self._users[destination] -= 1
        if self._users[destination] == 0:
            self._write(self._slot(destination), np.zeros((), PATH.dtype))
            del self._users[destination]

    def _slot(self, destination: Destination) -> int:
        """Return the number of the row of a destination, or of a free row for it."""
        first = path_slot.py_func(*destination)
        slots = [(first + i) % MAX_PATHS for i in range(PROBES)]
        if destination in self._users:
            return next(slot for slot in slots if self._destination(slot) == destination)
        for slot in slots:
            if not self._rows[slot]["used"]:
                return slot
        raise NoMemoryError(
            f"{self._name} has paths to {len(self._users)} destinations and no room for another: close address handles"
        )

    def _destination(self, slot: int) -> Destination | None:
        row = self._rows[slot]
        return (int(row["high"]), int(row["low"]), int(row["own"])) if row["used"] else None

    def _lose(self, wire: int) -> None:
        """Forget a wire, whose row is used for another one. Datagrams to its destinations are dropped."""
        for slot in np.flatnonzero(self._rows["wire"] == wire).tolist():
            row = self._rows[slot].copy()
            row["wire"] = 0
            self._write(slot, np.asarray(row))

    def _write(self, slot: int, row: np.ndarray) -> None:
        self._engine.post(step.WRITE_ROW, self._memory.address + slot * PATH.size, row)
