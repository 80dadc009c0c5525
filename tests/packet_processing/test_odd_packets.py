"""What the receive kernels make of one frame, against plain Python: frames of all kinds, damaged and cut off anywhere.

A frame ends where its page does, so a kernel that reads beyond its end dies.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from gpunetio import Gpu, MemType, device, kernel
from gpunetio.packet_processing import receive_tcp, receive_udp
from gpunetio.packet_processing.counts import ICMP_COUNTS, TCP_COUNTS
from gpunetio.packet_processing.receive_icmp import answer
from guarded import Guarded
from packet_processing_rig import ADDRESS, MAC, PEER, PEER_MAC, ip, l2

OWN_MAC = int(MAC.replace(":", ""), 16)
OWN_ADDRESS = int.from_bytes(bytes(map(int, ADDRESS.split("."))), "big")


@kernel
def classify(frame, nbytes, mac, address, out):
    is_dns, counted = receive_udp.class_of(frame, nbytes)
    device.st64(out, is_dns)
    device.st64(out + 8, counted)
    device.st64(out + 16, receive_tcp.class_of(frame, nbytes))
    device.st64(out + 24, answer(frame, nbytes, mac, address))


class Classifier:
    """The kernels' functions, which see one frame after another."""

    def __init__(self, gpu: Gpu):
        self.gpu, self.memory, self.out = gpu, Guarded(), gpu.alloc(32, MemType.CPU_GPU)

    def __call__(self, frame: bytes) -> tuple[int, int, str, str, bytes]:
        """Whether it is DNS, the bytes it counts, its class of TCP and of ICMP, and what has become of it."""
        at = self.memory.put(frame)
        assert classify[1, 1, self.gpu](at, len(frame), OWN_MAC, OWN_ADDRESS, self.out).wait(60)
        dns, counted, tcp, icmp = self.out.array.view(np.int64).tolist()
        return dns, counted, name_of(TCP_COUNTS, tcp), name_of(ICMP_COUNTS, icmp), self.memory.bytes_at(at, len(frame))


def name_of(counts, offset: int) -> str:
    return next(name for name, at in counts.offsets.items() if at == offset)


@pytest.fixture(scope="module")
def seen() -> Iterator[Classifier]:
    with Gpu("host") as gpu:
        yield Classifier(gpu)


# --- plain Python ----------------------------------------------------------------------------------------------------


def packet_of(frame: bytes) -> tuple[int, bytes, bytes] | None:
    """Protocol, header and rest of a whole IPv4 packet."""
    at = 12
    while at < 20 and len(frame) >= at + 6 and frame[at : at + 2] in (b"\x81\x00", b"\x88\xa8"):
        at += 4
    packet = frame[at + 2 :]
    if frame[at : at + 2] != b"\x08\x00" or len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    header, total = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
    if header < 20 or not header <= total <= len(packet) or int.from_bytes(packet[6:8], "big") & 0x3FFF:
        return None
    return packet[9], packet[:header], packet[header:total]


def ones(data: bytes) -> int:
    """The ones' complement sum; 0 if the checksum in it is right."""
    data += bytes(len(data) & 1)
    return sum(int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)) % 0xFFFF


def udp_class(frame: bytes) -> tuple[int, int]:
    found = packet_of(frame)
    if found is None or found[0] != 17:
        return 0, len(frame)
    _, header, rest = found
    return int(len(rest) >= 8 and rest[2:4] == b"\0\x35"), 14 + len(header) + len(rest)


def tcp_class(frame: bytes) -> str:
    found = packet_of(frame)
    if found is None or found[0] != 6 or len(found[2]) < 20:
        return "others"
    rest = found[2]
    header = (rest[12] >> 4) * 4
    if not 20 <= header <= len(rest):
        return "others"
    texts = {b"GET /": "http_get", b"HEAD /": "http_head", b"POST /": "http_post", b"HTTP/1.1": "http"}
    flags = {0x01: "tcp_fin", 0x02: "tcp_syn", 0x10: "tcp_ack"}
    kinds = [kind for text, kind in texts.items() if rest[header:].startswith(text)]
    return [*kinds, *(kind for flag, kind in flags.items() if rest[13] & flag), "others"][0]


def icmp_class(frame: bytes) -> str:
    found = packet_of(frame)
    if found is None or found[0] != 1 or len(found[2]) < 8:
        return "refused"
    _, header, message = found
    mine = frame[:6].hex(":") == MAC and header[16:20] == bytes(map(int, ADDRESS.split(".")))
    station = not frame[6] & 1 and any(frame[6:12]) and 0 < header[12] < 224
    if not mine or not station or ones(header) or ones(message):
        return "refused"
    return "answered" if message[:2] == b"\x08\0" else "others"


# --- frames ----------------------------------------------------------------------------------------------------------

PAYLOADS = st.sampled_from([b"", b"GET /", b"GET /x", b"HEAD /", b"POST /", b"HTTP/1.1 200", b"HTTP/1.", b"GET"])
PORTS = st.sampled_from([53, 80, 5353])
FLAGS = st.integers(0, 0x1FF)
TYPES, CODES = st.sampled_from([8, 8, 0, 3]), st.sampled_from([0, 1])


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame of UDP, TCP or ICMP. Some have tags or options; some are damaged, and some are cut off."""
    head: Packet = l2(draw(st.sampled_from([MAC, MAC, MAC, "02:00:00:00:00:09"])))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 3]))):
        head /= Dot1Q(vlan=1)
    fields = draw(st.sampled_from([{}, {}, {}, {"options": [Raw(b"\x01" * 40)]}, {"dst": "192.0.2.9"}, {"flags": "MF"},
                                   {"frag": 7}, {"flags": "DF"}, {"len": 1000}, {"len": 3}, {"ihl": 15}]))
    rest = draw(st.one_of(
        st.builds(lambda port: UDP(dport=port), PORTS),
        st.builds(lambda port, flags: TCP(dport=port, flags=flags), PORTS, FLAGS),
        st.builds(lambda kind, code: ICMP(type=kind, code=code), TYPES, CODES),
    ))
    data = bytearray(bytes(head / ip(**fields) / rest / Raw(draw(PAYLOADS))))
    if draw(st.booleans()):
        data += bytes(draw(st.integers(0, 30)))  # padding
    if draw(st.integers(0, 3)) == 0:
        for at, value in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=3)):
            data[at] = value
    if draw(st.integers(0, 3)) == 0:
        del data[draw(st.integers(14, len(data))) :]
    return bytes(data)


@given(frame=frames())
def test_kernels_see_what_python_sees(seen, frame):
    dns, counted, tcp, icmp, left = seen(frame)
    assert (dns, counted) == udp_class(frame)
    assert tcp == tcp_class(frame)
    assert icmp == icmp_class(frame)
    if icmp != "answered":
        assert left == frame


@pytest.mark.parametrize("nbytes", [0, 1, 2, 55, 56, 1471, 1472])
@pytest.mark.parametrize("numbers", [(0, 0), (0xFFFF, 0xFFFF), (7, 8)])
@pytest.mark.parametrize("options", [[], [Raw(b"\x01" * 8)]], ids=["plain", "options"])
def test_answers_are_right(seen, nbytes, numbers, options):
    """As scapy would make them, with all of their bytes."""
    message = Raw(bytes(nbytes)) if numbers == (0, 0) else Raw(bytes(i * 7 & 0xFF for i in range(nbytes)))
    asked = l2() / ip(options=options, ttl=3, id=99) / ICMP(id=numbers[0], seq=numbers[1]) / message
    *_, kind, found = seen(bytes(asked))
    wanted = (
        Ether(src=MAC, dst=PEER_MAC) / IP(src=ADDRESS, dst=PEER, ttl=128, id=99, options=options)
        / ICMP(type=0, id=numbers[0], seq=numbers[1]) / message
    )
    assert kind == "answered"
    assert found == bytes(wanted)


def test_padding_is_left_alone(seen):
    asked = bytes(l2() / ip() / ICMP() / Raw(b"x"))
    *_, kind, found = seen(asked + b"\xaa" * 17)
    assert kind == "answered"
    assert found[-17:] == b"\xaa" * 17
