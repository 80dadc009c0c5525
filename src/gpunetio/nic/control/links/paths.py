"""Paths of datagrams, which address handles ask for: a WQE names its destination, and the engine must know the wire."""

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

Destination = tuple[int, int, int]  # high, low and own of a PATH


@dataclass
class _Path:
    """A path: the number of its row, the address handles to it, and when the last of them was released."""

    slot: int
    users: int = 0
    released: int = 0


class Paths:
    """The paths of a NIC.

    A path stays when the last address handle to its destination is destroyed, until another path needs its row. To a
    card, the address vector of a WQE is all there is: UCX 1.23 copies it, and destroys the handle before it sends.
    """

    def __init__(self, hardware: Hardware, links: Links, routes: Routes):
        self._name, self._port, self._engine = hardware.name, hardware.port, hardware.engine
        self._links, self._routes = links, routes
        self._memory = HostMemory(MAX_PATHS * PATH.size)
        self._rows = self._memory.view(PATH.dtype, 0, MAX_PATHS)
        self._paths: dict[Destination, _Path] = {}
        self._taken: dict[int, Destination] = {}  # by row
        self._releases = itertools.count()
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
        path = self._path(destination)
        self._write(path.slot, row)
        path.users += 1
        return destination

    def release(self, destination: Destination) -> None:
        """Note that an address handle to a destination is gone."""
        path = self._paths[destination]
        path.users -= 1
        path.released = next(self._releases)

    def _path(self, destination: Destination) -> _Path:
        """Return the path to a destination. A new one gets a free row, or that of the path unused for longest."""
        if destination not in self._paths:
            first = path_slot.py_func(*destination)
            slots = [(first + i) % MAX_PATHS for i in range(PROBES)]
            slot = next((slot for slot in slots if slot not in self._taken), None)
            if slot is None:
                slot = self._unused(slots)
                del self._paths[self._taken[slot]]
            self._taken[slot], self._paths[destination] = destination, _Path(slot)
        return self._paths[destination]

    def _unused(self, slots: list[int]) -> int:
        """Return the row of the path, of those in these rows, that has been without address handles for longest."""
        unused = [path for path in (self._paths[self._taken[slot]] for slot in slots) if path.users == 0]
        if not unused:
            used = sum(path.users > 0 for path in self._paths.values())
            raise NoMemoryError(
                f"{self._name} has paths to {used} destinations and no room for another: close address handles"
            )
        return min(unused, key=lambda path: path.released).slot

    def _lose(self, wire: int) -> None:
        """Forget a wire, whose row is used for another one. Datagrams to its destinations are dropped."""
        for slot in np.flatnonzero(self._rows["wire"] == wire).tolist():
            row = self._rows[slot].copy()
            row["wire"] = 0
            self._write(slot, np.asarray(row))

    def _write(self, slot: int, row: np.ndarray) -> None:
        self._engine.post(EngineCommand.WRITE_ROW, self._memory.address + slot * PATH.size, row)
