"""Match parameters of flow groups and entries: the fields that the engine can compare, and their words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....formats.commands import Status
from ....formats.flow import FTE_MATCH_PARAM, MatchCriteria
from ....formats.layout import BitStruct
from ...state.flow import MATCHED
from ..syndromes import CommandError, CommandSyndrome

PARAM_BYTES = FTE_MATCH_PARAM.size

# The fields that the engine compares, and the capability that announces each. None: another field's announces it.
_OUTER = {
    "dmac_47_16": "outer_dmac", "dmac_15_0": None, "smac_47_16": "outer_smac", "smac_15_0": None,
    "ethertype": "outer_ether_type", "first_prio": "outer_first_prio", "first_cfi": "outer_first_cfi",
    "first_vid": "outer_first_vid", "cvlan_tag": None, "svlan_tag": None,
    "ip_version": "outer_ip_version", "ip_protocol": "outer_ip_protocol", "ip_dscp": "outer_ip_dscp",
    "ip_ecn": "outer_ip_ecn", "ttl_hoplimit": "outer_ipv4_ttl", "frag": "outer_frag",
    "src_ipv4_src_ipv6": "outer_sip", "dst_ipv4_dst_ipv6": "outer_dip",
    "tcp_sport": "outer_tcp_sport", "tcp_dport": "outer_tcp_dport", "tcp_flags": "outer_tcp_flags",
    "udp_sport": "outer_udp_sport", "udp_dport": "outer_udp_dport",
}
_MISC = {
    "outer_second_prio": "outer_second_prio", "outer_second_cfi": "outer_second_cfi",
    "outer_second_vid": "outer_second_vid", "outer_second_cvlan_tag": None, "outer_second_svlan_tag": None,
}
_PARTS = {
    MatchCriteria.OUTER_HEADERS: ("outer_headers", _OUTER),
    MatchCriteria.MISC_PARAMETERS: ("misc_parameters", _MISC),
}

# ft_field_support
FIELD_SUPPORT: dict[str, int] = {name: 1 for _, fields in _PARTS.values() for name in fields.values() if name}


def _leaves(struct: BitStruct, at: int = 0, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield the dotted name, first bit and width of each field that is not a structure."""
    for field in struct.fields.values():
        if field.struct:
            yield from _leaves(field.struct, at + field.offset, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", at + field.offset, field.width


_FIELDS = tuple(_leaves(FTE_MATCH_PARAM))
_BITS = PARAM_BYTES * 8


def _bits_of(part: str, names: dict[str, str | None]) -> int:
    return sum(
        ((1 << width) - 1) << (_BITS - first - width)
        for name, first, width in _FIELDS if name.partition(".")[0] == part and name.partition(".")[2] in names
    )


_MATCHABLE = {part: _bits_of(name, fields) for part, (name, fields) in _PARTS.items()}


def _name_of(bits: int) -> str:
    """Return the name of the first field with one of these bits."""
    first = _BITS - bits.bit_length()
    names = (name for name, start, width in _FIELDS if start <= first < start + width)
    return next(names, f"bit {first:#x} of fte_match_param, which is reserved")


def check_criteria(enable: int, criteria: bytes) -> None:
    """Refuse the mask of a group if it has bits that the engine cannot compare."""
    if unknown := enable & ~sum(_PARTS):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
            f"match_criteria_enable {enable:#x}: {MatchCriteria(unknown)!r} is not supported, only outer_headers (1) "
            "and misc_parameters (2)",
        )
    bits = int.from_bytes(criteria, "big")
    if others := bits & ~sum(_MATCHABLE.values()):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
            f"match_criteria: the software NIC cannot match on {_name_of(others)} (see ft_field_support)",
        )
    for part, matchable in _MATCHABLE.items():
        if bits & matchable and not enable & part:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
                f"match_criteria: {_name_of(bits & matchable)} has a mask, but match_criteria_enable {enable:#x} lacks "
                f"{part.name} ({int(part)})",
            )


def check_value(value: bytes, criteria: bytes) -> None:
    """Refuse the value of an entry if it has bits outside its group's mask."""
    if others := int.from_bytes(value, "big") & ~int.from_bytes(criteria, "big"):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
            f"match_value: {_name_of(others)} has bits outside the mask of the group, where they must be 0",
        )


def words_of(param: bytes) -> np.ndarray:
    """Return the parts of match parameters that the engine compares, as 64-bit words."""
    return np.frombuffer(b"".join(param[first : first + size] for first, size in MATCHED), np.int64)
