"""What the kernel leaves to hardware, on TAP devices and packet sockets: scapy says how the packets must be.

Frames with a VIRTIO_NET are made here as the kernel makes them for its own traffic: a packet socket with
PACKET_VNET_HDR hands them to the kernel, which passes them on as they are.
"""

import contextlib
import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.utils import rdpcap

from eth_receive_rig import remove_rules
from eth_send_rig import CHECKSUMS, Port, error_of, eth, headers, opcode_of, pointer, recover, segments
from gpunetio import PortConfig, verbs
from gpunetio.fabric.ethernet_records import SOL_PACKET
from gpunetio.formats.cqe import CqeOpcode, Syndrome
from gpunetio.formats.wqe import WqeOpcode
from gpunetio.nic.engine import compile_engine
from gpunetio.nic.observe.reasons import Reason
from lan import ETH_P_ALL, cabled
from udp_rig import Namespace

pytestmark = pytest.mark.root

PACKET_VNET_HDR = 15  # linux/if_packet.h
VIRTIO = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset (linux/virtio_net.h)
NEEDS_CSUM, TCPV4, TCPV6, ECN = 1, 1, 4, 0x80
SIOCETHTOOL, ETHTOOL_STXCSUM, ETHTOOL_STSO = 0x8946, 0x17, 0x1E  # linux/ethtool.h
UDP_SEGMENT = 103  # linux/udp.h
SO_RCVBUFFORCE = 33  # asm-generic/socket.h
V4, V6 = IP(src="192.0.2.1", dst="192.0.2.2", id=0xFFFE), IPv6(src="2001:db8::1", dst="2001:db8::2")
L2 = Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06")
WIRES = {"tap": ("tap:t0", "t0"), "packet": ("packet:here", "there")}


class End(Port):
    """A NIC that gets every frame of its wire, and the kernel's end of that."""

    def __init__(self, ctx: verbs.Context, where: Namespace, interface: str):
        super().__init__(ctx, receives=256)
        self.where, self.interface = where, interface
        self.sock = where.run(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)
        self.sock.settimeout(10)
        where.run(self.sock.bind, (interface, ETH_P_ALL))

    def frames(self, count: int) -> list[bytes]:
        """The next frames from the wire. Their receives are posted again."""
        found = super().frames(count)
        for n in range(self.rq.posted, self.rq.posted + count):
            self.rq.post(self.inbox.at(n % self.receives * self.room, self.room))
        return found

    def hand(self, frame: bytes, *header: int) -> None:
        """Have the kernel send a frame with this VIRTIO_NET."""
        self.sock.send(VIRTIO.pack(*header) + frame)

    def hear(self, count: int) -> list[tuple[tuple[int, ...], bytes]]:
        """The next frames to L2's destination that the kernel gets, each with its VIRTIO_NET."""
        found = []
        while len(found) < count:
            data = self.sock.recv(1 << 17)
            if data[VIRTIO.size :].startswith(bytes(L2)[:6]):
                found.append((VIRTIO.unpack_from(data), data[VIRTIO.size :]))
        return found

    def switch_off(self, *features: int) -> None:
        """Have the kernel do in software what it leaves to the wire's interface, as `ethtool -K` does."""
        for feature in features:
            value = ctypes.create_string_buffer(struct.pack("II", feature, 0))
            request = struct.pack("16sQ8x", b"here", ctypes.addressof(value))
            with self.where.run(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
                fcntl.ioctl(sock, SIOCETHTOOL, request)


@contextlib.contextmanager
def opened(kind: str, name: str = "soft1", **port: Any) -> Iterator[End]:
    wire, interface = WIRES[kind]
    compile_engine()
    with contextlib.ExitStack() as undo:
        where = undo.enter_context(cabled())
        where.run(_no_ipv6)
        config = PortConfig(wire=wire, addresses="10.9.0.1", mtu=1500, **port)
        ctx = undo.enter_context(where.run(verbs.open, name, port=config))
        undo.callback(remove_rules, ctx)
        end = End(ctx, where, interface)
        undo.callback(end.sock.close)
        yield end


def _no_ipv6() -> None:
    """The kernel sends nothing by itself."""
    for name in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")


@pytest.fixture(scope="module", params=WIRES)
def end(request) -> Iterator[End]:
    with opened(request.param, "soft0") as end:
        yield end


# --- from the kernel -------------------------------------------------------------------------------------------------


def pattern(nbytes: int) -> bytes:
    return bytes(i * 7 & 0xFF for i in range(nbytes))


@pytest.mark.parametrize("l3", [V4, V6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("tagged", [False, True], ids=["", "tagged"])
@pytest.mark.parametrize(("nbytes", "mss"), [(1001, 1000), (65000, 1400), (3000, 8)])
def test_segments_of_tcp(end, l3, tagged, nbytes, mss):
    if nbytes // mss > end.receives:
        nbytes = end.receives * mss
    l2 = L2 / Dot1Q(vlan=5) if tagged else L2
    tcp = TCP(sport=1, dport=2, seq=0xFFFF_FF00, flags="FPAC", options=[("Timestamp", (1, 2)), ("NOP", None)])
    payload = pattern(nbytes)
    frame = bytes(l2 / l3 / tcp / payload)
    start = len(l2) + len(l3)
    kind = (TCPV4 if l3 is V4 else TCPV6) | ECN
    end.hand(frame, NEEDS_CSUM, kind, start + 32, mss, start, 16)
    expected = segments(l2, l3, tcp, payload, mss)
    assert end.frames(len(expected)) == expected


def test_partial_checksums_and_order(end):
    """What is complete, what is not, and what has to be cut, arrives in the order in which it was sent."""
    expected = []
    for n in range(20):
        udp = bytes(L2 / V4 / UDP(sport=n, dport=5) / pattern(100 + n))
        spoiled = bytearray(udp)
        spoiled[40:42] = pseudo(udp)
        end.hand(bytes(spoiled), NEEDS_CSUM, 0, 0, 0, 34, 6)
        tcp = TCP(sport=n, dport=7, flags="A")
        end.hand(bytes(L2 / V4 / tcp / pattern(2500)), NEEDS_CSUM, TCPV4, 54, 1000, 34, 16)
        other = bytes(L2 / V6 / UDP(sport=n) / b"as it is")
        end.hand(other, 0, 0, 0, 0, 0, 0)
        expected += [udp, *segments(L2, V4, tcp, pattern(2500), 1000), other]
    assert end.frames(len(expected)) == expected


def pseudo(frame: bytes) -> bytes:
    """The sum over the pseudo header of UDP over IPv4 in a frame."""
    words = frame[26:34] + b"\0\x11" + frame[38:40]
    total = sum(int.from_bytes(words[i : i + 2], "big") for i in range(0, len(words), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total.to_bytes(2, "big")


def test_a_checksum_of_zero(end):
    """UDP has ones instead, because a zero says that there is none (RFC 768)."""
    udp = L2 / V4 / UDP(sport=1, dport=2)
    frame = bytes(udp / bytes(2))
    frame = bytes(udp / frame[40:42])  # with its checksum, the sum is all ones
    assert frame[40:42] == b"\xff\xff"
    end.hand(frame[:40] + pseudo(frame) + frame[42:], NEEDS_CSUM, 0, 0, 0, 34, 6)
    assert end.frames(1) == [frame]


def test_the_kernels_own_sockets(end):
    """A UDP socket of the machine, also with segments of its own (UDP_SEGMENT)."""
    end.where.ip(f"address add 10.9.0.2/24 dev {end.interface}")
    end.where.ip(f"neighbour add 10.9.0.1 lladdr {end.mac} dev {end.interface}")
    with end.where.run(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(pattern(1000), ("10.9.0.1", 7))
        sock.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 500)
        sock.sendto(pattern(2300), ("10.9.0.1", 7))
    frames = end.frames(6)
    for frame in frames:
        packet = Ether(frame)
        again = packet.copy()
        del again[IP].chksum, again[UDP].chksum, again[IP].len, again[UDP].len
        assert bytes(again) == frame
    payloads = [bytes(Ether(frame)[UDP].payload) for frame in frames]
    assert payloads[0] == pattern(1000)
    assert payloads[1:] == [pattern(2300)[at : at + 500] for at in range(0, 2300, 500)]


# --- to the kernel ---------------------------------------------------------------------------------------------------


def post_tso(end: End, l3: Any, tcp: Any, nbytes: int, mss: int) -> bytes:
    """Send a TSO. Return its payload."""
    part = pattern(50_000)
    end.put(0, part)
    parts = [min(len(part), nbytes - at) for at in range(0, nbytes, len(part))]
    data = [pointer(*end.out.at(0, length)) for length in parts]
    end.sq.post(eth(headers(L2, l3, tcp), CHECKSUMS, mss=mss), *data, opcode=WqeOpcode.TSO)
    assert opcode_of(end.sq.done()[0]) == CqeOpcode.REQ
    return b"".join(part[:length] for length in parts)


@pytest.mark.parametrize("l3", [V4, V6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("flags", ["PA", "PAC"])
def test_a_tso_leaves_as_one_frame(end, l3, flags):
    tcp = TCP(sport=1, dport=2, seq=77, flags=flags)
    before = end.nic.counters["tx_frames"], end.nic.counters["tx_frame_bytes"]
    payload = post_tso(end, l3, tcp, 5001, 1000)
    head = len(L2 / l3 / tcp)
    assert end.nic.counters["tx_frames"] - before[0] == 6, "packets on the wire"
    assert end.nic.counters["tx_frame_bytes"] - before[1] == 6 * head + 5001
    ((header, frame),) = end.hear(1)
    kind = (TCPV4 if l3 is V4 else TCPV6) | (ECN if "C" in flags else 0)
    assert (header[:2], header[3:]) == ((NEEDS_CSUM, kind), (1000, head - 20, 16))
    expected = bytes(L2 / l3 / tcp / payload)
    at = head - 4
    assert (frame[:at], frame[at + 2 :]) == (expected[:at], expected[at + 2 :])


@pytest.mark.parametrize("l3", [V4, V6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("nbytes", [999, 1001, 60_000, 200_000])
def test_the_kernel_cuts_a_tso(l3, nbytes):
    """It makes the same segments of what it gets as scapy does."""
    with opened("packet") as end:
        end.switch_off(ETHTOOL_STSO, ETHTOOL_STXCSUM)
        tcp = TCP(sport=1, dport=2, seq=77, flags="FPAC")
        expected = segments(L2, l3, tcp, post_tso(end, l3, tcp, nbytes, 1000), 1000)
        assert [frame for _, frame in end.hear(len(expected))] == expected


def test_a_capture_has_segments(tmp_path):
    """It shows what is on the wire, so the NIC cuts by itself."""
    with opened("tap", capture=tmp_path / "a.pcap") as end:
        tcp = TCP(sport=1, dport=2, seq=77, flags="A")
        expected = segments(L2, V4, tcp, post_tso(end, V4, tcp, 5001, 1000), 1000)
        assert [frame for _, frame in end.hear(6)] == expected
    captured = [bytes(packet) for packet in rdpcap(str(tmp_path / "a.pcap"))]
    assert [frame for frame in captured if frame.startswith(bytes(L2)[:6])] == expected


def test_a_tso_beyond_the_mtu_is_refused(end):
    """The packets on the wire count, not the frame that the kernel gets."""
    end.sq.post(eth(headers(L2, V4, TCP()), mss=1461), end.put(0, bytes(3000)), opcode=WqeOpcode.TSO)
    assert error_of(end.sq.done()[0]) == (Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)
    recover(end)
