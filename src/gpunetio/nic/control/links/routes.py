"""Where queue pairs find their peers: on this NIC, or over which wire."""

from __future__ import annotations

from ...engine.port import Port, address_of, mac_of
from ...state.tables import Table
from ..gids import Gids
from .links import Links


class Routes:
    """The routes of a NIC, by GID or, on InfiniBand, by LID."""

    def __init__(self, port: Port, gids: Gids, qps: Table, links: Links):
        self._port, self._gids, self._qps, self._links = port, gids, qps, links

    def route(self, gid: bytes, lid: int, source: int, qpn: int) -> tuple[int, int, bytes, int]:
        """Return where a QP's peer is: (row address, 0, …) on this NIC, (0, wire, …) elsewhere.

        `source` is this NIC's GID index. The last two values are the peer's GID and this NIC's index as the wire knows
        them: on UDP, those of the addresses that link-local GIDs stand for.
        """
        if self.is_here(gid, lid):
            return self._qps.row_address(qpn), 0, gid, source
        wire = self._links.towards(gid, lid, source)
        return 0, wire, *self._links.path(wire, gid, source)

    def datagrams(self, gid: bytes, lid: int, source: int) -> tuple[int, bytes, int]:
        """Return the wire by which datagrams get to a GID or LID, and what `route` returns last.

        Datagrams to queue pairs of this NIC have a wire, too, so that the engine treats all in the same way.
        """
        if self.is_here(gid, lid):
            return self._links.to_itself(), gid, source
        wire = self._links.towards(gid, lid, source)
        return wire, *self._links.path(wire, gid, source)

    def is_here(self, gid: bytes, lid: int) -> bool:
        """Return whether the NIC has this GID or, on InfiniBand, this LID, and reaches it without a wire."""
        if self._links.take_own:
            return False
        return lid == self._port.lid if self._port.infiniband else self._gids.has(gid)

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC behind a GID that can be reached."""
        return self._port.mac if self._gids.has(gid) else self._links.mac_of(gid)

    def seek_mac(self, gid: bytes) -> bool:
        """Return whether `mac_of` would not wait for a neighbour, and have the neighbour asked if it would."""
        return self._gids.has(gid) or self._links.seek_mac(gid)

    def mac_in_capture(self, gid: bytes) -> bytes:
        """Return the MAC that a capture shows for a GID."""
        return self._port.mac if self._gids.has(gid) else mac_of(address_of(gid))
