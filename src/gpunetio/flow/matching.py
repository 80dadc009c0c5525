"""Matches as flow tables compare them: bits of the headers of a packet (PRM, fte_match_param)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import InvalidValueError
from ..formats.flow import FTE_MATCH_PARAM, MatchCriteria
from ..formats.layout import BitStruct
from ..formats.packet import ETHER_TYPE_IPV4, ETHER_TYPE_IPV6
from .values import Bits

PARAM_BYTES = FTE_MATCH_PARAM.size
_BITS = 8 * PARAM_BYTES
# The parts of fte_match_param in order, each with its bit in match_criteria_enable.
_PARTS = tuple(zip(
    ("outer_headers", "misc_parameters", "inner_headers", "misc_parameters_2", "misc_parameters_3",
     "misc_parameters_4", "misc_parameters_5"),
    MatchCriteria, strict=True,
))


def _leaves(struct: BitStruct, at: int = 0, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    for leaf in struct.fields.values():
        if leaf.struct:
            yield from _leaves(leaf.struct, at + leaf.offset, f"{prefix}{leaf.name}.")
        else:
            yield f"{prefix}{leaf.name}", (_BITS - at - leaf.offset - leaf.width, leaf.width)


_ETHER_TYPES = {4: ETHER_TYPE_IPV4, 6: ETHER_TYPE_IPV6}  # by ip_version
_PLACES = dict(_leaves(FTE_MATCH_PARAM))  # dotted name → lowest bit and width


@dataclass(frozen=True, repr=False)
class Match:
    """Values for bits of a packet's headers. `&` of two matches matches packets that satisfy both.

    `mask` has the bits that are compared and `value` their values, both as numbers in the layout of fte_match_param.
    `open` has those bits of the mask whose values a pipe's rules give. A header that a packet lacks reads as 0.
    """

    mask: int = 0
    value: int = 0
    open: int = 0
    text: str = field(default="everything", compare=False)

    def __and__(self, other: Match) -> Match:
        both = self.mask & other.mask
        if wrong := both & (self.value ^ other.value | self.open ^ other.open):
            name = name_of(wrong)
            raise InvalidValueError(
                f"{self} & {other} contradict each other: {name.rpartition('.')[2]} cannot be {self._shown(name)} and "
                f"{other._shown(name)} at once"
            )
        text = " & ".join(match.text for match in (self, other) if match.mask) or self.text
        return Match(self.mask | other.mask, self.value | other.value, self.open | other.open, text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<match {self.text}>"

    def _shown(self, name: str) -> str:
        shift, width = _PLACES[name]
        full = (1 << width) - 1
        return "PER_ENTRY" if self.open >> shift & full else str(self.value >> shift & full)

    @cached_property
    def certain(self) -> tuple[int, int]:
        """Return mask and value of what all matching packets share: an IP header implies the EtherType."""
        version, protocol = _value(self, "ip_version"), _value(self, "ip_protocol")
        if version in _ETHER_TYPES:
            wanted, mask = _ETHER_TYPES[version], 0xFFFF
        elif protocol:  # IPv4 or IPv6: the bits that their EtherTypes have in common
            wanted, mask = _ETHER_TYPES[4] & _ETHER_TYPES[6], 0xFFFF & ~(_ETHER_TYPES[4] ^ _ETHER_TYPES[6])
        else:
            return self.mask, self.value
        shift, _ = _PLACES["outer_headers.ethertype"]
        mask &= ~(self.mask >> shift)
        return self.mask | mask << shift, self.value | (wanted & mask) << shift

    @property
    def criteria(self) -> bytes:
        """Return the mask as the match_criteria of a flow group."""
        return self.mask.to_bytes(PARAM_BYTES, "big")

    @property
    def enable(self) -> int:
        """Return match_criteria_enable: the parts in which the mask has bits."""
        return sum(
            int(bit) for name, bit in _PARTS
            if self.mask >> (_BITS - 8 * (FTE_MATCH_PARAM.offset(name) + 64)) & (1 << 512) - 1
        )


def _value(match: Match, name: str) -> int:
    """Return the value of an outer-header field if all its bits are compared, else 0."""
    shift, width = _PLACES[f"outer_headers.{name}"]
    full = (1 << width) - 1
    return match.value >> shift & full if match.mask >> shift & full == full else 0


def name_of(bits: int) -> str:
    """Return the dotted name of a field that has some of these bits."""
    return next(name for name, (shift, width) in _PLACES.items() if bits >> shift & (1 << width) - 1)


def bits_at(text: str, fields: dict[str, Bits]) -> Match:
    """Return a match from dotted names of fields of fte_match_param. Shorter values are the low bits of a field."""
    mask = value = open_bits = 0
    for name, bits in fields.items():
        shift, _ = _PLACES[name]
        mask, value, open_bits = mask | bits.mask << shift, value | bits.value << shift, open_bits | bits.open << shift
    return Match(mask, value, open_bits, text)
