"""Memory that NICs of different processes of one host lend each other, so that a payload is copied once, not twice.

A NIC lends the shared memory (memory.py) in which a region lies. The loan gets a number, which is used once in the
NIC's life. Every peer that takes messages gets a read-only descriptor of the whole memory. Once the peer says that it
has mapped the memory, packets to it refer to payloads there. A loan ends with the last region in its memory, or with
the peer.

Messages over a link have `op` and `number`: "lend", with `nbytes` and the descriptor; "lent", its answer; "end". If
anything fails, payloads are copied as on any other wire.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidValueError
from ...fabric.frames import LOAN_SHIFT, MAX_LENT, MAX_LOAN
from ...fabric.link import Link
from ...memory import HostMemory, MappedMemory, open_shared
from ..hardware import Hardware
from ..state.wire import LOAN, LOANS, WIRE

logger: logging.Logger = logging.getLogger("gpunetio.nic")

MAX_BORROWED = 1 << 40  # bytes of address space for what one peer lends


@dataclass
class _Lent:
    """Memory of this NIC that is lent. `regions` counts the regions in it."""

    number: int
    address: int
    nbytes: int
    fd: int
    regions: int = 0

    @property
    def lent(self) -> int:
        """Return MKEY_ROW.lent, which makes a reference when added to an address."""
        return (self.number << LOAN_SHIFT) - self.address


@dataclass
class _Peer:
    """A peer: the loan table of its wire, and the memory it has lent, by number."""

    table: HostMemory
    borrowed: dict[int, MappedMemory] = field(default_factory=dict)

    def row(self, number: int) -> int:
        """Return the address of a loan's row."""
        return self.table.address + number % LOANS * LOAN.size


class Loans:
    """What a NIC has lent and borrowed. Callers hold the NIC's lock. `lends` is False if the NIC lends nothing."""

    def __init__(self, hardware: Hardware, lends: bool):
        self._hardware, self._lends = hardware, lends
        self._lent: dict[int, _Lent] = {}  # by address
        self._peers: dict[Link, _Peer] = {}
        self._next = 1

    # --- what we lend ----------------------------------------------------------------------------------------------

    def lend(self, address: int, nbytes: int) -> int:
        """Lend the memory of a new region. Return its MKEY_ROW.lent; 0 if its memory cannot be lent."""
        if not self._lends:
            return 0
        with contextlib.suppress(OSError):  # out of descriptors
            if (found := open_shared(address, nbytes)) is not None:
                return self._lend(*found)
        return 0

    def _lend(self, address: int, nbytes: int, fd: int) -> int:
        own = self._lent.get(address)
        if own is not None:
            same = os.path.sameopenfile(own.fd, fd)
            os.close(fd)
            if not same:
                return 0
        else:
            number = self._free_number()
            if number is None or nbytes > MAX_LENT:
                os.close(fd)
                return 0
            own = self._lent[address] = _Lent(number, address, nbytes, fd)
            for link in self._peers:
                self._offer(link, own)
        own.regions += 1
        return own.lent

    def _free_number(self) -> int | None:
        """Return a number that no loan has had, in a row that no loan has, or None."""
        used = {own.number % LOANS for own in self._lent.values()}
        while len(used) < LOANS and self._next <= MAX_LOAN:
            self._next += 1
            if (self._next - 1) % LOANS not in used:
                return self._next - 1
        return None

    def take_back(self, lent: int) -> None:
        """Note that a region with this MKEY_ROW.lent is gone. The engine no longer uses it."""
        own = next(own for own in self._lent.values() if own.lent == lent)
        own.regions -= 1
        if own.regions == 0:
            del self._lent[own.address]
            os.close(own.fd)
            for link in self._peers:
                self._send(link, {"op": "end", "number": own.number})

    def _offer(self, link: Link, own: _Lent) -> None:
        self._send(link, {"op": "lend", "number": own.number, "nbytes": own.nbytes}, own.fd)

    def _send(self, link: Link, message: dict[str, Any], *fds: int) -> None:
        try:
            link.send(message, fds)
        except OSError as error:  # the peer does not read its messages, or is gone
            logger.info("%s cannot send %s the message %s: %s", self._hardware.name, link, message, error)

    # --- peers -----------------------------------------------------------------------------------------------------

    def join(self, link: Link, wire: int) -> None:
        """Lend everything to the peer of a new wire over a link, if the peer takes messages."""
        if link.talks:
            peer = self._peers[link] = _Peer(HostMemory(LOANS * LOAN.size))
            self._hardware.write(wire + WIRE.loans, peer.table.address)
            for own in self._lent.values():
                self._offer(link, own)

    def leave(self, link: Link) -> None:
        """Forget a peer. The engine must no longer use its wire's table. Idempotent."""
        if (peer := self._peers.pop(link, None)) is not None:
            for memory in (*peer.borrowed.values(), peer.table):
                memory.close()

    def hear(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        """Handle a message that came over a link. The descriptors stay the caller's."""
        peer = self._peers.get(link)
        if peer is None:  # the wire is already gone
            return
        try:
            op, number = message.get("op"), message.get("number")
            if type(number) is not int or not 0 < number <= MAX_LOAN:
                raise InvalidValueError(f"{number!r} is not the number of a loan")
            if op == "lend":
                self._borrow(peer, number, message.get("nbytes"), fds)
                self._send(link, {"op": "lent", "number": number})
            elif op == "lent":  # perhaps of a loan that has ended meanwhile
                if any(own.number == number for own in self._lent.values()):
                    self._hardware.write(peer.row(number) + LOAN.granted, number)
            elif op == "end":
                if (memory := peer.borrowed.pop(number, None)) is not None:
                    self._hardware.write(peer.row(number), 0, 0, 0)
                    memory.close()
            else:
                raise InvalidValueError(f"{op!r} is not an op of messages about loans")
        except (InvalidValueError, OSError) as error:
            logger.warning("%s ignores a message from %s: %s", self._hardware.name, link, error)

    def _borrow(self, peer: _Peer, number: int, nbytes: object, fds: list[int]) -> None:
        """Map the memory that a peer lends."""
        if type(nbytes) is not int or not 0 < nbytes <= MAX_LENT or len(fds) != 1:
            raise InvalidValueError(f"{nbytes!r} bytes and {len(fds)} descriptors are not a valid loan")
        if any(other % LOANS == number % LOANS for other in peer.borrowed):
            raise InvalidValueError(f"the row of loan {number} is in use")
        if nbytes + sum(memory.nbytes for memory in peer.borrowed.values()) > MAX_BORROWED:
            raise InvalidValueError(f"cannot borrow {nbytes} more bytes: a peer can lend {MAX_BORROWED} at most")
        memory = peer.borrowed[number] = MappedMemory(fds[0], nbytes)
        self._hardware.write(peer.row(number), number, memory.address, nbytes)

    def close(self) -> None:
        """Close the descriptors. The engine must have stopped, and the wires must be gone."""
        for own in self._lent.values():
            os.close(own.fd)
        self._lent.clear()
