"""Stations of IPv4 over Ethernet: who the server is, and who can get an answer."""

from __future__ import annotations

from dataclasses import dataclass

from ..jit.compile import device_function

_MAC_GROUP = 1 << 40  # the bit of a MAC that says it is a group's
_FIRST_GROUP = 224  # first byte of IPv4 addresses of groups; behind them there are no stations


@dataclass(frozen=True, slots=True)
class Station:
    """MAC and IPv4 address, as integers, and the MTU of the port."""

    mac: int
    address: int
    mtu: int


@device_function
def is_station(mac, address):
    """Return whether an answer can go to a MAC and an IPv4 address: they are no group, and not 0 (RFC 1122 3.2.1.3)."""
    return mac & _MAC_GROUP == 0 and mac != 0 and 0 < address >> 24 < _FIRST_GROUP
