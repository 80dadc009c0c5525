"""Rewrite headers: swap the two ends, replace addresses and ports, count hops.

Correct checksums stay correct. Swapping both ends does not change them.
"""

from __future__ import annotations

from ...device.checksum import update_checksum
from ...formats.packet import IP_PROTOCOL_TCP, IP_PROTOCOL_UDP
from ...jit.compile import device_function
from ...jit.ops import ld8
from .checksums import update_l4_checksum
from .views import ethernet_at, ipv4_at, ipv6_at, udp_at


@device_function
def swap_macs(packet: int) -> None:
    """Swap source and destination of the Ethernet header."""
    eth = ethernet_at(packet)
    eth.source, eth.destination = eth.destination, eth.source


@device_function
def swap_addresses(ip: int) -> None:
    """Swap source and destination of an IPv4 or IPv6 header."""
    if ld8(ip) >> 4 == 4:
        v4 = ipv4_at(ip)
        v4.source, v4.destination = v4.destination, v4.source
    else:
        v6 = ipv6_at(ip)
        v6.source_high, v6.destination_high = v6.destination_high, v6.source_high
        v6.source_low, v6.destination_low = v6.destination_low, v6.source_low


@device_function
def swap_ports(l4: int) -> None:
    """Swap source and destination port of a UDP or TCP header; both begin with the ports."""
    udp = udp_at(l4)
    udp.source_port, udp.destination_port = udp.destination_port, udp.source_port


@device_function
def _readdress(ip: int, protocol: int, l4: int, old: int, new: int) -> None:
    """Update the checksums after an IPv4 address, which is in the header and the pseudo header, has changed."""
    v4 = ipv4_at(ip)
    v4.checksum = update_checksum(v4.checksum, old, new)
    if protocol == IP_PROTOCOL_TCP or protocol == IP_PROTOCOL_UDP:  # ICMP has no pseudo header
        update_l4_checksum(protocol, l4, old, new)


@device_function
def set_source(ip: int, protocol: int, l4: int, address: int, port: int) -> None:
    """Replace source address and port of UDP or TCP over IPv4, and update the checksums (RFC 1624).

    For other protocols, replace only the address. The first three arguments are results of `l4_of`.
    """
    v4 = ipv4_at(ip)
    old = v4.source
    v4.source = address
    _readdress(ip, protocol, l4, old, v4.source)
    if protocol == IP_PROTOCOL_TCP or protocol == IP_PROTOCOL_UDP:
        udp = udp_at(l4)
        old = udp.source_port
        udp.source_port = port
        update_l4_checksum(protocol, l4, old, udp.source_port)


@device_function
def set_destination(ip: int, protocol: int, l4: int, address: int, port: int) -> None:
    """Replace destination address and port of UDP or TCP over IPv4, and update the checksums (RFC 1624).

    For other protocols, replace only the address. The first three arguments are results of `l4_of`.
    """
    v4 = ipv4_at(ip)
    old = v4.destination
    v4.destination = address
    _readdress(ip, protocol, l4, old, v4.destination)
    if protocol == IP_PROTOCOL_TCP or protocol == IP_PROTOCOL_UDP:
        udp = udp_at(l4)
        old = udp.destination_port
        udp.destination_port = port
        update_l4_checksum(protocol, l4, old, udp.destination_port)


@device_function
def spend_hop(ip: int) -> int:
    """Decrement the TTL of IPv4, updating the checksum, or the hop limit of IPv6. Return the number of hops left.

    A router does not forward a packet for which this is 0 or less (RFC 1812 5.3.1, RFC 8200 3).
    """
    if ld8(ip) >> 4 == 4:
        v4 = ipv4_at(ip)
        left = v4.ttl - 1
        if left >= 0:
            v4.ttl = left
            v4.checksum = update_checksum(v4.checksum, left + 1 << 8, left << 8)  # the TTL is the upper byte of a word
        return left
    v6 = ipv6_at(ip)
    left = v6.hop_limit - 1
    if left >= 0:
        v6.hop_limit = left
    return left
