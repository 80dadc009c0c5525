"""Stations of IPv4 over Ethernet: the server's own, and which ones can be answered."""

from __future__ import annotations

from dataclasses import dataclass

from ..jit.compile import device_function

_MAC_GROUP = 1 << 40  # the group bit of a MAC
_FIRST_GROUP = 224  # first byte of the lowest IPv4 address of a group; no station has a higher address


@dataclass(frozen=True, slots=True)
class Station:
    """MAC and IPv4 address, as integers, and the MTU of the port."""

    mac: int
    address: int
    mtu: int


@device_function
def is_station(mac: int, address: int) -> bool:
    """Return whether an answer can go to a MAC and an IPv4 address: neither is a group's, or 0 (RFC 1122 3.2.1.3)."""
    return mac & _MAC_GROUP == 0 and mac != 0 and 0 < address >> 24 < _FIRST_GROUP
