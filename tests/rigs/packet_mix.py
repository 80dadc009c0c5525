"""Packets of all kinds that the application distinguishes, and how each of them is counted."""

import random
from collections.abc import Iterator

from scapy.layers.inet import ICMP, TCP, UDP, fragment
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Packet, Raw

from packet_processing_rig import ADDRESS, NOTHING, Counted, ip, l2

OPTIONS = [("NOP", None), ("Timestamp", (1, 2))]


def padded(frame: Packet) -> Packet:
    """A frame as Ethernet carries it: with 60 bytes at least."""
    return Ether(bytes(frame).ljust(60, b"\0"))


def udp(n: int) -> Iterator[tuple[Packet, Counted]]:
    """Packets of UDP of flow `n`, and what each counts as."""
    dns, other = UDP(sport=1024 + n, dport=53), UDP(sport=1024 + n, dport=5353)
    for over in (ip(), ip(options=[Raw(b"\x01" * 8)])):
        query, rest = l2() / over / dns / Raw(b"question"), l2() / over / other / Raw(bytes(n % 1400))
        yield padded(query), ("UDP", "dns", len(query))
        yield padded(rest), ("UDP", "others", len(rest))
    tagged = l2() / Dot1Q(vlan=5) / ip() / dns
    yield tagged, ("UDP", "dns", len(tagged) - 4)
    for part in fragment(ip(id=n) / UDP(sport=1024 + n, dport=53) / Raw(bytes(2000)), fragsize=800):
        whole = l2() / part
        yield whole, ("UDP", "others", len(whole))
    answer = l2() / ip() / UDP(sport=53, dport=1024 + n)
    yield padded(answer), ("UDP", "others", len(answer))


TEXTS = {
    b"GET /index.html HTTP/1.1\r\n": "http_get", b"GET /": "http_get", b"HEAD / HTTP/1.1": "http_head",
    b"POST /form HTTP/1.1": "http_post", b"HTTP/1.1 200 OK": "http", b"HTTP/1.1": "http",
}
FLAGS = {"F": "tcp_fin", "FA": "tcp_fin", "SF": "tcp_fin", "S": "tcp_syn", "SA": "tcp_syn", "A": "tcp_ack",
         "PA": "tcp_ack", "RA": "tcp_ack", "R": "others", "": "others"}
NO_TEXTS = (b"GET", b"GET ", b"get /", b"HEAD ", b"POST", b"HTTP/1.0 200 OK", b"HTTP/1.", b" GET /", b"")


def tcp(n: int) -> Iterator[tuple[Packet, Counted]]:
    ports = {"sport": 1024 + n, "dport": 80}
    for text, kind in TEXTS.items():
        for flags in ("PA", "FA", "S"):  # the class of the payload has precedence over the flags
            yield padded(l2() / ip() / TCP(**ports, flags=flags) / Raw(text)), ("TCP", kind, 0)
    for text in NO_TEXTS:
        yield padded(l2() / ip() / TCP(**ports, flags="A") / Raw(text)), ("TCP", "tcp_ack", 0)
    for flags, kind in FLAGS.items():
        yield padded(l2() / ip() / TCP(**ports, flags=flags)), ("TCP", kind, 0)
    long = ip(options=[Raw(b"\x01" * 8)]) / TCP(**ports, flags="PA", options=OPTIONS)
    yield l2() / long / Raw(b"HEAD /"), ("TCP", "http_head", 0)
    yield l2() / Dot1Q() / long / Raw(b"POST /"), ("TCP", "http_post", 0)
    for part in fragment(ip(id=n) / TCP(**ports, flags="S") / Raw(b"GET /" + bytes(2000)), fragsize=800):
        yield l2() / part, ("TCP", "others", 0)


def icmp(n: int) -> Iterator[tuple[Packet, Counted]]:
    echo = ICMP(id=n, seq=n)
    yield padded(l2() / ip() / echo / Raw(b"ping")), ("ICMP", "answered", 0)
    yield l2() / ip(options=[Raw(b"\x01" * 8)]) / echo / Raw(bytes(1400)), ("ICMP", "answered", 0)
    yield padded(l2() / ip() / ICMP(type=0, id=n)), ("ICMP", "others", 0)
    yield padded(l2() / ip() / ICMP(type=8, code=1, id=n)), ("ICMP", "others", 0)
    yield padded(l2() / ip() / ICMP(type=3, code=1) / Raw(bytes(28))), ("ICMP", "others", 0)
    yield padded(l2() / ip() / ICMP(id=n, chksum=0x1234) / Raw(b"ping")), ("ICMP", "refused", 0)
    yield padded(l2() / ip(chksum=0x1234) / echo), ("ICMP", "refused", 0)
    yield padded(l2() / ip(dst="192.0.2.3") / echo), ("ICMP", "refused", 0)
    yield padded(l2("02:00:00:00:00:03") / ip() / echo), ("ICMP", "refused", 0)
    yield padded(l2("ff:ff:ff:ff:ff:ff") / ip(dst="255.255.255.255") / echo), ("ICMP", "refused", 0)
    yield padded(l2() / ip(src="224.0.0.1") / echo), ("ICMP", "refused", 0)
    yield padded(l2() / ip(proto=1) / Raw(b"\x08\0\xf7\xff")), ("ICMP", "refused", 0)  # has no identifier
    parts = fragment(ip(id=n) / echo / Raw(bytes(2000)), fragsize=800)
    for part in parts:  # the last one to arrive is answered
        yield l2() / part, ("ICMP", "answered" if part is parts[-1] else "others", 0)


def others(n: int) -> Iterator[tuple[Packet, Counted]]:
    """What the application leaves to the port."""
    yield l2("ff:ff:ff:ff:ff:ff") / ARP(psrc="192.0.2.2", pdst=ADDRESS, hwsrc="02:00:00:00:00:02"), NOTHING
    yield l2() / IPv6() / UDP(dport=53) / Raw(bytes(20)), NOTHING
    yield padded(l2() / ip(proto=47) / Raw(bytes(20))), NOTHING
    yield Ether(bytes(l2())[:12] + b"\x88\xb5" + bytes(50)), NOTHING


def mixed(flows: int) -> list[tuple[Packet, Counted]]:
    found = [one for n in range(flows) for kind in (udp, tcp, icmp, others) for one in kind(n)]
    random.Random(1).shuffle(found)
    return found
