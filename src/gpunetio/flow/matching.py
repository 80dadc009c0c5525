"""What a rule matches: bits of the headers of a packet, as flow tables compare them (PRM, fte_match_param)."""

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
# The parts of fte_match_param, in their order, and the bit of match_criteria_enable for each.
_PARTS = tuple(zip(
    ("outer_headers", "misc_parameters", "inner_headers", "misc_parameters_2", "misc_parameters_3",
     "misc_parameters_4", "misc_parameters_5"),
    MatchCriteria, strict=True,
))  # fmt: skip


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
    """Bits of a packet's headers that have a value. `&` of two matches is what both match.

    `mask` has the bits that are compared, `value` their values, both as numbers in the order of fte_match_param; `open`
    are those of the mask whose values the entries of a pipe give. A packet that lacks a header has 0 in its fields.
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
        """Return mask and value of what all packets that match have: an IP header implies the EtherType."""
        version, protocol = _value(self, "ip_version"), _value(self, "ip_protocol")
        if version in _ETHER_TYPES:
            wanted, mask = _ETHER_TYPES[version], 0xFFFF
        elif protocol:  # either of the two: what they have in common
            wanted, mask = _ETHER_TYPES[4] & _ETHER_TYPES[6], 0xFFFF & ~(_ETHER_TYPES[4] ^ _ETHER_TYPES[6])
        else:
            return self.mask, self.value
        shift, _ = _PLACES["outer_headers.ethertype"]
        mask &= ~(self.mask >> shift)
        return self.mask | mask << shift, self.value | (wanted & mask) << shift

    @property
    def criteria(self) -> bytes:
        """Return the mask as match_criteria of a flow group."""
        return self.mask.to_bytes(PARAM_BYTES, "big")

    @property
    def enable(self) -> int:
        """Return match_criteria_enable: which parts the mask has bits in."""
        return sum(
            int(bit) for name, bit in _PARTS
            if self.mask >> (_BITS - 8 * (FTE_MATCH_PARAM.offset(name) + 64)) & (1 << 512) - 1
        )  # fmt: skip


def _value(match: Match, name: str) -> int:
    """Return the value of a field of the outer headers that is compared completely, else 0."""
    shift, width = _PLACES[f"outer_headers.{name}"]
    full = (1 << width) - 1
    return match.value >> shift & full if match.mask >> shift & full == full else 0


def name_of(bits: int) -> str:
    """Return the dotted name of a field with some of these bits."""
    return next(name for name, (shift, width) in _PLACES.items() if bits >> shift & (1 << width) - 1)


def bits_at(text: str, fields: dict[str, Bits]) -> Match:
    """Return a match of fields of fte_match_param by dotted name. Values shorter than a field are its low bits."""
    mask = value = open_bits = 0
    for name, bits in fields.items():
        shift, _ = _PLACES[name]
        mask, value, open_bits = mask | bits.mask << shift, value | bits.value << shift, open_bits | bits.open << shift
    return Match(mask, value, open_bits, text)
