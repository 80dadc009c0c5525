"""The base of wires that carry Ethernet frames: the file descriptor for frames, neighbours, and errors."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Container, Hashable
from io import FileIO
from socket import socket

import numpy as np

from ...errors import InvalidValueError, OperatingSystemError
from ...fabric import interface
from ...fabric.claims import close_after_fork
from ...fabric.ethernet_wire import EthernetWire
from ...formats.packet import IPV4_MAPPED
from ..engine.port import Port
from ..state.extensions import ETHERNET_WIRES
from ..transport.wire_kinds import ETHERNET
from .wire import ANY_PEER, Wire

logger: logging.Logger = logging.getLogger("gpunetio.nic")

WINDOW = 128


class Ethernet(Wire):
    """An Ethernet with any number of peers, which find the port by ARP and neighbour discovery.

    `name` is the wire in the port's configuration, `interface` the text after the colon there. `reading` selects how
    the engine reads and writes frames; `send_to` is the socket address to send to, or empty. `offloads`: the kernel
    sends and receives frames with partial checksums and with several segments (TSO, GRO).
    """

    kind: int = ETHERNET
    window: int = WINDOW
    peer: Hashable
    gids: tuple[bytes, bytes]
    adds_icrc: bool = True
    whole_frames: bool = True
    name: str
    interface: str
    reading: int
    send_to: bytes = b""
    offloads: bool = False

    def __init__(self, port: Port):
        self._port = port
        self.name, self.interface = port.config.wire, port.config.wire_argument
        self.peer, self.gids = self.name, (port.gids[0], ANY_PEER)

    @abstractmethod
    def attach(self) -> FileIO | socket:
        """Open and return the non-blocking file or socket that carries the frames."""

    def open(self, row: np.ndarray) -> np.ndarray:
        ETHERNET_WIRES.load()
        self._end = self.attach()
        close_after_fork(self._end)
        try:
            port = self._port
            fd = self._end.fileno()
            self._wire = EthernetWire(
                self.name, fd, self.reading, port.mac, port.gids, self.on_peer_gone, port.config.promiscuous,
                self.send_to, self.offloads,
            )
        except BaseException:
            self._end.close()
            raise
        self.events, self.sockets = self._wire.events, (self._end.fileno(),)
        row["medium"], row["segments"] = self._wire.address, self.offloads
        return self._wire.tx

    def close(self) -> None:
        self._wire.close()
        self._end.close()

    def path(self, gid: bytes, source: int) -> tuple[bytes, int]:
        here = self._port.gids[source]
        if here.startswith(IPV4_MAPPED) != gid.startswith(IPV4_MAPPED):
            others = ", ".join(str(address) for address in self._port.addresses)
            raise InvalidValueError(
                f"GID {gid.hex(':', 2)} cannot be reached from GID index {source} ({here.hex(':', 2)}): use the index "
                f"of an address of the same IP version, one of {others}"
            )
        return gid, source

    def egress(self, gid: bytes, source: int, port: int, used: Container[int], synchronize: Callable[[], None]) -> int:
        return self._wire.egress(gid, source, port, used, synchronize)

    def mac_of(self, gid: bytes) -> bytes:
        return self._wire.neighbours.resolve(gid)

    def seek_mac(self, gid: bytes) -> bool:
        return self._wire.neighbours.seek(gid) is not None

    @property
    def drained(self) -> bool:
        return not self._wire.record["marked"]

    def on_peer_gone(self) -> None:
        """Handle that the other end has gone away. Called in a thread of the wire."""
        logger.error("%s is gone: the NIC reaches nobody there any more", self.name)

    # --- for subclasses --------------------------------------------------------------------------------------------

    def check_interface(self) -> None:
        """Refuse an interface that is down, or has a smaller MTU than the port."""
        name, wanted = self.interface, self._port.config.mtu
        if not interface.is_up(name):
            raise InvalidValueError(
                f"wire {self.name}: the interface {name} is down. `ip link set {name} up` changes that"
            )
        if wanted > (mtu := interface.mtu_of(name)):
            raise InvalidValueError(
                f"wire {self.name}: the port's MTU is to be {wanted}, but that of the interface {name} is {mtu}. "
                f"`ip link set {name} mtu {wanted}` changes that, if the others on the link can follow"
            )

    def os_error(self, error: OSError, what: str) -> OperatingSystemError:
        """Return the error for a failed system call. `what` completes "cannot …"."""
        return OperatingSystemError(error.errno, f"wire {self.name}: cannot {what}: {error.strerror}")
