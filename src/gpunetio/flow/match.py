"""Select packets by their headers: `match.udp(dst=53)`, `match.ipv4(src="10.0.0.0/8") & match.tcp()`.

A header implies those it needs: a UDP port the protocol, and an address the IP version. Arguments left out match
anything. Numbers are ints, or pairs (value, mask). MACs are text or 6 bytes. IP addresses are text, bytes, `ipaddress`
objects, or networks such as "10.0.0.0/8". In a pipe's match, PER_ENTRY leaves a value to the pipe's rules.
"""

from __future__ import annotations

from enum import IntFlag
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from ..formats.packet import IP_PROTOCOL_TCP, IP_PROTOCOL_UDP
from .matching import Match, bits_at
from .values import Bits, Ip, Mac, Number, address, mac, number

_OUTER, _MISC = "outer_headers.", "misc_parameters."
_ICMP, _ICMPV6 = 1, 58  # IANA protocol numbers
_YES, _NO = Bits(1, 1), Bits(0, 1)


class TcpFlag(IntFlag):
    """Flags of TCP (RFC 9293). As `flags`, they are those that must be set; the others may be anything."""

    FIN = 0x01
    SYN = 0x02
    RST = 0x04
    PSH = 0x08
    ACK = 0x10
    URG = 0x20
    ECE = 0x40
    CWR = 0x80


def everything() -> Match:
    """Match all packets."""
    return Match()


def eth(*, src: Mac | None = None, dst: Mac | None = None, ether_type: Number | None = None) -> Match:
    """Match MAC addresses, and the EtherType after VLAN tags.

    Up to two tags of types 0x8100 and 0x88A8 are parsed. A third tag, or a tag of another type, counts as the frame's
    EtherType.
    """
    fields: dict[str, Bits] = {}
    for name, given in (("smac", src), ("dmac", dst)):
        if given is not None:
            bits = mac("src" if name == "smac" else "dst", given)
            for part, shift, mask in (("47_16", 16, 0xFFFF_FFFF), ("15_0", 0, 0xFFFF)):
                if bits.mask >> shift & mask:
                    fields[f"{_OUTER}{name}_{part}"] = Bits(*(b >> shift & mask for b in _three(bits)))
    if ether_type is not None:
        fields[f"{_OUTER}ethertype"] = number("ether_type", ether_type, 16)
    return bits_at(_text("eth", src=src, dst=dst, ether_type=ether_type), fields)


def vlan(
    vid: Number | None = None, *, prio: Number | None = None, cfi: Number | None = None, service: bool = False
) -> Match:
    """Match the outer VLAN tag (IEEE 802.1Q): VID, priority and CFI. With `service`, it is a service tag, 0x88A8."""
    mark = f"{_OUTER}{'svlan_tag' if service else 'cvlan_tag'}"
    text = _text("vlan", vid=vid, prio=prio, cfi=cfi, service=service or None)
    return bits_at(text, {mark: _YES, **_tag(f"{_OUTER}first_", vid=vid, prio=prio, cfi=cfi)})


def second_vlan(
    vid: Number | None = None, *, prio: Number | None = None, cfi: Number | None = None, service: bool = False
) -> Match:
    """Match the VLAN tag after the outer one."""
    mark = f"{_MISC}outer_second_{'svlan_tag' if service else 'cvlan_tag'}"
    text = _text("second_vlan", vid=vid, prio=prio, cfi=cfi, service=service or None)
    return bits_at(text, {mark: _YES, **_tag(f"{_MISC}outer_second_", vid=vid, prio=prio, cfi=cfi)})


def ipv4(
    *, src: Ip | None = None, dst: Ip | None = None, protocol: Number | None = None, dscp: Number | None = None,
    ecn: Number | None = None, ttl: Number | None = None,
) -> Match:
    """Match IPv4 and fields of its header. Fragments match as well, unless `whole()` is added."""
    return _ip(4, "ipv4", src, dst, protocol=protocol, dscp=dscp, ecn=ecn, ttl=ttl)


def ipv6(
    *, src: Ip | None = None, dst: Ip | None = None, protocol: Number | None = None, dscp: Number | None = None,
    ecn: Number | None = None, hop_limit: Number | None = None,
) -> Match:
    """Match IPv6 and fields of its header. `protocol` is the protocol after the extension headers."""
    return _ip(6, "ipv6", src, dst, protocol=protocol, dscp=dscp, ecn=ecn, hop_limit=hop_limit)


def whole() -> Match:
    """Match packets that are not fragments. Matches of TCP or UDP ports or flags imply this: fragments lack both."""
    return bits_at("whole()", {f"{_OUTER}frag": _NO})


def udp(*, src: Number | None = None, dst: Number | None = None) -> Match:
    """Match UDP over IPv4 or IPv6, and its ports."""
    return _l4("udp", IP_PROTOCOL_UDP, src=src, dst=dst)


def tcp(*, src: Number | None = None, dst: Number | None = None, flags: Number | None = None) -> Match:
    """Match TCP over IPv4 or IPv6, its ports and flags. A `TcpFlag` gives the flags set, an int all nine flag bits."""
    wanted = (int(flags), int(flags)) if isinstance(flags, TcpFlag) else flags
    made = _l4("tcp", IP_PROTOCOL_TCP, src=src, dst=dst)
    if wanted is None:
        return made
    more = bits_at("", {f"{_OUTER}tcp_flags": number("flags", wanted, 9), f"{_OUTER}frag": _NO})
    both = made & more
    return Match(both.mask, both.value, both.open, _text("tcp", src=src, dst=dst, flags=flags))


def icmp() -> Match:
    """Match ICMP over IPv4."""
    return _ip(4, "icmp", None, None, protocol=_ICMP)


def icmpv6() -> Match:
    """Match ICMP over IPv6."""
    return _ip(6, "icmpv6", None, None, protocol=_ICMPV6)


def _ip(version: int, name: str, src: Ip | None, dst: Ip | None, **more: Number | None) -> Match:
    fields = {f"{_OUTER}ip_version": Bits(version, 0xF)}
    for which, given in (("src", src), ("dst", dst)):
        if given is not None:
            bits = address(which, given, version)
            if bits.mask:  # 0.0.0.0/0 is any address
                fields[f"{_OUTER}{which}_ipv4_{which}_ipv6"] = bits
    widths = {"protocol": ("ip_protocol", 8), "dscp": ("ip_dscp", 6), "ecn": ("ip_ecn", 2), "ttl": ("ttl_hoplimit", 8),
              "hop_limit": ("ttl_hoplimit", 8)}
    for key, value in more.items():
        if value is not None:
            where, width = widths[key]
            fields[_OUTER + where] = number(key, value, width)
    shown = {} if name.startswith("icmp") else {"src": src, "dst": dst, **more}
    return bits_at(_text(name, **shown), fields)


def _l4(name: str, protocol: int, **ports: Number | None) -> Match:
    fields = {f"{_OUTER}ip_protocol": Bits(protocol, 0xFF)}
    for side, given in ports.items():
        if given is not None:
            bits = number(side, given, 16)
            fields[f"{_OUTER}{name}_{side[0]}port"] = bits
            fields[f"{_OUTER}frag"] = _NO
    return bits_at(_text(name, **ports), fields)


def _tag(prefix: str, **given: Number | None) -> dict[str, Bits]:
    """Return the fields of a VLAN tag."""
    widths = {"vid": 12, "prio": 3, "cfi": 1}
    return {prefix + name: number(name, value, widths[name]) for name, value in given.items() if value is not None}


def _three(bits: Bits) -> tuple[int, int, int]:
    return bits.value, bits.mask, bits.open


def _text(name: str, **given: object) -> str:
    return f"{name}({', '.join(f'{key}={_shown(value)}' for key, value in given.items() if value is not None)})"


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex(":")
    if isinstance(value, TcpFlag):
        return str(value.name)
    return str(value) if isinstance(value, IPv4Address | IPv6Address | IPv4Network | IPv6Network) else repr(value)
