"""Routes from queue pairs to their peers: within this NIC, or over a wire."""

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
        """Return the route to a QP's peer: (row address, 0, …) on this NIC, (0, wire address, …) elsewhere.

        `source` is this NIC's GID index. The last two values are the peer's GID and this NIC's GID index as used on the
        wire: on UDP, those of the addresses that link-local GIDs stand for.
        """
        if self.is_here(gid, lid):
            return self._qps.row_address(qpn), 0, gid, source
        wire = self._links.wire_to(gid, lid, source)
        return 0, wire, *self._links.path(wire, gid, source)

    def datagrams(self, gid: bytes, lid: int, source: int) -> tuple[int, bytes, int]:
        """Return the address of the wire for datagrams to a GID or LID, and the last two values of `route`.

        Datagrams to queue pairs of this NIC also use a wire, so that the engine handles all datagrams in the same way.
        """
        if self.is_here(gid, lid):
            return self._links.wire_to_itself(), gid, source
        wire = self._links.wire_to(gid, lid, source)
        return wire, *self._links.path(wire, gid, source)

    def is_here(self, gid: bytes, lid: int) -> bool:
        """Return whether this NIC has the GID or, on InfiniBand, the LID, and reaches itself without a wire."""
        if self._links.takes_own:
            return False
        return lid == self._port.lid if self._port.infiniband else self._gids.has(gid)

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC of the NIC with a reachable GID (`Links.mac_of`)."""
        return self._port.mac if self._gids.has(gid) else self._links.mac_of(gid)

    def seek_mac(self, gid: bytes) -> bool:
        """Return whether the MAC of a GID is known. If not, start to resolve it (`mac_of` would wait)."""
        return self._gids.has(gid) or self._links.seek_mac(gid)

    def mac_in_capture(self, gid: bytes) -> bytes:
        """Return the MAC to write into captures for a GID."""
        return self._port.mac if self._gids.has(gid) else mac_of(address_of(gid))
