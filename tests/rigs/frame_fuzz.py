"""Valid frames, changed versions of them, and how a port must classify each."""

import random
from collections.abc import Sequence
from ipaddress import ip_address

from scapy.contrib.roce import BTH
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.ipsec import AH
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Raw

from gpunetio.fabric.ip_headers import internet_checksum
from gpunetio.nic.engine.port import gid_of

PEER = bytes.fromhex("020000000002")
V4, V6 = ("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")  # addresses of the port, and of its peer
ROCE = "roce"
TAGS = (b"\x81\0", b"\x88\xa8")


def templates(own: bytes) -> list[bytes]:
    """Frames that are right, of all that a port without rules tells apart."""
    ether, packet = Ether(src=PEER, dst=own), UDP(sport=0xC001, dport=4791) / BTH(dqpn=5) / Raw(bytes(range(40)))
    v4, v6 = IP(src=V4[1], dst=V4[0], flags="DF"), IPv6(src=V6[1], dst=V6[0])
    return [bytes(frame) for frame in (
        ether / v4 / packet, ether / v6 / packet, ether / v4 / packet / Raw(bytes(9)),
        ether / IP(src=V4[1], dst=V4[0], options=b"\x01" * 8) / packet, ether / Dot1Q(vlan=5) / v4 / packet,
        ether / ARP(psrc=V4[1], pdst=V4[0]), ether / v6 / ICMPv6ND_NS(tgt=V6[0]), ether / v6 / ICMPv6ND_NA(tgt=V6[1]),
        ether / v4 / UDP(dport=53) / Raw(bytes(30)), ether / IP(src=V4[1], dst=V4[0], flags="MF") / packet,
    )]


def more_templates(own: bytes) -> list[bytes]:
    """Frames that flow rules tell apart: tags on tags, chains of extension headers, fragments, TCP, ICMP."""
    ether, data = Ether(src=PEER, dst=own), Raw(bytes(range(60)))
    v4, v6 = IP(src=V4[1], dst=V4[0]), IPv6(src=V6[1], dst=V6[0])
    tcp, dns = TCP(sport=4000, dport=80, flags="PA"), UDP(sport=4001, dport=53)
    chain = IPv6ExtHdrHopByHop() / IPv6ExtHdrRouting() / IPv6ExtHdrDestOpt()
    return [bytes(frame) for frame in (
        ether / v4 / tcp / data, ether / v6 / tcp / data, ether / v4 / dns / data, ether / v6 / dns / data,
        ether / v4 / ICMP() / data, ether / Dot1Q(vlan=5, prio=3) / v4 / dns / data,
        ether / Dot1AD(vlan=5) / Dot1Q(vlan=6) / v4 / tcp / data,
        ether / Dot1Q(vlan=5) / Dot1Q(vlan=5) / Dot1Q(vlan=5) / v4 / dns / data,
        ether / v6 / chain / dns / data, ether / v6 / chain / IPv6ExtHdrFragment(offset=3, m=1) / tcp / data,
        ether / v6 / AH(payloadlen=1, icv=b"", padding=b"") / tcp / data,
        ether / v6 / IPv6ExtHdrFragment() / dns / data, ether / IPv6(src=V6[1], dst=V6[0], hlim=1) / ICMP() / data,
        ether / v6 / (IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() / chain / chain) / dns / data,
        ether / IP(src=V4[1], dst=V4[0], frag=5) / tcp / data,
        ether / IP(src="10.9.0.9", dst=V4[0]) / UDP(dport=4791) / data,
    )]


def mutated(source: random.Random, frame: bytes) -> bytes:
    """A frame with some bytes changed, or another length; often with the right header checksum."""
    changed = bytearray(frame)
    for _ in range(source.choice((0, 1, 1, 2, 5))):
        value = source.choice((0, 1, 0x45, 0x4F, 0x7F, 0xFF, source.randrange(256)))
        changed[source.randrange(min(len(changed), 64))] = value
    if source.random() < 0.3:
        del changed[source.randrange(len(changed)) :]
    if source.random() < 0.1:
        changed += source.randbytes(source.randrange(1, 60))
    head = 4 * (changed[14] & 15) if len(changed) > 34 else 0
    if changed[12:14] == b"\x08\0" and 20 <= head <= len(changed) - 14 and source.random() < 0.7:
        changed[24:26] = bytes(2)
        changed[24:26] = internet_checksum(bytes(changed[14 : 14 + head])).to_bytes(2, "big")
    return bytes(changed)


def number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "big")


def fate(frame: bytes, own: bytes, gids: Sequence[bytes]) -> str:
    """What a frame is to a port without rules, in plain Python, from the RFCs: the name of its counter, or ROCE."""
    if len(frame) < 14:
        return "rx_frame_malformed"
    if frame[:6] != own and not frame[0] & 1:
        return "rx_frame_other_mac"
    kind, ip = frame[12:14], frame[14:]
    if kind == b"\x08\x06":
        return "rx_frame_neighbour"
    if kind in TAGS:
        at = 12
        while frame[at : at + 2] in TAGS and at < 20 and len(frame) >= at + 6:
            at += 4
        inner = fate(frame[:12] + frame[at:], own, gids) if frame[at : at + 2] in (b"\x08\x06", b"\x86\xdd") else ""
        return "rx_frame_neighbour" if inner == "rx_frame_neighbour" else "rx_frame_vlan"
    if kind == b"\x08\0":
        if len(ip) < 20 or ip[0] >> 4 != 4 or not 20 <= (head := 4 * (ip[0] & 15)) <= number(ip, 2) <= len(ip):
            return "rx_frame_malformed"
        if sum(number(ip, i) for i in range(0, head, 2)) % 0xFFFF != 0:
            return "rx_frame_checksum"
        if gid_of(ip_address(ip[16:20])) not in gids:
            return "rx_frame_other_address"
        if number(ip, 6) & 0x3FFF:
            return "rx_frame_fragment"
        protocol, udp = ip[9], ip[head : number(ip, 2)]
    elif kind == b"\x86\xdd":
        if len(ip) < 40 or ip[0] >> 4 != 6 or number(ip, 4) > len(ip) - 40:
            return "rx_frame_malformed"
        protocol, udp = ip[6], ip[40 : 40 + number(ip, 4)]
        if protocol == 58 and len(udp) >= 24 and udp[0] in (135, 136):
            return "rx_frame_neighbour"
        if ip[24:40] not in gids:
            return "rx_frame_other_address"
        if protocol == 44:
            return "rx_frame_fragment"
    else:
        return "rx_frame_other_protocol"
    if protocol != 17:
        return "rx_frame_other_protocol"
    if len(udp) < 8 or not 12 <= number(udp, 4) <= len(udp):
        return "rx_frame_malformed"
    return ROCE if number(udp, 2) == 4791 else "rx_frame_other_protocol"
