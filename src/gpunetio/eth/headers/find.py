"""Find the headers of a packet, and what follows them.

The sender is not trusted: no byte is read before a length has been checked, and all lengths are within the frame.
"""

from __future__ import annotations

from ...device import EINVAL
from ...fabric.ip_headers import MOST_EXTENSIONS, extension_bytes, tag_bytes, whole_ipv4, whole_ipv6
from ...formats.packet import (
    ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHERNET, IP_PROTOCOL_FRAGMENT, IPV4_FRAGMENT_MASK, IPV6, IPV6_EXTENSION,
    IPV6_FRAGMENT, IPV6_FRAGMENT_MASK, TCP, TCP_OFFSET_SHIFT, UDP,
)
from ...jit.compile import device_function
from ...jit.ops import be16, ld8, ld16
from .views import ipv4_at, ipv6_at, tcp_at, udp_at

NONE = -1  # no EtherType and no protocol


@device_function
def ipv4_bytes(ip: int) -> int:
    """Return the length of an IPv4 header with its options, as the header gives it."""
    return (ld8(ip) & 0xF) * 4


@device_function
def tcp_bytes(tcp: int) -> int:
    """Return the length of a TCP header with its options, as the header gives it."""
    return (tcp_at(tcp).offset_flags >> TCP_OFFSET_SHIFT) * 4


@device_function
def l3_of(packet: int, nbytes: int) -> tuple[int, int, int]:
    """Return the EtherType, and the address and length of what follows the Ethernet header and up to two VLAN tags.

    If the frame of `nbytes` is shorter than an Ethernet header, return NONE, 0, 0.
    """
    if nbytes < ETHERNET.size:
        return NONE, 0, 0
    begin = ETHERNET.size + tag_bytes(packet, nbytes)
    return be16(ld16(packet + begin - 2)), packet + begin, nbytes - begin


@device_function
def _behind_ipv4(ip: int, nbytes: int) -> tuple[int, int, int, int]:
    header = whole_ipv4(ip, nbytes)
    view = ipv4_at(ip)
    if header == 0 or view.flags_fragment & IPV4_FRAGMENT_MASK:
        return NONE, 0, 0, 0
    return view.protocol, ip, ip + header, view.total_length - header


@device_function
def _behind_ipv6(ip: int, nbytes: int) -> tuple[int, int, int, int]:
    if not whole_ipv6(ip, nbytes):
        return NONE, 0, 0, 0
    view = ipv6_at(ip)
    protocol, at = view.next_header, ip + IPV6.size
    end = at + view.payload_length
    for _ in range(MOST_EXTENSIONS):
        if end - at < IPV6_EXTENSION.size:
            break
        size = extension_bytes(protocol, at)
        if size == 0:
            break
        fragment = protocol == IP_PROTOCOL_FRAGMENT
        if size > end - at or (fragment and be16(ld16(at + IPV6_FRAGMENT.offset_flags)) & IPV6_FRAGMENT_MASK):
            return NONE, 0, 0, 0
        protocol = ld8(at + IPV6_EXTENSION.next_header)
        at += size
    return protocol, ip, at, end - at


@device_function
def l4_of(packet: int, nbytes: int) -> tuple[int, int, int, int]:
    """Return the protocol, the address of the IP header, and the address and length of what follows that header.

    This works for TCP, UDP, ICMP and others over IPv4 and IPv6, after options, extension headers and VLAN tags. The
    length is that of the IP packet, without the frame's padding. If the frame of `nbytes` has no IP packet, or a
    damaged, truncated or fragmented one, return NONE, 0, 0, 0.
    """
    kind, ip, length = l3_of(packet, nbytes)
    if kind == ETHER_TYPE_IPV4:
        return _behind_ipv4(ip, length)
    if kind == ETHER_TYPE_IPV6:
        return _behind_ipv6(ip, length)
    return NONE, 0, 0, 0


@device_function
def udp_payload(udp: int, length: int) -> tuple[int, int]:
    """Return the address and length of a UDP packet's payload. `length` is the packet's, as returned by `l4_of`.

    If the header is truncated, or its length is impossible, return 0, EINVAL.
    """
    if length < UDP.size:
        return 0, EINVAL
    said = udp_at(udp).length
    if said < UDP.size or said > length:
        return 0, EINVAL
    return udp + UDP.size, said - UDP.size


@device_function
def tcp_payload(tcp: int, length: int) -> tuple[int, int]:
    """Return the address and length of a TCP segment's payload. `length` is the segment's, as returned by `l4_of`.

    If the header is truncated, or its length is impossible, return 0, EINVAL.
    """
    if length < TCP.size:
        return 0, EINVAL
    header = tcp_bytes(tcp)
    if header < TCP.size or header > length:
        return 0, EINVAL
    return tcp + header, length - header
