"""Grants: NICs of different processes of a host share memory, so that a payload is copied once instead of twice.

A NIC grants the shared memory (memory.py) in which a region lies. A grant has a number, which the NIC never reuses.
Every peer that accepts messages gets a read-only descriptor of the whole memory. Once the peer reports that it has
mapped the memory, packets to the peer refer to payloads there. A grant ends with the last region in its memory, or with
the peer.

Messages over a link have `op` and `number`. `op` is "lend", with `nbytes` and the descriptor; "lent", the answer to it;
or "end". If anything fails, payloads are copied as on any other wire.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field

import numpy as np

from ....errors import InvalidValueError
from ....fabric.control_message import Body
from ....fabric.frames import GRANT_SHIFT, MAX_GRANTED, MAX_GRANT
from ....fabric.link import Link
from ....memory import HostMemory, MappedMemory, open_shared
from ...engine.hardware import CUDA, Hardware, SharedMapping
from ...state.tables import Row
from ...state.wire import GRANT, GRANTS, WIRE
from .reach import Reach

logger: logging.Logger = logging.getLogger("gpunetio.nic")

MAX_BORROWED = 1 << 40  # bytes of address space for the grants of one peer


@dataclass
class _Granted:
    """Memory that this NIC grants. `regions` is the number of regions in it.

    For GPU memory, `sharing` is how it is shared, and `handle` is what peers with the same `sharing` map it by
    (`Engine.share`).
    """

    number: int
    address: int
    nbytes: int
    fd: int | None
    sharing: str = ""
    handle: str = ""
    regions: int = 0

    @property
    def fds(self) -> list[int]:
        return [] if self.fd is None else [self.fd]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    @property
    def reference(self) -> int:
        """Return MKEY_ROW.granted: the number that turns an address into a reference when added to it."""
        return (self.number << GRANT_SHIFT) - self.address


@dataclass
class _Peer:
    """A peer: the grant table of its wire, and the memory that the peer has granted, by number."""

    table: HostMemory
    borrowed: dict[int, SharedMapping] = field(default_factory=dict)

    def row(self, number: int) -> int:
        """Return the address of a grant's row."""
        return self.table.address + number % GRANTS * GRANT.size


class Grants:
    """The grants that a NIC has given and received. Callers hold its lock. Unless `enabled`, the NIC grants nothing.

    Peers can access regions in GPU memory even without packets: see reach.py.
    """

    def __init__(self, hardware: Hardware, enabled: bool, reach: Reach):
        self._hardware, self._engine, self._enabled, self._reach = hardware, hardware.engine, enabled, reach
        self._granted: dict[int, _Granted] = {}  # by address
        self._peers: dict[Link, _Peer] = {}
        self._next = 1

    # --- grants of this NIC ----------------------------------------------------------------------------------------

    def grant(self, address: int, nbytes: int) -> int:
        """Grant the memory of a new region. Return its MKEY_ROW.granted; 0 if its memory cannot be granted."""
        if not self._enabled:
            return 0
        with contextlib.suppress(OSError):  # out of descriptors
            if self._engine.reaches(address, nbytes):
                if (shared := self._engine.share(address, nbytes)) is not None:
                    start, size, handle, fd = shared
                    return self._add(_Granted(0, start, size, fd, self._engine.sharing, handle))
            elif (found := open_shared(address, nbytes)) is not None:
                return self._add(_Granted(0, *found))
        return 0

    def _add(self, new: _Granted) -> int:
        own = self._granted.get(new.address)
        if own is not None:
            same = own.sharing == new.sharing and all(map(os.path.sameopenfile, own.fds, new.fds))
            new.close()
            if not same:
                return 0
        else:
            number = self._free_number()
            if number is None or new.nbytes > MAX_GRANTED:
                new.close()
                return 0
            own = self._granted[new.address] = new
            own.number = number
            for link in self._peers:
                self._offer(link, own)
        own.regions += 1
        return own.reference

    def announce(self, row: Row) -> None:
        """Announce a region that is now in the engine's table to the peers that can access it without packets."""
        if (own := self._owner(int(row["granted"]))) is not None and own.sharing:
            self._reach.announce_key(row, own.number, start_of(row) - own.address)

    def withdraw(self, row: np.void) -> None:
        """Undo `announce` for a region that is no longer in the engine's table."""
        if (own := self._owner(int(row["granted"]))) is not None and own.sharing:
            self._reach.withdraw_key(int(row["key"]))

    def _owner(self, granted: int) -> _Granted | None:
        return next((own for own in self._granted.values() if own.reference == granted), None)

    def _free_number(self) -> int | None:
        """Return a number that no grant has used and whose row in grant tables is free, or None."""
        used = {own.number % GRANTS for own in self._granted.values()}
        while len(used) < GRANTS and self._next <= MAX_GRANT:
            self._next += 1
            if (self._next - 1) % GRANTS not in used:
                return self._next - 1
        return None

    def revoke(self, granted: int) -> None:
        """Release the grant of a removed region with this MKEY_ROW.granted. The grant ends with its last region."""
        own = self._owner(granted)
        assert own is not None
        own.regions -= 1
        if own.regions == 0:
            del self._granted[own.address]
            own.close()
            for link in self._peers:
                self._send(link, {"op": "end", "number": own.number})

    def _offer(self, link: Link, own: _Granted) -> None:
        if not own.sharing:
            self._send(link, {"op": "lend", "number": own.number, "nbytes": own.nbytes}, *own.fds)
        elif self._reach.shares(link):
            how = {"sharing": own.sharing, "handle": own.handle}
            self._send(link, {"op": "lend", "number": own.number, "nbytes": own.nbytes, **how}, *own.fds)

    def _send(self, link: Link, message: Body, *fds: int) -> None:
        try:
            link.send(message, fds)
        except OSError as error:  # the peer does not read its messages, or is gone
            logger.info("%s cannot send %s the message %s: %s", self._hardware.name, link, message, error)

    # --- peers -----------------------------------------------------------------------------------------------------

    def add_peer(self, link: Link, wire: int) -> None:
        """Add the peer of a new wire over a link, and send it all grants, if the peer accepts messages."""
        if link.talks:
            peer = self._peers[link] = _Peer(HostMemory(GRANTS * GRANT.size))
            self._hardware.write(wire + WIRE.grants, peer.table.address)
            for own in self._granted.values():
                self._offer(link, own)
            self._reach.add_peer(link, wire)

    def remove_peer(self, link: Link) -> None:
        """Remove a peer. The engine must no longer use the grant table of its wire. Idempotent."""
        self._reach.remove_peer(link)
        if (peer := self._peers.pop(link, None)) is not None:
            for memory in (*peer.borrowed.values(), peer.table):
                memory.close()

    def handle_message(self, link: Link, message: Body, fds: list[int]) -> None:
        """Handle a message that arrived over a link. The caller still owns the descriptors."""
        peer = self._peers.get(link)
        if peer is None:  # the wire is already gone
            return
        if self._reach.handle_message(link, message, peer.borrowed.get):
            if message.get("op") == "reach":
                self._announce_all(link)
            return
        try:
            op, number = message.get("op"), message.get("number")
            if type(number) is not int or not 0 < number <= MAX_GRANT:
                raise InvalidValueError(f"{number!r} is not the number of a grant")
            if op == "lend":
                if self._map_grant(peer, number, message, fds):
                    self._send(link, {"op": "lent", "number": number})
            elif op == "lent":  # the grant may have ended meanwhile
                if any(own.number == number for own in self._granted.values()):
                    self._hardware.write(peer.row(number) + GRANT.mapped, number)
            elif op == "end":
                if (memory := peer.borrowed.pop(number, None)) is not None:
                    self._hardware.write(peer.row(number), 0, 0, 0)
                    memory.close()
            else:
                raise InvalidValueError(f"{op!r} is not an op of messages about grants")
        except (InvalidValueError, OSError) as error:
            logger.warning("%s ignores a message from %s: %s", self._hardware.name, link, error)

    def _announce_all(self, link: Link) -> None:
        """Announce all regions in GPU memory to a peer that shares GPU memory."""
        shared = {own.reference: own for own in self._granted.values() if own.sharing}
        if shared and self._reach.shares(link):
            for own in shared.values():
                self._offer(link, own)
            for row in self._reach.mkeys:
                if (own := shared.get(int(row["granted"]))) is not None:
                    self._reach.announce_key_to(link, row, own.number, start_of(row) - own.address)

    def _map_grant(self, peer: _Peer, number: int, message: Body, fds: list[int]) -> bool:
        """Map the memory that a peer grants. Return whether the engine reaches it."""
        nbytes, sharing = message.get("nbytes"), message.get("sharing", "")
        if sharing != self._engine.sharing and (sharing or self._engine.sharing == CUDA):
            return False  # CUDA registers only writable memory, and the grant is read-only
        if type(nbytes) is not int or not 0 < nbytes <= MAX_GRANTED or (not sharing and len(fds) != 1):
            raise InvalidValueError(f"{nbytes!r} bytes and {len(fds)} descriptors are not a valid grant")
        if any(other % GRANTS == number % GRANTS for other in peer.borrowed):
            raise InvalidValueError(f"the row of grant {number} is in use")
        if nbytes + sum(memory.nbytes for memory in peer.borrowed.values()) > MAX_BORROWED:
            raise InvalidValueError(f"cannot map {nbytes} more bytes: a peer can grant {MAX_BORROWED} at most")
        memory: SharedMapping = (
            self._engine.open_shared(nbytes, message.get("handle"), fds) if sharing else MappedMemory(fds[0], nbytes)
        )
        peer.borrowed[number] = memory
        self._hardware.write(peer.row(number), number, memory.address, nbytes)
        return True

    def close(self) -> None:
        """Close the descriptors. The engine must have stopped, and the wires must be gone."""
        for own in self._granted.values():
            own.close()
        self._granted.clear()
        self._reach.close()


def start_of(row: Row) -> int:
    """Return the address at which the engine accesses the start of a region."""
    return (int(row["iova"]) + int(row["delta"])) % (1 << 64)
