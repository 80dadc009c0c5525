"""Packet headers for kernels: views with attributes, functions that find headers, checksums, and rewriting.

    from gpunetio.eth import headers

    protocol, ip, l4, length = headers.l4_of(packet, nbytes)
    if protocol == headers.IP_PROTOCOL_UDP and headers.udp_at(l4).destination_port == 53:
        headers.swap_macs(packet)
        headers.swap_addresses(ip)
        headers.swap_ports(l4)

Addresses and fields are integers in host byte order: 10.0.0.1 is 0x0A000001, the value of
`int(ipaddress.IPv4Address(…))`, and 02:00:00:00:00:05 is 0x020000000005. IPv6 addresses have two halves, `source_high`
and `source_low`.
"""

from ...device.checksum import checksum, internet_sum, update_checksum
from ...formats.packet import (
    ARP, ARP_ETHERNET, ARP_REPLY, ARP_REQUEST, ETHER_TYPE_ARP, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHERNET, ICMP,
    ICMP_ECHO, ICMP_ECHO_REPLY, IP_PROTOCOL_ICMP, IP_PROTOCOL_ICMPV6, IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, IPV4, IPV6,
    TCP, TCP_ACK, TCP_FIN, TCP_PSH, TCP_RST, TCP_SYN, UDP, VLAN_TAG,
)
from .checksums import is_ipv4_intact, is_l4_intact, update_l4_checksum, write_ipv4_checksum, write_l4_checksum
from .find import NONE, ipv4_bytes, l3_of, l4_of, tcp_bytes, tcp_payload, udp_payload
from .rewrite import set_destination, set_source, spend_hop, swap_addresses, swap_macs, swap_ports
from .views import arp_at, ethernet_at, icmp_at, ipv4_at, ipv6_at, tcp_at, udp_at, vlan_tag_at

__all__ = [
    "ARP", "ARP_ETHERNET", "ARP_REPLY", "ARP_REQUEST", "ETHERNET", "ETHER_TYPE_ARP", "ETHER_TYPE_IPV4",
    "ETHER_TYPE_IPV6", "ICMP", "ICMP_ECHO", "ICMP_ECHO_REPLY", "IPV4", "IPV6", "IP_PROTOCOL_ICMP",
    "IP_PROTOCOL_ICMPV6", "IP_PROTOCOL_TCP", "IP_PROTOCOL_UDP", "NONE", "TCP", "TCP_ACK", "TCP_FIN", "TCP_PSH",
    "TCP_RST", "TCP_SYN", "UDP", "VLAN_TAG", "arp_at", "checksum", "ethernet_at", "icmp_at", "internet_sum",
    "ipv4_at", "ipv4_bytes", "ipv6_at", "is_ipv4_intact", "is_l4_intact", "l3_of", "l4_of", "set_destination",
    "set_source", "spend_hop", "swap_addresses", "swap_macs", "swap_ports", "tcp_at", "tcp_bytes", "tcp_payload",
    "udp_at", "udp_payload", "update_checksum", "update_l4_checksum", "vlan_tag_at", "write_ipv4_checksum",
    "write_l4_checksum",
]
