"""Values of match fields: integers, MACs and IP addresses, each with the bits that are compared."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..arguments import whole
from ..errors import InvalidValueError

_MAC = re.compile(r"(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}")
_MAC_BYTES = 6


class PerEntry(Enum):
    """The type of `PER_ENTRY`."""

    PER_ENTRY = "PER_ENTRY"

    def __repr__(self) -> str:
        return self.name


# In the match of a BASIC pipe: each of its rules gives the value (DOCA Flow: a field of all ones).
PER_ENTRY: Final = PerEntry.PER_ENTRY

Number = int | tuple[int, int] | PerEntry
Mac = str | bytes | tuple[str | bytes, str | bytes] | PerEntry
Ip = (
    str | bytes | ipaddress.IPv4Address | ipaddress.IPv6Address | ipaddress.IPv4Network | ipaddress.IPv6Network
    | tuple[str, str] | PerEntry
)


@dataclass(frozen=True)
class Bits:
    """The value of a field, the bits that are compared (`mask`), and those of them that each rule gives (`open`)."""

    value: int
    mask: int
    open: int = 0


def number(name: str, given: object, width: int) -> Bits:
    """Return the bits for an integer of `width` bits, or for a pair (value, mask)."""
    full = (1 << width) - 1
    if given is PER_ENTRY:
        return Bits(0, full, full)
    _no_range(name, given)
    value, mask = _pair(name, given, full)
    return _masked(name, _fits(name, value, full), _fits(f"mask of {name}", mask, full))


def mac(name: str, given: object) -> Bits:
    """Return the bits for a MAC, "02:00:00:00:00:01" or 6 bytes, or for a pair (value, mask)."""
    full = (1 << 8 * _MAC_BYTES) - 1
    if given is PER_ENTRY:
        return Bits(0, full, full)
    value, mask = given if isinstance(given, tuple) and len(given) == 2 else (given, b"\xff" * _MAC_BYTES)
    return _masked(name, _mac_bits(name, value), _mac_bits(f"mask of {name}", mask))


def address(name: str, given: object, version: int) -> Bits:
    """Return the bits for an IP address or network: text, bytes, an `ipaddress` object, or a pair (value, mask)."""
    width = 32 if version == 4 else 128
    full = (1 << width) - 1
    if given is PER_ENTRY:
        return Bits(0, full, full)
    if isinstance(given, tuple) and len(given) == 2:
        return _masked(name, _ip(name, given[0], version), _ip(f"mask of {name}", given[1], version))
    if isinstance(given, ipaddress.IPv4Network | ipaddress.IPv6Network) or (isinstance(given, str) and "/" in given):
        try:
            network = ipaddress.ip_network(given)
        except ValueError as error:
            raise InvalidValueError(f"{name} = {given!r} is no network: {error}") from None
        if network.version != version:
            raise InvalidValueError(f"{name} = {given!r} is an IPv{network.version} network: IPv{version} is matched")
        return Bits(int(network.network_address), int(network.netmask))
    return Bits(_ip(name, given, version), full)


def _ip(name: str, given: object, version: int) -> int:
    size = 4 if version == 4 else 16
    if not isinstance(given, str | bytes | ipaddress.IPv4Address | ipaddress.IPv6Address):
        raise InvalidValueError(f"{name} = {given!r}: an IP address is text, {size} bytes, or an object of ipaddress")
    _no_range(name, given)
    try:
        found = ipaddress.ip_address(given)
    except ValueError:
        raise InvalidValueError(f"{name} = {given!r} is no IP address") from None
    if found.version != version:
        raise InvalidValueError(f"{name} = {given!r} is an IPv{found.version} address: IPv{version} is matched")
    return int(found)


def _mac_bits(name: str, given: object) -> int:
    if isinstance(given, bytes | bytearray) and len(given) == _MAC_BYTES:
        return int.from_bytes(given, "big")
    if isinstance(given, str) and _MAC.fullmatch(given):
        return int(given.replace(":", "").replace("-", ""), 16)
    raise InvalidValueError(f'{name} = {given!r}: a MAC is text such as "02:00:00:00:00:01", or 6 bytes')


def _pair(name: str, given: object, full: int) -> tuple[int, int]:
    if isinstance(given, tuple):
        if len(given) != 2:
            raise InvalidValueError(f"{name} = {given!r}: a pair is (value, mask)")
        return whole(name, given[0]), whole(f"mask of {name}", given[1])
    return whole(name, given), full


def _no_range(name: str, given: object) -> None:
    if isinstance(given, range | slice | list | set) or (isinstance(given, str) and "-" in given):
        raise InvalidValueError(
            f"{name} = {given!r}: devices match values under masks, not ranges or lists: make a rule for each "
            "value, or use (value, mask)"
        )


def _fits(name: str, value: int, full: int) -> int:
    if not 0 <= value <= full:
        raise InvalidValueError(f"{name} = {value}: it must be 0 to {full}")
    return value


def _masked(name: str, value: int, mask: int) -> Bits:
    if value & ~mask:
        raise InvalidValueError(f"{name} = ({value:#x}, {mask:#x}): the value has bits outside the mask")
    if not mask:
        raise InvalidValueError(f"{name} has the mask 0, which compares nothing: leave it out")
    return Bits(value, mask)
