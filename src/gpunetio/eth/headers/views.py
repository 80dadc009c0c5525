"""Views of headers in packets, as declared in `formats.packet`.

Headers must begin at even addresses, as they do in packets of receive queues: a GPU loads their words in halves.
"""

from __future__ import annotations

from ...formats.packet import ARP, ETHERNET, ICMP, IPV4, IPV6, TCP, UDP, VLAN_TAG
from ...jit.struct_view import View, struct_view

_EVEN = 2

ethernet_at: View = struct_view(ETHERNET, _EVEN)
vlan_tag_at: View = struct_view(VLAN_TAG, _EVEN)
arp_at: View = struct_view(ARP, _EVEN)
ipv4_at: View = struct_view(IPV4, _EVEN)
ipv6_at: View = struct_view(IPV6, _EVEN)
udp_at: View = struct_view(UDP, _EVEN)
tcp_at: View = struct_view(TCP, _EVEN)
icmp_at: View = struct_view(ICMP, _EVEN)
