"""Packet sequence numbers (IBTA 9.7.2): 24 bits on the wire, which wrap, and 64 bits at the requester, which do not."""

from __future__ import annotations

from ...formats.packet import PSN_BITS, PSN_MASK
from ...jit.compile import device_function

MAX_OUTSTANDING = 1 << PSN_BITS - 1  # half of the PSNs: beyond that, an old one looks like a new one (IBTA 9.7.2)


@device_function
def on_wire(psn: int) -> int:
    """Return the 24 bits of a PSN that packets carry."""
    return psn & PSN_MASK


@device_function
def distance(psn: int, since: int) -> int:
    """Return how many packets `psn` comes after `since`, modulo the 24-bit range."""
    return (psn - since) & PSN_MASK


@device_function
def is_before(psn: int, expected: int) -> bool:
    """Return whether `psn` lies in the half of the 24-bit range before `expected`: its packet is a duplicate."""
    return distance(psn, expected) >= MAX_OUTSTANDING


@device_function
def unwrap(psn: int, near: int) -> int:
    """Return the 64-bit PSN whose low 24 bits are `psn`, within half the 24-bit range of `near`."""
    ahead = distance(psn, near)
    return near + (ahead - (PSN_MASK + 1) if ahead >= MAX_OUTSTANDING else ahead)


@device_function
def packets_of(nbytes: int, mtu: int) -> int:
    """Return how many packets, and so PSNs, a message or a READ response of `nbytes` takes: one at least."""
    return 1 if nbytes <= mtu else (nbytes + mtu - 1) // mtu
