"""The UDP wire of a port, to all peers that the port reaches over no other wire."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable

import numpy as np

from ...errors import InvalidValueError
from ...fabric.frames import PIPE_END, pipe_end, pipe_size
from ...fabric.udp import UdpWire
from ...memory import HostMemory
from ..engine.port import Port, address_of, gid_of
from ..transport.wire_kinds import UDP
from .wire import ANY_PEER, Wire

WINDOW = 128  # packets: half a megabyte at the largest MTU, which fits into socket buffers
PIPE = 1 << 20


class Udp(Wire):
    """The UDP sockets of a port's addresses (fabric/udp.py). They are opened with the wire, on first use."""

    kind: int = UDP
    window: int = WINDOW
    peer: Hashable = "udp"
    gids: tuple[bytes, bytes]
    adds_icrc: bool = True
    sockets: tuple[int, ...] = ()

    def __init__(self, port: Port):
        self._port = port
        self.gids = port.gids[0], ANY_PEER

    def open(self, row: np.ndarray) -> np.ndarray:
        memory = HostMemory(PIPE_END.size + pipe_size(PIPE))
        consumer = memory.view(PIPE_END.dtype)
        tx = consumer[0] = pipe_end(memory.address + PIPE_END.size, PIPE)
        indices = [self._port.gids.index(gid_of(address)) for address in self._port.addresses]
        try:
            self._wire = UdpWire(self._port.addresses, memory.address, indices)
        except BaseException:
            memory.close()
            raise
        self._memory = memory
        self.sockets = self._wire.fds
        row["medium"] = self._wire.address
        return tx

    def close(self) -> None:
        self._wire.close()
        self._memory.close()

    def path(self, gid: bytes, source: int) -> tuple[bytes, int]:
        """Replace link-local GIDs by the GIDs of the addresses that they stand for."""
        port = self._port
        here, there = port.source_address(source), address_of(gid)
        if here.version != there.version:
            raise InvalidValueError(
                f"GID {there} cannot be reached from GID index {source} ({here}): use the index of an address of the "
                f"same IP version, one of {', '.join(map(str, port.addresses))}"
            )
        if there.version == 6 and (there.is_link_local or port.is_link_local(source)) and not here.is_link_local:
            raise InvalidValueError(
                f"GID {there} cannot be reached from GID index {source}: over UDP, a link-local GID must stand for an "
                f"IPv4 address, or both ends must be link-local. Use GIDs of addresses, as at index 0 ({here})"
            )
        return gid_of(there), 0 if port.is_link_local(source) else source

    def egress(self, gid: bytes, source: int, port: int, used: Container[int], synchronize: Callable[[], None]) -> int:
        return source if port == 0 else self._wire.egress(source, port, used, synchronize)

    @property
    def drained(self) -> bool:
        return not self._wire.record["marked"]


make = Udp
