"""The interface of a wire to the NIC's control path. transport/wire_kinds.py moves the packets, in the engine."""

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

    `kind` selects how the engine serves the wire (transport/wire_kinds.py). `window` limits a QP's packets in flight.
    `peer` identifies the other end. `gids` are the GIDs of this end and of the peer; the latter is ANY_PEER if the wire
    has any number of peers. `adds_icrc`: the wire adds the ICRC to packets, so a fault injector must not.
    `whole_frames`: captures contain the frames on the wire with all headers. `takes_own`: packets from the NIC to
    itself also use the wire.

    `events` are descriptors of notifiers (fabric/notifier.py) that wake the engine; `sockets` wake it when they are
    readable. `notify_fd` wakes the engine at the other end; 0 if no engine sleeps there.

    `address` is the address of the wire's WIRE row, once the NIC has added the wire. `dead`: the peer is gone.
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
        """Open the wire, and set the fields of its WIRE `row` that are specific to its type.

        Return the end of the pipe for outgoing frames.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the wire and free its memory. The engine must no longer use the wire."""

    def row(self) -> np.ndarray:
        """Return a WIRE row with the fields that all types of wires have."""
        row = np.zeros((), WIRE.dtype)
        row["kind"], row["window"], row["wake_fd"] = self.kind, self.window, self.notify_fd
        row["whole_frames"] = self.whole_frames
        row["here_high"], row["here_low"] = np.frombuffer(self.gids[0], np.int64)
        row["peer_high"], row["peer_low"] = np.frombuffer(self.gids[1], np.int64)
        return row

    def path(self, gid: bytes, source: int) -> tuple[bytes, int]:
        """Return the peer's GID and this end's GID index as used in frames. InvalidValueError if there is no route.

        They differ from the arguments if these stand for other addresses, as link-local GIDs do.
        """
        return gid, source

    def egress(self, gid: bytes, source: int, port: int, used: Container[int], synchronize: Callable[[], None]) -> int:
        """Return the egress of a QP's frames to `gid`, which leave from GID index `source` and UDP port `port`.

        Port 0 means any. `used` contains the egresses of the other QPs. `synchronize` is `Engine.synchronize`.
        """
        return source

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC of the peer with this GID. On wires without Ethernet, derive it from the address."""
        return mac_of(address_of(gid))

    def seek_mac(self, gid: bytes) -> bool:
        """Return whether the neighbour's MAC is known. If not, start to resolve it (`mac_of` would wait)."""
        return True

    @property
    def drained(self) -> bool:
        """Whether the engine has received everything that arrived before a QP requested the position of arrivals."""
        return True
