"""Parse the headers of an Ethernet frame, once, into the words that flow tables match.

Peers are not trusted: no byte is read before a length shows that it is there. A header that is damaged or cut off
counts as missing, and only the layers below it are matched.
"""

from __future__ import annotations

from ...fabric.ip_headers import MOST_EXTENSIONS, extension_bytes, whole_ipv4, whole_ipv6
from ...formats.flow import FTE_MATCH_SET_LYR_2_4
from ...formats.packet import (
    ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, ETHERNET, IP_PROTOCOL_FRAGMENT,
    IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, IPV4, IPV4_FRAGMENT_MASK, IPV6, IPV6_EXTENSION, IPV6_FRAGMENT,
    IPV6_FRAGMENT_MASK, TCP, TCP_FLAGS_MASK, TCP_OFFSET_SHIFT, UDP, VLAN_TAG,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, ld8, ld16, pack64, st64
from ..memory.even_loads import ld32_even, ld64_even
from ..state.flow import OUTER_BYTES, PACKET
from ..state.flow import Packet

# Byte offsets in the words. Some fields of the match parameters have the layout that they have in a frame: a tag is
# priority, CFI and VID; the traffic class is DSCP and ECN. The words are: SMAC and EtherType; DMAC and first tag;
# PROTOCOL, CLASS, MARKS and TCP ports; TTL and UDP ports; two per address; second tag and its marks.
SMAC      = FTE_MATCH_SET_LYR_2_4.offset("smac_47_16")
DMAC      = FTE_MATCH_SET_LYR_2_4.offset("dmac_47_16")
PROTOCOL  = FTE_MATCH_SET_LYR_2_4.offset("ip_protocol")
CLASS     = FTE_MATCH_SET_LYR_2_4.offset("ip_dscp")
MARKS     = FTE_MATCH_SET_LYR_2_4.offset("cvlan_tag")
TCP_PORTS = FTE_MATCH_SET_LYR_2_4.offset("tcp_sport")
TTL       = FTE_MATCH_SET_LYR_2_4.offset("ttl_hoplimit")
UDP_PORTS = FTE_MATCH_SET_LYR_2_4.offset("udp_sport")
SOURCE    = FTE_MATCH_SET_LYR_2_4.offset("src_ipv4_src_ipv6")
DESTINATION = FTE_MATCH_SET_LYR_2_4.offset("dst_ipv4_dst_ipv6")
IPV4_AT   = 12  # an IPv4 address is in the last bytes of the field
SECOND_TAG = OUTER_BYTES
_TTL_WORD = TTL & -8

# The word of marks: cvlan_tag, svlan_tag, frag, ip_version, tcp_flags.
_CVLAN, _SVLAN, FRAGMENTED, VERSION_SHIFT = 1 << 15, 1 << 14, 1 << 13, 9
_SECOND_CVLAN, _SECOND_SVLAN = 1 << 7, 1 << 5


@device_function
def _be16_at(address: int) -> int:
    return be16(ld16(address))


@device_function
def _parse_ports(
    packet: Packet, frame: int, at: int, end: int, protocol: int, traffic_class: int, ttl: int, marks: int
) -> None:
    """Parse the TCP or UDP header at offset `at`, if all of it is before `end`. Store the words with the protocol."""
    tcp_ports, udp_ports = 0, 0
    if marks & FRAGMENTED == 0:
        if protocol == IP_PROTOCOL_UDP and end - at >= UDP.size:
            udp_ports = ld32_even(frame + at + UDP.source_port)
            packet.l4 = at
        elif protocol == IP_PROTOCOL_TCP and end - at >= TCP.size:
            word = _be16_at(frame + at + TCP.offset_flags)
            offset = (word >> TCP_OFFSET_SHIFT) * 4
            if offset >= TCP.size and offset <= end - at:
                tcp_ports = ld32_even(frame + at + TCP.source_port)
                packet.l4 = at
                marks |= word & TCP_FLAGS_MASK
    kind = protocol | traffic_class << 8 * (CLASS - PROTOCOL) | be16(marks) << 8 * (MARKS - PROTOCOL)
    st64(packet + PROTOCOL, pack64(kind, tcp_ports))
    st64(packet + _TTL_WORD, pack64(ttl << 8 * (TTL - _TTL_WORD), udp_ports))


@engine_function
def _parse_ipv4(packet: Packet, frame: int, at: int, nbytes: int, marks: int) -> bool:
    """Parse the IPv4 header at offset `at` (RFC 791). Return whether it is there and intact."""
    header = whole_ipv4(frame + at, nbytes - at)
    if header == 0:
        return False
    packet.l3, packet.end = at, at + _be16_at(frame + at + IPV4.total_length)
    protocol, tos = ld8(frame + at + IPV4.protocol), ld8(frame + at + IPV4.tos)
    st64(packet + SOURCE + 8, pack64(0, ld32_even(frame + at + IPV4.source)))
    st64(packet + DESTINATION + 8, pack64(0, ld32_even(frame + at + IPV4.destination)))
    marks |= 4 << VERSION_SHIFT
    if _be16_at(frame + at + IPV4.flags_fragment) & IPV4_FRAGMENT_MASK:
        marks |= FRAGMENTED
    _parse_ports(packet, frame, at + header, packet.end, protocol, tos, ld8(frame + at + IPV4.ttl), marks)
    return True


@engine_function
def _parse_ipv6(packet: Packet, frame: int, at: int, nbytes: int, marks: int) -> bool:
    """Parse the IPv6 header at offset `at` (RFC 8200) and its extensions. Return whether it is there and intact."""
    if not whole_ipv6(frame + at, nbytes - at):
        return False
    packet.l3, packet.end = at, at + IPV6.size + _be16_at(frame + at + IPV6.payload_length)
    traffic_class, ttl = _be16_at(frame + at + IPV6.version_class_flow) >> 4 & 0xFF, ld8(frame + at + IPV6.hop_limit)
    for half in range(0, 16, 8):
        st64(packet + SOURCE + half, ld64_even(frame + at + IPV6.source + half))
        st64(packet + DESTINATION + half, ld64_even(frame + at + IPV6.destination + half))
    marks |= 6 << VERSION_SHIFT
    protocol = ld8(frame + at + IPV6.next_header)
    at += IPV6.size
    for _ in range(MOST_EXTENSIONS):
        if packet.end - at < IPV6_EXTENSION.size:
            break
        size = extension_bytes(protocol, frame + at)
        if size == 0 or size > packet.end - at:
            break
        if protocol == IP_PROTOCOL_FRAGMENT:
            if _be16_at(frame + at + IPV6_FRAGMENT.offset_flags) & IPV6_FRAGMENT_MASK:
                marks |= FRAGMENTED
        protocol = ld8(frame + at + IPV6_EXTENSION.next_header)
        at += size
        if marks & FRAGMENTED:
            break  # the bytes after this header may be from the middle of the packet
    _parse_ports(packet, frame, at, packet.end, protocol, traffic_class, ttl, marks)
    return True


@device_function
def _is_tag(ethertype: int) -> bool:
    return ethertype == ETHER_TYPE_VLAN or ethertype == ETHER_TYPE_SERVICE_VLAN


@engine_function
def parse(packet: Packet, frame: int, nbytes: int) -> int:
    """Parse a frame of `nbytes` bytes, without its check sequence, into a PACKET. Return 0 if it is too short.

    The EtherType is the one after the VLAN tags, of which at most two are read. Each word is stored once: a load that
    spans several stores waits until they are done.
    """
    for offset in range(0, PACKET.size, 8):
        st64(packet + offset, 0)
    if nbytes < ETHERNET.size:
        return 0
    at = ETHERNET.size
    ethertype = _be16_at(frame + ETHERNET.ether_type)
    marks, tag = 0, 0
    if _is_tag(ethertype) and nbytes - at >= VLAN_TAG.size:
        marks = _CVLAN if ethertype == ETHER_TYPE_VLAN else _SVLAN
        tag = ld16(frame + at + VLAN_TAG.control)
        ethertype = _be16_at(frame + at + VLAN_TAG.ether_type)
        at += VLAN_TAG.size
        if _is_tag(ethertype) and nbytes - at >= VLAN_TAG.size:
            kind = _SECOND_CVLAN if ethertype == ETHER_TYPE_VLAN else _SECOND_SVLAN
            st64(packet + SECOND_TAG, pack64(ld16(frame + at + VLAN_TAG.control), kind))
            ethertype = _be16_at(frame + at + VLAN_TAG.ether_type)
            at += VLAN_TAG.size
    smac, dmac = frame + ETHERNET.source, frame + ETHERNET.destination
    st64(packet + SMAC, pack64(ld32_even(smac), ld16(smac + 4) | be16(ethertype) << 16))
    st64(packet + DMAC, pack64(ld32_even(dmac), ld16(dmac + 4) | tag << 16))
    known = False
    if ethertype == ETHER_TYPE_IPV4:
        known = _parse_ipv4(packet, frame, at, nbytes, marks)
    elif ethertype == ETHER_TYPE_IPV6:
        known = _parse_ipv6(packet, frame, at, nbytes, marks)
    if not known:
        st64(packet + PROTOCOL, be16(marks) << 8 * (MARKS - PROTOCOL))
    return 1
