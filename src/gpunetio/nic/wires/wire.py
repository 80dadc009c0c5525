"""The interface of a wire to the NIC's control path. How the engine moves its packets: transport/wire_kinds.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable

import numpy as np

from ...fabric.injector import Injector
from ..engine.port import address_of, mac_of
from ..state.wire import WIRE

ANY_PEER = bytes(16)


class Wire(ABC):
    """A wire of a NIC, from `open` to `close`.

    `kind` says how the engine serves the wire. `window` limits the packets that a QP has in flight. `peer` is who is at
    the other end. `gids` are this end's and the peer's; the latter is ANY_PEER if the wire leads to any number of
    peers. `adds_icrc`: packets get their ICRC from the wire, so a fault injector must not add one. `whole_frames`:
    captures show the frames on the wire, with all their headers. `takes_own`: packets from the NIC to itself also come
    over the wire.

    `events` are descriptors of notifiers (fabric/notifier.py) that wake the engine; `sockets` wake it when they are
    readable. `notify_fd` wakes the engine at the other end; 0 if none sleeps there.

    `address` is that of the wire's WIRE row, once the NIC has taken the wire in. `dead`: the peer is gone.
    """

    kind: int
    window: int
    peer: Hashable
    gids: tuple[bytes, bytes]
    adds_icrc: bool = False
    whole_frames: bool = False
    takes_own: bool = False
    events: tuple[int, ...] = ()
    sockets: tuple[int, ...] = ()
    notify_fd: int = 0
    address: int = 0
    dead: bool = False
    injector: Injector | None = None

    @abstractmethod
    def open(self, row: np.ndarray) -> np.ndarray:
        """Open what the wire leads to, and add to its WIRE `row` what this kind needs.

        Return the end of the pipe that takes outgoing frames.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. The engine must not know the wire any more."""

    def row(self) -> np.ndarray:
        """Return the fields of the WIRE row that all kinds have."""
        row = np.zeros((), WIRE.dtype)
        row["kind"], row["window"], row["wake_fd"] = self.kind, self.window, self.notify_fd
        row["whole_frames"] = self.whole_frames
        row["here_high"], row["here_low"] = np.frombuffer(self.gids[0], np.int64)
        row["peer_high"], row["peer_low"] = np.frombuffer(self.gids[1], np.int64)
        return row

    def path(self, gid: bytes, source: int) -> tuple[bytes, int]:
        """Return the peer's GID and the index of this end's, as frames name them. InvalidValueError if there is no way.

        QPs may use GIDs that stand for other addresses.
        """
        return gid, source

    def egress(self, gid: bytes, source: int, port: int, used: Container[int], settle: Callable[[], None]) -> int:
        """Return the `source` of a QP's frames to `gid` that leave from GID index `source` and UDP port `port`.

        Port 0 is any. `used` are the sources of the other QPs. `settle` returns when the engine has ended its turn.
        """
        return source

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC of the peer with this GID: on wires without Ethernet, the one that its address gives it."""
        return mac_of(address_of(gid))

    def seek_mac(self, gid: bytes) -> bool:
        """Return whether `mac_of` would not wait, and have the neighbour asked if it would."""
        return True

    @property
    def drained(self) -> bool:
        """Whether the engine has taken what arrived before a QP asked for the position of arrivals."""
        return True
