"""Flow rules in words: the fields that a mask compares, and the values that match.

A mask and a value are the words that flow tables compare (`nic.state.flow.MATCHED`). Fields have the names of the PRM,
except that MACs, which the PRM splits in two, are `dmac` and `smac`, and addresses have the IP version in their name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from ..formats.flow import FTE_MATCH_PARAM
from ..formats.layout import BitStruct
from ..nic.state.flow import MATCHED

_IPV6, _ETHER_TYPE_IPV6 = 6, 0x86DD
_IPV4_BITS = 32
_CUT = {"mac_47_16": 16, "mac_15_0": 0}  # parts of a MAC, and their bit offsets in it
_HEX = "ethertype", "tcp_flags"


@dataclass(frozen=True)
class Compared:
    """A field of a match: its name, its value under the mask, and the mask; `full` if that has all bits."""

    name: str
    value: int
    mask: int
    full: bool

    @property
    def values(self) -> tuple[int | str, int | str]:
        """Return value and mask in the form for JSON, with addresses as text."""
        text = _ADDRESSES.get(self.name)
        return (text(self.value), text(self.mask)) if text else (self.value, self.mask)

    def __str__(self) -> str:
        return f"{self.name} {self._text(self.value)}" + ("" if self.full else f" & {self._text(self.mask)}")

    @property
    def field(self) -> str:
        """Return the field in words, without a value."""
        return self.name + ("" if self.full else f" & {self._text(self.mask)}")

    def _text(self, number: int) -> str:
        if text := _ADDRESSES.get(self.name):
            return text(number)
        return hex(number) if self.name in _HEX or not self.full else str(number)


def _mac(number: int) -> str:
    return number.to_bytes(6, "big").hex(":")


def _ipv4(number: int) -> str:
    return str(IPv4Address(number))


def _ipv6(number: int) -> str:
    return str(IPv6Address(number))


_ADDRESSES: dict[str, Callable[[int], str]] = {
    "dmac": _mac, "smac": _mac, "src_ipv4": _ipv4, "dst_ipv4": _ipv4, "src_ipv6": _ipv6, "dst_ipv6": _ipv6,
}


def _leaves(struct: BitStruct, at: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield name, first bit and width of each field that is not a structure."""
    for field in struct.fields.values():
        if field.struct:
            yield from _leaves(field.struct, at + field.offset)
        else:
            yield field.name, at + field.offset, field.width


def _places() -> dict[str, tuple[int, int]]:
    """Return the distance of each compared field from the end of the words, in bits, and its width."""
    places: dict[str, tuple[int, int]] = {}
    left = 8 * sum(size for _, size in MATCHED)
    for first, size in MATCHED:
        for name, at, width in _leaves(FTE_MATCH_PARAM):
            if 8 * first <= at < 8 * (first + size):
                places[name] = left - (at - 8 * first) - width, width
        left -= 8 * size
    return places


_PLACES = _places()


@functools.cache
def _parts(mask: bytes) -> tuple[tuple[str, int, int, bool], ...]:
    """Return the fields in which a mask has bits: name, place, these bits, and whether they are all of the field."""
    bits, found = int.from_bytes(mask, "big"), []
    for name, (shift, width) in _PLACES.items():
        full = (1 << width) - 1
        if here := bits >> shift & full:
            found.append((name, shift, here, here == full))
    return tuple(found)


def compared(mask: bytes, value: bytes = b"") -> list[Compared]:
    """Return the fields that a mask compares, in their order in a packet, with their values."""
    values = int.from_bytes(value, "big")
    found = {name: Compared(name, values >> shift & here, here, full) for name, shift, here, full in _parts(mask)}
    made: dict[str, Compared] = {}
    for name, field in found.items():
        if name[1:] in _CUT:
            _join_mac(made, field)
        elif name.endswith("_ipv6"):
            made[name] = _address(field, found)
        else:
            made[name] = field
    return list(made.values())


def _join_mac(made: dict[str, Compared], part: Compared) -> None:
    """Add a part of a MAC to the fields."""
    name, shift = part.name[: len("dmac")], _CUT[part.name[1:]]
    other = made.get(name, Compared(name, 0, 0, False))
    value, mask = other.value | part.value << shift, other.mask | part.mask << shift
    made[name] = Compared(name, value, mask, mask == (1 << 48) - 1)


def _address(field: Compared, found: dict[str, Compared]) -> Compared:
    """Return an address with the IP version that the match implies. IPv4 uses the last four bytes."""
    version, kind = found.get("ip_version"), found.get("ethertype")
    six = (version is not None and version.value == _IPV6) or (kind is not None and kind.value == _ETHER_TYPE_IPV6)
    if six or field.mask >> _IPV4_BITS:
        return Compared(f"{field.name[:3]}_ipv6", field.value, field.mask, field.full)
    return Compared(f"{field.name[:3]}_ipv4", field.value, field.mask, field.mask == (1 << _IPV4_BITS) - 1)
