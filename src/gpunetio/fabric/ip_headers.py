"""Check the IP headers of packets, and write those of packets that the NIC makes itself."""

from __future__ import annotations

from ..device.checksum import internet_sum
from ..formats.packet import (
    ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, ETHERNET, IP_PROTOCOL_AUTHENTICATION, IP_PROTOCOL_DESTINATION_OPTIONS,
    IP_PROTOCOL_FRAGMENT, IP_PROTOCOL_HOP_BY_HOP, IP_PROTOCOL_ROUTING, IP_PROTOCOL_UDP, IPV4, IPV4_DONT_FRAGMENT, IPV6,
    IPV6_EXTENSION, IPV6_FRAGMENT, VLAN_TAG,
)
from ..jit.compile import device_function
from ..jit.ops import be16, be64, ld8, ld16, st8, st16, st32, st64

MOST_TAGS = 2  # VLAN tags of a frame, at most, that are skipped
MOST_EXTENSIONS = 8  # of a packet; after more, no TCP or UDP header is searched for


def internet_checksum(data: bytes) -> int:
    """Return the Internet checksum of data of even length (RFC 1071): 2^16 is 1 modulo 2^16 - 1."""
    return 0xFFFF - int.from_bytes(data, "big") % 0xFFFF


@device_function
def tag_bytes(frame: int, nbytes: int) -> int:
    """Return the length of the VLAN tags of a frame, at most MOST_TAGS of them."""
    at = ETHERNET.ether_type
    for _ in range(MOST_TAGS):
        kind = be16(ld16(frame + at))
        if (kind != ETHER_TYPE_VLAN and kind != ETHER_TYPE_SERVICE_VLAN) or at + 2 + VLAN_TAG.size > nbytes:
            break
        at += VLAN_TAG.size
    return at - ETHERNET.ether_type


@device_function
def whole_ipv4(ip: int, nbytes: int) -> int:
    """Return the length of an IPv4 header, or 0 if it is damaged or its packet is not wholly in `nbytes` (RFC 791)."""
    if nbytes < IPV4.size:
        return 0
    first = ld8(ip + IPV4.version_ihl)
    header, total = (first & 0xF) * 4, be16(ld16(ip + IPV4.total_length))
    if first >> 4 != 4 or header < IPV4.size or header > total or total > nbytes:
        return 0
    return header


@device_function
def whole_ipv6(ip: int, nbytes: int) -> bool:
    """Return whether an IPv6 header is intact and its packet is wholly in `nbytes` (RFC 8200)."""
    if nbytes < IPV6.size:
        return False
    return ld8(ip) >> 4 == 6 and be16(ld16(ip + IPV6.payload_length)) <= nbytes - IPV6.size


@device_function
def extension_bytes(kind: int, header: int) -> int:
    """Return the length of an IPv6 extension header (RFC 8200 4, RFC 4302 2.2), or 0 if `kind` is none."""
    length = ld8(header + IPV6_EXTENSION.length)
    if kind == IP_PROTOCOL_FRAGMENT:
        return IPV6_FRAGMENT.size
    if kind == IP_PROTOCOL_HOP_BY_HOP or kind == IP_PROTOCOL_ROUTING or kind == IP_PROTOCOL_DESTINATION_OPTIONS:
        return (length + 1) * 8
    if kind == IP_PROTOCOL_AUTHENTICATION:  # the only one whose length counts words of 4 bytes
        return (length + 2) * 4
    return 0


@device_function
def put_ipv4(ip: int, source: int, destination: int, nbytes: int, traffic_class: int, ttl: int) -> None:
    """Write an IPv4 header before `nbytes` of UDP. The addresses are the second words of their GIDs."""
    st16(ip + IPV4.version_ihl, 0x45 | traffic_class << 8)
    st16(ip + IPV4.total_length, be16(IPV4.size + nbytes))
    st16(ip + IPV4.identification, 0)
    st16(ip + IPV4.flags_fragment, be16(IPV4_DONT_FRAGMENT))
    st8(ip + IPV4.ttl, ttl)
    st8(ip + IPV4.protocol, IP_PROTOCOL_UDP)
    st16(ip + IPV4.checksum, 0)
    st32(ip + IPV4.source, source >> 32)
    st32(ip + IPV4.destination, destination >> 32)
    st16(ip + IPV4.checksum, be16(internet_sum(ip, IPV4.size) ^ 0xFFFF))


@device_function
def put_ipv6(
    ip: int, source_high: int, source_low: int, destination_high: int, destination_low: int, nbytes: int,
    traffic_class: int, hop_limit: int, flow_label: int,
) -> None:
    """Write an IPv6 header before `nbytes` of UDP. The addresses are the words of their GIDs."""
    st64(ip, be64(6 << 60 | traffic_class << 52 | flow_label << 32 | nbytes << 16 | IP_PROTOCOL_UDP << 8 | hop_limit))
    st64(ip + IPV6.source, source_high)
    st64(ip + IPV6.source + 8, source_low)
    st64(ip + IPV6.destination, destination_high)
    st64(ip + IPV6.destination + 8, destination_low)
