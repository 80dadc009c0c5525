"""Paths of datagrams: for each destination of an address handle, the wire that the engine sends on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ....errors import NoMemoryError
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.path import MAX_PATHS, PATH, PROBES, path_slot
from ...turn.commands import EngineCommand
from .links import Links
from .routes import Routes

Destination = tuple[int, int, int]  # fields of a PATH: high, low, own


@dataclass
class _Path:
    """A path: the number of its row, its number of address handles, and when the last one was released."""

    slot: int
    users: int = 0
    released: int = 0


class Paths:
    """The paths of a NIC.

    After the last address handle to its destination is destroyed, a path remains until another path needs its row. On a
    card, the address vector in a WQE suffices: UCX 1.23 copies it, and destroys the address handle before it sends.
    """

    def __init__(self, hardware: Hardware, links: Links, routes: Routes):
        self._name, self._port, self._engine = hardware.name, hardware.port, hardware.engine
        self._links, self._routes = links, routes
        self._memory = HostMemory(MAX_PATHS * PATH.size)
        self._rows = self._memory.view(PATH.dtype, 0, MAX_PATHS)
        self._paths: dict[Destination, _Path] = {}
        self._destinations: dict[int, Destination] = {}  # by row
        self._releases = itertools.count()
        hardware.record["paths"] = self._memory.address
        links.on_removed.append(self._clear_wire)

    def close(self) -> None:
        """Release the memory. The engine must have stopped."""
        self._memory.close()

    def open(self, gid: bytes, lid: int, source: int) -> Destination:
        """Open a path for an address handle. Return its destination, for `find_path`.

        This creates the wire if needed. `source` is this NIC's GID index. NotFoundError if there is no route.
        """
        wire, peer, index = self._routes.datagrams(gid, lid, source)
        high, low = (0, lid) if self._port.infiniband else np.frombuffer(gid, np.int64).tolist()
        destination = high, low, 0 if self._port.infiniband else source
        row = np.zeros((), PATH.dtype)
        row["used"], row["wire"], row["source"] = 1, wire, index
        row["high"], row["low"], row["own"] = destination
        row["peer_high"], row["peer_low"] = np.frombuffer(peer, np.int64)
        row["egress"] = self._links.egress(wire, peer, index, 0, ())
        path = self._path(destination)
        self._write(path.slot, row)
        path.users += 1
        return destination

    def release(self, destination: Destination) -> None:
        """Release the path of an address handle that is destroyed."""
        path = self._paths[destination]
        path.users -= 1
        path.released = next(self._releases)

    def _path(self, destination: Destination) -> _Path:
        """Return the path to a destination. A new path gets a free row, or the row of the longest unused path."""
        if destination not in self._paths:
            first = path_slot.py_func(*destination)
            slots = [(first + i) % MAX_PATHS for i in range(PROBES)]
            slot = next((slot for slot in slots if slot not in self._destinations), None)
            if slot is None:
                slot = self._unused(slots)
                del self._paths[self._destinations[slot]]
            self._destinations[slot], self._paths[destination] = destination, _Path(slot)
        return self._paths[destination]

    def _unused(self, slots: list[int]) -> int:
        """Return which of these rows contains the longest unused path. NoMemoryError if all of them are in use."""
        unused = [path for path in (self._paths[self._destinations[slot]] for slot in slots) if path.users == 0]
        if not unused:
            used = sum(path.users > 0 for path in self._paths.values())
            raise NoMemoryError(
                f"{self._name} has paths to {used} destinations and no room for another: close address handles"
            )
        return min(unused, key=lambda path: path.released).slot

    def _clear_wire(self, wire: int) -> None:
        """Clear a wire, whose row is about to be reused, from all paths. Their datagrams are then dropped."""
        for slot in np.flatnonzero(self._rows["wire"] == wire).tolist():
            row = self._rows[slot].copy()
            row["wire"] = 0
            self._write(slot, np.asarray(row))

    def _write(self, slot: int, row: np.ndarray) -> None:
        self._engine.post(EngineCommand.WRITE_ROW, self._memory.address + slot * PATH.size, row)
