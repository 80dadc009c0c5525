"""Checksums of IPv4, TCP, UDP, ICMP and ICMPv6: compute them, check them, and update them when headers change."""

from __future__ import annotations

from ...device.checksum import internet_sum, pseudo_sum, store_checksum, update_checksum
from ...formats.packet import (
    ICMP, IP_PROTOCOL_ICMP, IP_PROTOCOL_ICMPV6, IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, IPV4, TCP, UDP,
)
from ...jit.compile import device_function
from ...jit.ops import be16, ld8, ld16, st16
from .find import ipv4_bytes
from .views import ipv4_at


@device_function
def _field_of(protocol: int) -> int:
    """Return the offset of a protocol's checksum field, or 0 for any protocol not supported here."""
    if protocol == IP_PROTOCOL_TCP:
        return TCP.checksum
    if protocol == IP_PROTOCOL_UDP:
        return UDP.checksum
    return ICMP.checksum if protocol == IP_PROTOCOL_ICMP or protocol == IP_PROTOCOL_ICMPV6 else 0


@device_function
def _l4_sum(ip: int, protocol: int, l4: int, length: int) -> int:
    total = internet_sum(l4, length)
    return total if protocol == IP_PROTOCOL_ICMP else total + pseudo_sum(ip, protocol, length)


@device_function
def write_ipv4_checksum(ip: int) -> None:
    """Compute the checksum of an IPv4 header and store it in the header (RFC 791)."""
    ipv4_at(ip).checksum = 0
    store_checksum(ip + IPV4.checksum, internet_sum(ip, ipv4_bytes(ip)), 0)


@device_function
def is_ipv4_intact(ip: int) -> bool:
    """Return whether the checksum of an IPv4 header is correct."""
    return internet_sum(ip, ipv4_bytes(ip)) == 0xFFFF


@device_function
def write_l4_checksum(ip: int, protocol: int, l4: int, length: int) -> None:
    """Compute the checksum of TCP, UDP, ICMP or ICMPv6 and store it in the header (RFC 9293, 768, 792, 4443).

    The arguments are the result of `l4_of`. Packets of other protocols are not changed.
    """
    field = _field_of(protocol)
    if field != 0:
        st16(l4 + field, 0)
        store_checksum(l4 + field, _l4_sum(ip, protocol, l4, length), protocol)


@device_function
def is_l4_intact(ip: int, protocol: int, l4: int, length: int) -> bool:
    """Return whether the checksum of TCP, UDP, ICMP or ICMPv6 is correct. The arguments are the result of `l4_of`.

    Also true for UDP over IPv4 without a checksum (RFC 768), and for other protocols.
    """
    field = _field_of(protocol)
    if field == 0 or (protocol == IP_PROTOCOL_UDP and ld8(ip) >> 4 == 4 and ld16(l4 + field) == 0):
        return True
    return _l4_sum(ip, protocol, l4, length) % 0xFFFF == 0


@device_function
def update_l4_checksum(protocol: int, l4: int, old: int, new: int) -> None:
    """Update the checksum of TCP, UDP, ICMP or ICMPv6 after a field it covers has changed (RFC 1624).

    The field is in the packet or the pseudo header. `old` and `new` are its values, as for `update_checksum`. A UDP
    packet without a checksum stays without one.
    """
    field = _field_of(protocol)
    if field == 0:
        return
    found = be16(ld16(l4 + field))
    if protocol == IP_PROTOCOL_UDP and found == 0:
        return
    found = update_checksum(found, old, new)
    st16(l4 + field, be16(0xFFFF if found == 0 and protocol == IP_PROTOCOL_UDP else found))
