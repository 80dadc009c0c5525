"""Headers of packets: views, where they are, checksums and changes, against packets that scapy builds and reads."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop, IPv6ExtHdrRouting
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Packet, Raw

from gpunetio.device import EINVAL
from gpunetio.eth import headers
from gpunetio.jit.compile import engine_function
from guarded import Guarded

MAC, OTHER = "02:00:00:00:00:05", "02:00:00:00:00:06"
MEMORY = Guarded()
NOTHING = (headers.NONE, 0, 0, 0)

ports = st.integers(1, 0xFFFF)
addresses = st.integers(1, 0xFFFF_FFFE).map(lambda number: str(ipaddress.IPv4Address(number)))
addresses6 = st.integers(1, (1 << 128) - 2).map(lambda number: str(ipaddress.IPv6Address(number)))


@st.composite
def l4_headers(draw, version):
    kinds = [UDP(sport=draw(ports), dport=draw(ports)),
             TCP(sport=draw(ports), dport=draw(ports), options=[("NOP", None)] * draw(st.integers(0, 10)))]
    if version == 4:
        kinds.append(ICMP(id=draw(ports), seq=draw(ports)))
    return draw(st.sampled_from(kinds))


@st.composite
def packets(draw, versions=(4, 6), tags=2):
    """A frame, and its IP header, L4 header and payload as scapy has them."""
    version = draw(st.sampled_from(versions))
    frame = Ether(src=MAC, dst=OTHER)
    for vlan in range(draw(st.integers(0, tags))):
        frame /= Dot1Q(vlan=vlan)
    if version == 4:
        options = [IPOption_NOP()] * draw(st.integers(0, 40))
        frame /= IP(src=draw(addresses), dst=draw(addresses), ttl=draw(st.integers(1, 255)), options=options)
    else:
        frame /= IPv6(src=draw(addresses6), dst=draw(addresses6), hlim=draw(st.integers(1, 255)))
        for extension in draw(st.lists(st.sampled_from([IPv6ExtHdrDestOpt, IPv6ExtHdrHopByHop]), max_size=3)):
            frame /= extension()
    return frame / draw(l4_headers(version)) / Raw(draw(st.binary(min_size=1, max_size=60)))


def l4_header(packet: Packet) -> Packet:
    return next(packet[kind] for kind in (UDP, TCP, ICMP) if kind in packet)


def offsets(packet: Packet) -> tuple[int, int]:
    """Of the IP header and of the L4 header."""
    ip = packet[IP] if IP in packet else packet[IPv6]
    return len(packet) - len(ip), len(packet) - len(l4_header(packet))


def placed(data: bytes) -> int:
    """Return the address of a copy: even, and up to its end as long as the frame, or a byte longer."""
    return MEMORY.put(data + bytes(len(data) % 2))


# --- views -----------------------------------------------------------------------------------------------------------


@engine_function
def _answer_arp(packet, mac):
    eth, arp = headers.ethernet_at(packet), headers.arp_at(packet + headers.ETHERNET.size)
    arp.operation = headers.ARP_REPLY
    arp.target_mac, arp.target_ip, arp.sender_ip = arp.sender_mac, arp.sender_ip, arp.target_ip
    arp.sender_mac = mac
    eth.destination, eth.source = eth.source, mac


@engine_function
def _spend(packet):
    ip = headers.ipv4_at(packet + headers.ETHERNET.size)
    ip.ttl -= 1
    return ip.source, ip.total_length, ip.ttl


def test_arp_is_answered_by_attributes():
    asked = Ether(src=MAC, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=MAC, psrc="10.9.0.2", pdst="10.9.0.1")
    at = placed(bytes(asked))
    _answer_arp(at, 0x0200_0000_0006)
    reply = ARP(op="is-at", hwsrc=OTHER, psrc="10.9.0.1", hwdst=MAC, pdst="10.9.0.2")
    assert MEMORY.bytes_at(at, 42) == bytes(Ether(src=OTHER, dst=MAC) / reply)


def test_fields_are_in_the_order_of_the_host():
    at = placed(bytes(Ether() / IP(src="192.168.1.2", ttl=64) / UDP()))
    assert _spend(at) == (0xC0A8_0102, 28, 63)


# --- where headers are -----------------------------------------------------------------------------------------------


@given(packets(), st.integers(0, 20))
def test_l4_of(packet, padding):
    data = bytes(packet)
    at = placed(data + bytes(padding))
    ip, l4 = offsets(packet)
    protocol = {UDP: 17, TCP: 6, ICMP: 1}[type(l4_header(packet))]
    assert headers.l4_of(at, len(data) + padding) == (protocol, at + ip, at + l4, len(data) - l4)


@given(packets())
def test_payloads(packet):
    data = bytes(packet)
    at = placed(data)
    protocol, _, l4, length = headers.l4_of(at, len(data))
    find = {17: headers.udp_payload, 6: headers.tcp_payload}.get(protocol)
    if find is not None:
        expected = len(bytes(packet[Raw]))
        assert find(l4, length) == (at + len(data) - expected, expected)
        assert find(l4, 7) == (0, EINVAL)


@pytest.mark.parametrize("said", [7, 8, 30, 31])
def test_a_udp_length_that_cannot_be_is_none(said):
    data = bytes(UDP(len=said) / bytes(22))
    at = placed(data)
    assert headers.udp_payload(at, len(data)) == ((at + 8, said - 8) if 8 <= said <= 30 else (0, EINVAL))


@pytest.mark.parametrize("words", [4, 5, 7, 8])
def test_a_tcp_offset_that_cannot_be_is_none(words):
    data = bytes(TCP(dataofs=words) / bytes(8))
    at = placed(data)
    assert headers.tcp_payload(at, len(data)) == ((at + 4 * words, 28 - 4 * words) if 5 <= words <= 7 else (0, EINVAL))


@pytest.mark.parametrize("packet", [
    IP(flags="MF") / UDP(), IP(frag=3) / UDP(), IPv6(dst="::1") / IPv6ExtHdrFragment(m=1) / UDP(),
    IPv6(dst="::1") / IPv6ExtHdrFragment(offset=9) / UDP(), IP(version=5) / UDP(), IP(ihl=4) / UDP(),
    IP(len=29) / UDP(), IP(len=19) / UDP(), IPv6(dst="::1", plen=9) / UDP(), ARP(),
])
def test_packets_without_an_l4_header(packet):
    data = bytes(Ether() / packet)
    assert headers.l4_of(placed(data), len(data)) == NOTHING


def test_an_atomic_fragment_is_whole():
    data = bytes(Ether() / IPv6(dst="::1") / IPv6ExtHdrRouting() / IPv6ExtHdrFragment() / UDP())
    at = placed(data)
    assert headers.l4_of(at, len(data)) == (17, at + 14, at + len(data) - 8, 8)


@settings(max_examples=300)
@given(packets(), st.data())
def test_what_a_peer_may_send(packet, data):
    """Frames that are cut or damaged anywhere: nothing behind their last byte is read, and lengths are inside."""
    frame = bytearray(bytes(packet))
    for _ in range(data.draw(st.integers(0, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    at = MEMORY.put(bytes(frame))  # may be odd, which the host does not mind
    end = at + len(frame)
    kind, l3, length = headers.l3_of(at, len(frame))
    assert (kind == headers.NONE and len(frame) < 14) or (at + 14 <= l3 <= end and l3 + length == end)
    protocol, ip, l4, length = headers.l4_of(at, len(frame))
    if protocol == headers.NONE:
        assert (protocol, ip, l4, length) == NOTHING
        return
    assert at + 14 <= ip <= ip + 20 <= l4 <= l4 + length <= end
    for find in (headers.udp_payload, headers.tcp_payload):
        payload, nbytes = find(l4, length)
        assert (payload, nbytes) == (0, EINVAL) or l4 < payload <= payload + nbytes <= l4 + length
    headers.is_l4_intact(ip, protocol, l4, length)


# --- checksums -------------------------------------------------------------------------------------------------------


@given(packets(tags=0), st.data())
def test_checksums_are_those_of_scapy(packet, data):
    frame = bytes(packet)
    at = placed(frame)
    found = headers.l4_of(at, len(frame))
    protocol, ip, l4, length = found
    assert headers.is_l4_intact(ip, protocol, l4, length)
    field = l4 - at + {1: 2, 6: 16, 17: 6}[protocol]
    broken = bytearray(frame)
    broken[field] ^= 1 << data.draw(st.integers(0, 7))
    at = placed(bytes(broken))
    assert not headers.is_l4_intact(ip, protocol, l4, length) or broken[field : field + 2] == b"\0\0"
    headers.write_l4_checksum(ip, protocol, l4, length)
    if IP in packet:
        assert headers.is_ipv4_intact(ip)
        broken[24] ^= 1 << data.draw(st.integers(0, 7))
        placed(bytes(broken))
        assert not headers.is_ipv4_intact(ip)
        headers.write_ipv4_checksum(ip)
        headers.write_l4_checksum(ip, protocol, l4, length)
    assert MEMORY.bytes_at(at, len(frame)) == frame


def test_udp_without_a_checksum():
    """It is right over IPv4, wrong over IPv6 (RFC 8200 8.1), and stays without when headers change."""
    for ip, intact in ((IP(src="10.0.0.1"), True), (IPv6(src="::2", dst="::1"), False)):
        data = bytes(Ether() / ip / UDP(chksum=0) / b"x")
        at = placed(data)
        found = headers.l4_of(at, len(data))
        assert headers.is_l4_intact(found[1], found[0], *found[2:]) == intact
        if intact:
            headers.set_source(found[1], found[0], found[2], 1, 2)
            assert Ether(MEMORY.bytes_at(at, len(data)))[UDP].chksum == 0


def test_a_udp_checksum_of_zero_is_sent_as_ones():
    """RFC 768: 0 means that there is none."""
    data = bytearray(bytes(Ether() / IP(src="10.0.0.1", dst="10.0.0.2") / UDP(sport=1, dport=2) / bytes(2)))
    data[-2:] = (int.from_bytes(data[40:42], "big")).to_bytes(2, "big")  # now the sum is 0xFFFF without a checksum
    at = placed(bytes(data))
    headers.write_l4_checksum(at + 14, 17, at + 34, 10)
    assert MEMORY.bytes_at(at + 40, 2) == b"\xff\xff"
    headers.set_destination(at + 14, 17, at + 34, 0x0A00_0001, 3)  # the sum is the same
    assert MEMORY.bytes_at(at + 40, 2) == b"\xff\xff"


# --- changes ---------------------------------------------------------------------------------------------------------


@given(packets(versions=(4,)), addresses, ports, st.sampled_from([headers.set_source, headers.set_destination]))
def test_addresses_and_ports_are_replaced(packet, address, port, replace):
    """The result is what scapy builds from scratch with the new ones."""
    data = bytes(packet)
    at = placed(data)
    protocol, ip, l4, _ = headers.l4_of(at, len(data))
    replace(ip, protocol, l4, int(ipaddress.IPv4Address(address)), port)
    names = ("src", "sport") if replace is headers.set_source else ("dst", "dport")
    setattr(packet[IP], names[0], address)
    if ICMP not in packet:
        setattr(l4_header(packet), names[1], port)
    assert MEMORY.bytes_at(at, len(data)) == bytes(packet)


@given(packets())
def test_ends_swap(packet):
    data = bytes(packet)
    at = placed(data)
    protocol, ip, l4, _ = headers.l4_of(at, len(data))
    headers.swap_macs(at)
    headers.swap_addresses(ip)
    l3 = packet[IP] if IP in packet else packet[IPv6]
    packet.src, packet.dst = packet.dst, packet.src
    l3.src, l3.dst = l3.dst, l3.src
    if protocol != 1:
        headers.swap_ports(l4)
        header = l4_header(packet)
        header.sport, header.dport = header.dport, header.sport
    assert MEMORY.bytes_at(at, len(data)) == bytes(packet)


@given(packets())
def test_a_hop_is_spent(packet):
    data = bytes(packet)
    at = placed(data)
    _, ip, _, _ = headers.l4_of(at, len(data))
    l3, name = (packet[IP], "ttl") if IP in packet else (packet[IPv6], "hlim")
    before = getattr(l3, name)
    assert headers.spend_hop(ip) == before - 1
    setattr(l3, name, before - 1)
    assert MEMORY.bytes_at(at, len(data)) == bytes(packet)


def test_no_hop_is_left():
    data = bytes(Ether() / IP(ttl=0) / UDP())
    at = placed(data)
    assert headers.spend_hop(at + 14) == -1
    assert MEMORY.bytes_at(at, len(data)) == data
