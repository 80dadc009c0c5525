"""Packets with headers in the WQE from kernels through a software NIC: scapy builds the same."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether

from eth_kernels import send_headers
from eth_receive_rig import lead, remove_rules
from eth_send_rig import headers, segments
from ethernet_rig import nic_of
from gpunetio import Gpu, MemType, PortConfig, device, eth, verbs
from gpunetio.eth import QueueError

SOON = 10.0
V4, V6 = IP(src="192.0.2.1", dst="192.0.2.2", id=0xFFFE), IPv6(src="2001:db8::1", dst="2001:db8::2")
PUSHED = TCP(sport=1, dport=2, seq=0xFFFF_FF00, flags="FPA", options=[("Timestamp", (1, 2))])
pytestmark = pytest.mark.soft_nic


class Station:
    """A NIC that sends to itself: kernels post, and the CPU sees what arrives."""

    def __init__(self, gpu: Gpu, undo: ExitStack, **send: object):
        self.gpu = gpu
        self.ctx = undo.enter_context(verbs.open("soft0", port=PortConfig(mtu=1500)))
        pd = self.ctx.create_pd()
        self.rxq = eth.ManagedRxq(pd, 512, 1600)
        undo.callback(remove_rules, self.ctx)
        self.txq = eth.EthTxq(gpu, pd, 64, **send)  # type: ignore[arg-type]
        self.payload = undo.enter_context(gpu.alloc(1 << 18, MemType.CPU_GPU))
        self.payload.array[:] = [n * 7 & 0xFF for n in range(1 << 18)]
        self.region = pd.register(self.payload)
        self.head = undo.enter_context(gpu.alloc(4096, MemType.CPU_GPU))
        self.out = undo.enter_context(gpu.alloc(4096, MemType.CPU_GPU))
        lead(self.ctx, self.rxq.tirn)
        self.l2 = Ether(src="02:00:00:00:00:05", dst=nic_of(self.ctx).mac.hex(":"))

    def send(self, head: bytes, nbytes: int, mss: int, count: int = 1, header_bytes: int | None = None) -> list[int]:
        """Send the first `nbytes` of the payload behind headers. With `count`, what comes then differs. Tickets."""
        self.head.array[: len(head)] = list(head)
        launch = send_headers[1, 1, self.gpu](
            self.txq, count, self.head, len(head) if header_bytes is None else header_bytes, self.region.address,
            self.region.lkey, nbytes, mss, 1, device.EXCLUSIVE, self.out,
        )
        assert launch.wait(60)
        return self.out.array.view("<i8")[:count].tolist()

    def frames(self, count: int) -> list[bytes]:
        found = []
        for packet in self.rxq.receive(least=count, most=count + 1, timeout=SOON):
            with packet:
                found.append(packet.data.tobytes())
        return found


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("l3", [V4, V6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("tagged", [False, True])
def test_segments_arrive(gpu, undo, l3, tagged):
    """Each with lengths, sequence number, checksums and flags of its own, which wrap where they must."""
    station = Station(gpu, undo)
    l2 = station.l2 / Dot1Q(vlan=5) if tagged else station.l2
    for nbytes in (1, 1400, 1401, 5000, 100_000):
        expected = segments(l2, l3, PUSHED, station.payload.array[:nbytes].tobytes(), 1400)
        assert station.send(headers(l2, l3, PUSHED), nbytes, 1400)[0] >= 0
        assert station.frames(len(expected)) == expected


def test_the_largest_payload(gpu, undo):
    station = Station(gpu, undo)
    most = station.txq.caps.max_lso
    assert most == 1 << 18
    expected = segments(station.l2, V4, PUSHED, station.payload.array.tobytes(), 1448)
    assert station.send(headers(station.l2, V4, PUSHED), most, 1448) == [0]
    assert station.frames(len(expected)) == expected


@pytest.mark.parametrize("nbytes", [0, 1, 500])
def test_one_packet(gpu, undo, nbytes):
    """Its checksums are the NIC's, also if all of it is headers."""
    station = Station(gpu, undo, checksum=True)
    packet = station.l2 / V4 / UDP(sport=7, dport=9) / station.payload.array[:nbytes].tobytes()
    wrong = packet.copy()
    wrong[IP].chksum = wrong[UDP].chksum = 0x1234
    wrong[IP].len, wrong[UDP].len = 28 + nbytes, 8 + nbytes
    assert station.send(bytes(wrong)[:42], nbytes, 0) == [0]
    assert station.frames(1) == [bytes(packet)]


def test_packets_around_the_ring(gpu, undo):
    """WQEs of one to four blocks, which go on at the beginning of the ring, on what older ones have left there."""
    station = Station(gpu, undo)
    head = (bytes(station.l2) + bytes(range(200)))[:208]
    end = 0
    for n in range(60):
        header_bytes, nbytes = 14 + 67 * n % 195, 100 * (n % 3)
        assert station.send(head, nbytes, 0, header_bytes=header_bytes) == [end]
        assert station.frames(1) == [head[:header_bytes] + station.payload.array[:nbytes].tobytes()]
        end = station.txq.indices()["reserved"]
    assert end > 2 * station.txq.depth


@pytest.mark.parametrize(("l4", "more", "mss", "words"), [
    (UDP(), b"", 1000, "TCP"), (TCP(), b"x", 1000, "TCP"), (TCP(), b"", 1461, "1514"),
])
def test_what_the_nic_refuses(gpu, undo, l4, more, mss, words):
    """No TCP, more than headers, or beyond the MTU: the queue says why, and starts again."""
    station = Station(gpu, undo)
    station.send(headers(station.l2, V4, l4) + more, 3000, mss)
    assert station.send(headers(station.l2, V4, PUSHED), 100, 0, 40)[-1] == device.EIO
    error = station.txq.last_error()
    assert isinstance(error, QueueError)
    assert words in str(error)
    station.txq.reset()
    assert station.send(headers(station.l2, V4, PUSHED), 3000, 1448) == [0]
    assert len(station.frames(3)) == 3
