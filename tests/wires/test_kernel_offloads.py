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
from hypothesis import given, settings
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.utils import rdpcap

from eth_programs import V4, V6, Program, steps
from eth_receive_rig import remove_rules
from eth_send_rig import CHECKSUMS, Port, error_of, eth, headers, opcode_of, pointer, recover, segments
from gpunetio import PortConfig, verbs
from gpunetio.fabric.ethernet_records import SOL_PACKET
from gpunetio.fabric.ip_headers import internet_checksum
from gpunetio.formats.cqe import CqeOpcode, Syndrome
from gpunetio.formats.wqe import WqeOpcode
from gpunetio.nic.host.engine import compile_engine, compile_extensions
from gpunetio.nic.state.reasons import Reason
from lan import ETH_P_ALL, cabled
from udp_rig import Namespace

pytestmark = pytest.mark.root

PACKET_VNET_HDR = 15  # linux/if_packet.h
VIRTIO = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset (linux/virtio_net.h)
NEEDS_CSUM, TCPV4, TCPV6, UDP_L4, ECN = 1, 1, 4, 5, 0x80
SIOCETHTOOL, ETHTOOL_STXCSUM, ETHTOOL_STSO = 0x8946, 0x17, 0x1E  # linux/ethtool.h
UDP_SEGMENT = 103  # linux/udp.h
SO_RCVBUFFORCE = 33  # asm-generic/socket.h
PACKET_AUXDATA, AUXDATA, VLAN_VALID = 8, struct.Struct("=IIIHHHH"), 1 << 4  # linux/if_packet.h, its tpacket_auxdata
L2 = Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06")
WIRES = {"tap": ("tap:t0", "t0"), "packet": ("packet:here", "there")}


class End(Port):
    """A NIC that gets every frame of its wire, and the kernel's end of that."""

    def __init__(self, ctx: verbs.Context, where: Namespace, interface: str):
        super().__init__(ctx, receives=256, allow_multi_pkt_send_wqe=1)
        self.where, self.interface = where, interface
        self.sock = where.run(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.sock.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
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
        return [self.next() for _ in range(count)]

    def next(self) -> tuple[tuple[int, ...], bytes]:
        """The next one of them. The kernel has taken a VLAN tag out of it, and says what that was."""
        while True:
            data, ((_, _, auxiliary),), _, _ = self.sock.recvmsg(1 << 17, socket.CMSG_SPACE(AUXDATA.size))
            header, frame = VIRTIO.unpack_from(data), data[VIRTIO.size :]
            if frame.startswith(bytes(L2)[:6]):
                status, *_, tag, kind = AUXDATA.unpack(auxiliary)
                if status & VLAN_VALID:
                    frame = frame[:12] + struct.pack(">HH", kind, tag) + frame[12:]
                return header, frame

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
    compile_engine()  # which may take longer than `Namespace.run` waits
    compile_extensions()
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
@pytest.mark.parametrize(("nbytes", "mss"), [(1001, 1000), (65000, 1400), (3000, 48), (1024, 8)])
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


def counts(end: End) -> tuple[int, int]:
    return end.nic.counters["rx_frames"], end.nic.counters["rx_frame_malformed"]


@pytest.mark.parametrize(("l4", "kind", "too_small"), [(TCP, TCPV4, 47), (UDP, UDP_L4, 400)], ids=["tcp", "udp"])
def test_a_frame_does_not_become_thousands(end, l4, kind, too_small):
    """128 segments are always allowed. TCP may have more of 48 bytes: TCP_MIN_SND_MSS, UDP_MAX_SEGMENTS of Linux."""
    head, offset = (20, 16) if l4 is TCP else (8, 6)

    def hand(nbytes: int, mss: int) -> None:
        end.hand(bytes(L2 / V4 / l4(sport=1, dport=2) / pattern(nbytes)), NEEDS_CSUM, kind, 34 + head, mss, 34, offset)

    before = counts(end)
    try:
        hand(60_000, 1)
    except OSError as error:
        pytest.skip(f"this kernel makes no such frames: {error}")
    hand(129 * too_small, too_small)
    last = bytes(L2 / V4 / UDP(sport=9, dport=9) / b"whole")
    end.hand(last, 0, 0, 0, 0, 0, 0)
    assert end.frames(1) == [last]
    frames, malformed = counts(end)
    assert (frames - before[0], malformed - before[1]) == (3, 2)
    hand(128, 1)
    end.hand(last, 0, 0, 0, 0, 0, 0)
    assert end.frames(129)[-1] == last
    assert counts(end)[1] == malformed


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


def cut(header: tuple[int, ...], frame: bytes) -> list[bytes]:
    """What the kernel makes of a frame that it gets, as linux/virtio_net.h describes it."""
    flags, gso, _, mss, start, offset = header
    if not flags:
        return [frame]
    l3 = 18 if frame[12:14] == b"\x81\0" else 14
    l4 = start + l3 - 14  # the kernel counts without the tag
    kind, ip = (TCPV4, IP(frame[l3:l4])) if frame[l3] >> 4 == 4 else (TCPV6, IPv6(frame[l3:l4]))
    head = l4 + 4 * (frame[l4 + 12] >> 4)
    tcp, nbytes = TCP(frame[l4:head]), len(frame) - l4
    assert (flags, gso, offset) == (NEEDS_CSUM, kind | (ECN if "C" in str(tcp.flags) else 0), 16)
    if kind == TCPV4:
        assert (ip.len, internet_checksum(frame[l3:l4])) == (len(frame) - l3, 0xFFFF)
        addresses, ip.len, ip.chksum = frame[l3 + 12 : l4], None, None
    else:
        assert ip.plen == nbytes
        addresses, ip.plen = frame[l3 + 8 : l4], None
    assert tcp.chksum % 0xFFFF == 0xFFFF - internet_checksum(addresses + struct.pack(">II", 6, nbytes))
    tcp.chksum = None
    return segments(Ether(frame[:l3]), ip, tcp, frame[head:], mss)


@settings(max_examples=25)
@given(steps(most_payload=20_000))
def test_random_programs(end, steps):
    """What the kernel has to cut becomes what the NIC would have sent."""
    program = Program(end, L2)
    program.run(steps)
    wire = []
    while len(wire) < len(program.expected):
        wire += cut(*end.next())
    assert wire == program.expected


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
