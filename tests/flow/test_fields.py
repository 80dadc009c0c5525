"""Every field of every match, alone and with each other field: scapy makes frames that differ in that field only."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from flow_port_rig import steered
from gpunetio.flow import Match, TcpFlag, match
from gpunetio.nic.state.flow import Fate

Change = Callable[[Packet], object]


def put(layer: type[Packet], nth: int = 1, **fields: object) -> Change:
    """Change fields of the nth header of a kind. Lengths and checksums follow when the frame is built."""

    def change(frame: Packet) -> None:
        for name, value in fields.items():
            setattr(frame.getlayer(layer, nth), name, value)

    return change


L2 = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
TAGS = Dot1Q(vlan=5, prio=3, dei=1) / Dot1Q(vlan=6, prio=2, dei=1)
V4, V6 = IP(src="10.1.2.3", dst="10.4.5.6", tos=0xB9, ttl=9), IPv6(src="fd00::1", dst="fd00::2", tc=0xB9, hlim=9)
DATA = Raw(b"data")

OF_ETHERNET: list[tuple[Match, Change]] = [
    (match.eth(src="02:00:00:00:00:01"), put(Ether, src="02:00:00:00:00:03")),
    (match.eth(src="02:00:00:00:00:01"), put(Ether, src="03:00:00:00:00:01")),
    (match.eth(dst="02:00:00:00:00:02"), put(Ether, dst="02:00:00:00:00:03")),
    (match.eth(dst="02:00:00:00:00:02"), put(Ether, dst="03:00:00:00:00:02")),
    (match.eth(dst=("02:00:00:00:00:00", "02:00:00:00:00:00")), put(Ether, dst="01:00:00:00:00:02")),
]
OF_TAGS: list[tuple[Match, Change]] = [
    (match.vlan(), put(Ether, type=0x88A8)), (match.vlan(5), put(Dot1Q, vlan=7)),
    (match.vlan(prio=3), put(Dot1Q, prio=4)), (match.vlan(cfi=1), put(Dot1Q, dei=0)),
    (match.second_vlan(), put(Dot1Q, type=0x88A8)), (match.second_vlan(6), put(Dot1Q, 2, vlan=5)),
    (match.second_vlan(prio=2), put(Dot1Q, 2, prio=3)), (match.second_vlan(cfi=1), put(Dot1Q, 2, dei=0)),
    (match.eth(ether_type=0x0800), put(Dot1Q, 2, type=0x0801)),
]
OF_V4: list[tuple[Match, Change]] = [
    (match.ipv4(src="10.1.2.3"), put(IP, src="10.1.2.2")), (match.ipv4(src="10.0.0.0/8"), put(IP, src="11.1.2.3")),
    (match.ipv4(dst="10.4.5.6"), put(IP, dst="10.4.5.7")), (match.ipv4(dst="10.4.5.0/24"), put(IP, dst="10.4.4.6")),
    (match.ipv4(dscp=46), put(IP, tos=0xBD)), (match.ipv4(ecn=1), put(IP, tos=0xBA)),
    (match.ipv4(ttl=9), put(IP, ttl=8)), (match.whole(), put(IP, flags="MF")), (match.whole(), put(IP, frag=1)),
]
OF_V6: list[tuple[Match, Change]] = [
    (match.ipv6(src="fd00::1"), put(IPv6, src="fd00::3")), (match.ipv6(src="fd00::/64"), put(IPv6, src="fd01::1")),
    (match.ipv6(dst="fd00::2"), put(IPv6, dst="8000::2")), (match.ipv6(dscp=46), put(IPv6, tc=0xBD)),
    (match.ipv6(ecn=1), put(IPv6, tc=0xBA)), (match.ipv6(hop_limit=9), put(IPv6, hlim=10)),
]
OF_UDP: list[tuple[Match, Change]] = [
    (match.udp(src=1000), put(UDP, sport=1001)), (match.udp(dst=53), put(UDP, dport=52)),
    (match.udp(dst=(0x30, 0xFFF0)), put(UDP, dport=0x45)),
]
OF_TCP: list[tuple[Match, Change]] = [
    (match.tcp(src=1000), put(TCP, sport=1256)), (match.tcp(dst=80), put(TCP, dport=336)),
    (match.tcp(flags=TcpFlag.SYN), put(TCP, flags="A")), (match.tcp(flags=0x12), put(TCP, flags="SAP")),
]

CASES: dict[str, tuple[Packet, list[tuple[Match, Change]]]] = {
    "udp": (
        L2 / TAGS / V4 / UDP(sport=1000, dport=53) / DATA,
        [*OF_ETHERNET, *OF_TAGS, *OF_V4, *OF_UDP, (match.udp(), put(IP, proto=6)),
         (match.ipv4(protocol=17), put(IP, proto=99))],
    ),
    "tcp": (
        L2 / V4 / TCP(sport=1000, dport=80, flags="SA") / DATA,
        [*OF_V4, *OF_TCP, (match.tcp(), put(IP, proto=17))],
    ),
    "ipv6": (
        L2 / V6 / UDP(sport=1000, dport=53) / DATA,
        [*OF_V6, *OF_UDP, (match.eth(ether_type=0x86DD), put(Ether, type=0x800)),
         (match.ipv6(protocol=17), put(IPv6, nh=99))],
    ),
    "icmp": (L2 / V4 / ICMP() / DATA, [(match.icmp(), put(IP, proto=17)), *OF_V4]),
    "icmpv6": (L2 / V6 / ICMPv6EchoRequest() / DATA, [(match.icmpv6(), put(IPv6, nh=17)), *OF_V6]),
    "service tags": (
        L2 / Dot1AD(vlan=5, prio=3) / Dot1AD(vlan=6) / V4 / UDP() / DATA,
        [(match.vlan(5, service=True), put(Ether, type=0x8100)),
         (match.vlan(prio=3, service=True), put(Dot1AD, prio=2)),
         (match.second_vlan(6, service=True), put(Dot1AD, type=0x8100))],
    ),
}


@pytest.fixture(scope="module")
def flows() -> Iterator:
    with steered() as flows:
        yield flows


def changed(frame: Packet, change: Change) -> bytes:
    again = frame.copy()
    change(again)
    return bytes(again)


@pytest.mark.parametrize("name", CASES)
def test_fields_alone_and_in_pairs(flows, name):
    """The frame is taken, and is not if one of the fields is another; whatever else it has does not matter."""
    frame, fields = CASES[name]
    queue = flows.rq()
    taken, others = (Fate.TIR, queue.number, 0), [changed(frame, change) for _, change in fields]
    for (found, _), other in zip(fields, others, strict=True):
        with flows.port.steer(found, to=queue):
            assert flows.met([bytes(frame), other]) == [taken, (Fate.MISS, 0, 0)], found
    for (first, one), (second, two) in itertools.combinations(zip(fields, others, strict=True), 2):
        with flows.port.steer(first[0] & second[0], to=queue):
            found = flows.met([bytes(frame), one, two])
            assert found == [taken, (Fate.MISS, 0, 0), (Fate.MISS, 0, 0)], f"{first[0]} & {second[0]}"


def test_what_lies_behind_other_tags_is_not_matched(flows):
    """docs/flow.md: two tags of 0x8100 and 0x88A8 are read. A third one, or one of 0x9100, is what the frame has."""
    queue, packet = flows.rq(), V4 / UDP(dport=53)
    three = L2 / TAGS / Dot1Q(vlan=7) / packet
    other = Ether(src=L2.src, dst=L2.dst, type=0x9100) / Dot1Q(vlan=7) / packet
    for found, wanted in (
        (match.udp(dst=53), []), (match.ipv4(), []), (match.eth(ether_type=0x800), []), (match.vlan(7), []),
        (match.eth(ether_type=0x8100), [three]), (match.eth(ether_type=0x9100), [other]),
        (match.second_vlan(6), [three]), (match.eth(dst="02:00:00:00:00:02"), [three, other]),
    ):
        with flows.port.steer(found, to=queue):
            fates = flows.met([bytes(three), bytes(other)])
        assert [fate[0] == Fate.TIR for fate in fates] == [three in wanted, other in wanted], found
