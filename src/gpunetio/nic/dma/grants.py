"""Shared memory that NICs of different processes of one host grant each other: a payload is copied once, not twice.

A NIC grants the shared memory (memory.py) in which a region lies. A grant has a number, which is used once in the
NIC's life. Every peer that takes messages gets a read-only descriptor of the whole memory. Once the peer says that it
has mapped the memory, packets to it refer to payloads there. A grant ends with the last region in its memory, or with
the peer.

Messages over a link have `op` and `number`: "lend", with `nbytes` and the descriptor; "lent", its answer; "end". If
anything fails, payloads are copied as on any other wire.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field

from ...errors import InvalidValueError
from ...fabric.control_message import Body
from ...fabric.frames import GRANT_SHIFT, MAX_GRANTED, MAX_GRANT
from ...fabric.link import Link
from ...memory import HostMemory, MappedMemory, open_shared
from ..hardware import Hardware
from ..state.wire import GRANT, GRANTS, WIRE

logger: logging.Logger = logging.getLogger("gpunetio.nic")

MAX_BORROWED = 1 << 40  # bytes of address space for what one peer grants


@dataclass
class _Granted:
    """Memory of this NIC that is granted. `regions` counts the regions in it."""

    number: int
    address: int
    nbytes: int
    fd: int
    regions: int = 0

    @property
    def reference(self) -> int:
        """Return MKEY_ROW.granted, which makes a reference when added to an address."""
        return (self.number << GRANT_SHIFT) - self.address


@dataclass
class _Peer:
    """A peer: the grant table of its wire, and the memory that it has granted, by number."""

    table: HostMemory
    borrowed: dict[int, MappedMemory] = field(default_factory=dict)

    def row(self, number: int) -> int:
        """Return the address of a grant's row."""
        return self.table.address + number % GRANTS * GRANT.size


class Grants:
    """What a NIC has granted and was granted. Callers hold the NIC's lock. Unless `enabled`, the NIC grants nothing."""

    def __init__(self, hardware: Hardware, enabled: bool):
        self._hardware, self._enabled = hardware, enabled
        self._granted: dict[int, _Granted] = {}  # by address
        self._peers: dict[Link, _Peer] = {}
        self._next = 1

    # --- what we grant ---------------------------------------------------------------------------------------------

    def grant(self, address: int, nbytes: int) -> int:
        """Grant the memory of a new region. Return its MKEY_ROW.granted; 0 if its memory cannot be granted."""
        if not self._enabled:
            return 0
        with contextlib.suppress(OSError):  # out of descriptors
            if (found := open_shared(address, nbytes)) is not None:
                return self._add(*found)
        return 0

    def _add(self, address: int, nbytes: int, fd: int) -> int:
        own = self._granted.get(address)
        if own is not None:
            same = os.path.sameopenfile(own.fd, fd)
            os.close(fd)
            if not same:
                return 0
        else:
            number = self._free_number()
            if number is None or nbytes > MAX_GRANTED:
                os.close(fd)
                return 0
            own = self._granted[address] = _Granted(number, address, nbytes, fd)
            for link in self._peers:
                self._offer(link, own)
        own.regions += 1
        return own.reference

    def _free_number(self) -> int | None:
        """Return a number that no grant has had, in a row that no grant has, or None."""
        used = {own.number % GRANTS for own in self._granted.values()}
        while len(used) < GRANTS and self._next <= MAX_GRANT:
            self._next += 1
            if (self._next - 1) % GRANTS not in used:
                return self._next - 1
        return None

    def revoke(self, granted: int) -> None:
        """Note that a region with this MKEY_ROW.granted is gone. The engine no longer uses it."""
        own = next(own for own in self._granted.values() if own.reference == granted)
        own.regions -= 1
        if own.regions == 0:
            del self._granted[own.address]
            os.close(own.fd)
            for link in self._peers:
                self._send(link, {"op": "end", "number": own.number})

    def _offer(self, link: Link, own: _Granted) -> None:
        self._send(link, {"op": "lend", "number": own.number, "nbytes": own.nbytes}, own.fd)

    def _send(self, link: Link, message: Body, *fds: int) -> None:
        try:
            link.send(message, fds)
        except OSError as error:  # the peer does not read its messages, or is gone
            logger.info("%s cannot send %s the message %s: %s", self._hardware.name, link, message, error)

    # --- peers -----------------------------------------------------------------------------------------------------

    def join(self, link: Link, wire: int) -> None:
        """Grant everything to the peer of a new wire over a link, if the peer takes messages."""
        if link.talks:
            peer = self._peers[link] = _Peer(HostMemory(GRANTS * GRANT.size))
            self._hardware.write(wire + WIRE.grants, peer.table.address)
            for own in self._granted.values():
                self._offer(link, own)

    def leave(self, link: Link) -> None:
        """Forget a peer. The engine must no longer use its wire's table. Idempotent."""
        if (peer := self._peers.pop(link, None)) is not None:
            for memory in (*peer.borrowed.values(), peer.table):
                memory.close()

    def hear(self, link: Link, message: Body, fds: list[int]) -> None:
        """Handle a message that came over a link. The descriptors stay the caller's."""
        peer = self._peers.get(link)
        if peer is None:  # the wire is already gone
            return
        try:
            op, number = message.get("op"), message.get("number")
            if type(number) is not int or not 0 < number <= MAX_GRANT:
                raise InvalidValueError(f"{number!r} is not the number of a grant")
            if op == "lend":
                self._borrow(peer, number, message.get("nbytes"), fds)
                self._send(link, {"op": "lent", "number": number})
            elif op == "lent":  # perhaps of a grant that has ended meanwhile
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

    def _borrow(self, peer: _Peer, number: int, nbytes: object, fds: list[int]) -> None:
        """Map the memory that a peer grants."""
        if type(nbytes) is not int or not 0 < nbytes <= MAX_GRANTED or len(fds) != 1:
            raise InvalidValueError(f"{nbytes!r} bytes and {len(fds)} descriptors are not a valid grant")
        if any(other % GRANTS == number % GRANTS for other in peer.borrowed):
            raise InvalidValueError(f"the row of grant {number} is in use")
        if nbytes + sum(memory.nbytes for memory in peer.borrowed.values()) > MAX_BORROWED:
            raise InvalidValueError(f"cannot map {nbytes} more bytes: a peer can grant {MAX_BORROWED} at most")
        memory = peer.borrowed[number] = MappedMemory(fds[0], nbytes)
        self._hardware.write(peer.row(number), number, memory.address, nbytes)

    def close(self) -> None:
        """Close the descriptors. The engine must have stopped, and the wires must be gone."""
        for own in self._granted.values():
            os.close(own.fd)
        self._granted.clear()
