"""Packets of capture files in a software NIC: the reader of files, the wire, and the command."""

import json
import struct
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Raw
from scapy.utils import rdpcap

from gpunetio import Gpu, LinkLayer, PortConfig, eth, verbs
from gpunetio.bench import replay as command
from gpunetio.bench.replay import ReplayOptions
from gpunetio.cli import app
from gpunetio.enums import QpType, WrOpcode
from gpunetio.errors import InvalidValueError, NotFoundError, OperatingSystemError, TimedOutError
from gpunetio.fabric.pcap_reader import CUT_SHORT, NOT_ROCE, Packet, PcapFile
from gpunetio.flow import FlowPort, match
from gpunetio.nic.wires import replay as wire
from gpunetio.nic.wires.pcap import replay_frames
from gpunetio.nic.wires.replay import replay
from gpunetio.verbs import QpEndpoint, RecvWr, SendWr, Sge
from json_schema import mistakes, schema
from nic_rig import until
from pcap_rig import records
from transport_rig import SEND_ONLY, UC, WRITE_FIRST, WRITE_LAST, WRITE_ONLY
from transport_rig import Packet as Made

SIZE = 10_000
LONG = 5_000  # bytes: two packets of 4 KiB
OWN, PEER = "10.97.1.1", "10.97.1.2"  # of nobody: the file is the network


# --- files -----------------------------------------------------------------------------------------------------------


def pcap(*frames: bytes, link: int = 1, magic: int = 0xA1B23C4D, order: str = "<", whole: int | None = None) -> bytes:
    """A file with one frame each 3.5 µs, from 7 s on."""
    data = [struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, 1 << 16, link)]
    unit = 1 if magic == 0xA1B23C4D else 1000
    for i, frame in enumerate(frames):
        data += struct.pack(f"{order}IIII", 7, 3500 * i // unit, len(frame), whole or len(frame)), frame
    return b"".join(data)


def roce(layers: Any, bth: bytes = Made(SEND_ONLY, 5, 0x99, payload=b"ping").build()) -> bytes:
    """A frame as scapy makes it, with the ICRC that scapy computes."""
    frame = bytes(layers / UDP(sport=0xC123, dport=4791) / Raw(bth + bytes(4)))
    return frame[:-4] + Ether(frame)[BTH].compute_icrc(b"")


def read(path: Path, data: bytes) -> tuple[list[Packet], PcapFile]:
    path.write_bytes(data)
    with PcapFile(path) as file:
        return list(file), file


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("magic, step", [(0xA1B23C4D, 3500), (0xA1B2C3D4, 3000)], ids=["ns", "us"])
def test_time_stamps(tmp_path, magic, step, order):
    frame = roce(Ether() / IP(src=PEER, dst=OWN))
    packets, file = read(tmp_path / "file", pcap(frame, frame, magic=magic, order=order))
    assert [packet.time_ns for packet in packets] == [7_000_000_000, 7_000_000_000 + step]
    assert (file.records, file.infiniband) == (2, False)


@pytest.mark.parametrize(
    "below, ends",
    [
        (Ether() / IP(src=PEER, dst=OWN, ttl=9, tos=0x61, id=77), (PEER, OWN)),
        (Ether() / Dot1Q(vlan=5) / IP(src=PEER, dst=OWN), (PEER, OWN)),
        (Ether() / IPv6(src="fd00::2", dst="fd00::1", hlim=3, tc=0x44, fl=7), ("fd00::2", "fd00::1")),
    ],
    ids=["ipv4", "vlan", "ipv6"],
)
def test_packets_of_other_authors(tmp_path, below, ends):
    packet = Made(SEND_ONLY, 5, 0x99, payload=b"ping").build()
    (found,), _ = read(tmp_path / "file", pcap(roce(below, packet)))
    assert (found.source, found.destination) == tuple(map(ip_address, ends))
    assert found.data == packet
    assert found.icrc is None
    source = ip_address(ends[0]).packed
    assert found.gid == (bytes(10) + b"\xff\xff" + source if len(source) == 4 else source)


def test_a_damaged_packet_keeps_its_icrc(tmp_path):
    frame = bytearray(roce(Ether() / IP(src=PEER, dst=OWN)))
    frame[-5] ^= 1
    (found,), _ = read(tmp_path / "file", pcap(bytes(frame)))
    assert found.icrc == bytes(frame[-4:])


def test_what_is_no_packet_is_counted(tmp_path):
    good = roce(Ether() / IP(src=PEER, dst=OWN))
    others = [
        bytes(Ether() / ARP()),
        bytes(Ether() / IP(src=PEER, dst=OWN) / UDP(dport=53) / Raw(bytes(40))),
        bytes(Ether() / IP(src=PEER, dst=OWN, frag=3) / UDP(dport=4791) / Raw(bytes(40))),
        bytes(Ether() / IP(src=PEER, dst=OWN) / UDP(dport=4791) / Raw(bytes(15))),
        b"short",
    ]
    packets, file = read(tmp_path / "file", pcap(good, *others, good[:-1]))
    assert len(packets) == 1
    assert (file.records, file.skipped) == (7, {NOT_ROCE: 5, CUT_SHORT: 1})
    packets, file = read(tmp_path / "file", pcap(good, whole=1000))
    assert (packets, file.skipped) == ([], {CUT_SHORT: 1})


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "it begins with nothing"),
        (b"\x7fELF" + bytes(60), "it begins with 7f 45 4c 46"),
        (pcap()[:20], "is no pcap file"),
        (pcap(link=147), "has packets of link type 147: it must be one of 1 (Ethernet), 197 (ERF)"),
        (pcap(b"x") + b"123", "ends in the middle of the record at byte 41"),
        (pcap(b"xyz")[:-1], "ends in the middle of the record at byte 24"),
        (pcap() + struct.pack("<IIII", 0, 0, 1 << 30, 1 << 30), "a record announces 1073741824 bytes"),
    ],
)
def test_bad_files(tmp_path, data, message):
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path / "file", data)
    assert message in str(caught.value)


def test_what_is_no_file(tmp_path):
    with pytest.raises(OperatingSystemError, match=r"cannot read the capture file .*nowhere: No such file"):
        PcapFile(tmp_path / "nowhere")
    with pytest.raises(InvalidValueError, match="/dev/null is no regular file"):
        PcapFile("/dev/null")


# --- the wire --------------------------------------------------------------------------------------------------------


class Lab:
    """A NIC with the wire, and queue pairs of which the packets know."""

    def __init__(self, service: QpType = QpType.RC):
        self.ctx = verbs.open("soft6", port=PortConfig((OWN,), "replay"))
        self.nic = self.ctx.provider.nic  # type: ignore[attr-defined]
        pd, cq = self.ctx.create_pd(), self.ctx.create_cq(8)
        self.memory = bytearray(SIZE)
        self.mr = pd.register(self.memory)
        self.qp = pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq, qp_type=service)
        self.qp.connect(QpEndpoint(0x77, self.gid(PEER), 0, 1024, psn=100))

    @staticmethod
    def gid(address: str) -> bytes:
        return bytes(10) + b"\xff\xff" + ip_address(address).packed

    def packet(self, made: Made, at: int = 0, source: str = PEER, icrc: bytes | None = None) -> Packet:
        return Packet(at, ip_address(source), ip_address(OWN), self.gid(source), made.build(), 0, icrc)

    def write(self, psn: int, text: bytes, offset: int = 0, **fields: Any) -> Made:
        fields = {"qpn": self.qp.qpn, "ack": 1, "reth": (self.mr.address + offset, self.mr.rkey, len(text)), **fields}
        return Made(WRITE_ONLY, psn, payload=text, **fields)

    def close(self) -> None:
        self.ctx.close()


@pytest.fixture
def lab():
    made = Lab()
    yield made
    made.close()


def test_packets_are_executed_and_answered(lab):
    done = replay(lab.nic, [lab.packet(lab.write(100, b"hello")), lab.packet(lab.write(101, b"world", 5))], fast=True)
    assert lab.memory[:10] == b"helloworld"
    assert (done.packets, done.accepted, done.refused) == (2, 2, {})
    assert done.answered in (1, 2)  # one acknowledgement may stand for both


def test_packets_are_refused_as_from_any_wire(lab):
    """And counted by the reason."""
    packets = [
        lab.packet(lab.write(100, b"good")),
        lab.packet(lab.write(101, b"lost", qpn=lab.qp.qpn ^ 1)),
        lab.packet(lab.write(101, b"evil"), source="10.97.1.3"),
        lab.packet(lab.write(101, b"hurt"), icrc=b"\1\2\3\4"),
        lab.packet(lab.write(101, b"part", pkey=0x1234)),
        lab.packet(lab.write(100, b"again")),
    ]
    done = replay(lab.nic, packets, fast=True)
    assert (done.packets, done.accepted) == (6, 1)
    assert done.refused == {
        "rx_no_qp": 1, "rx_wrong_peer": 1, "rx_icrc_encapsulated": 1, "rx_wrong_pkey": 1, "duplicate_request": 1,
    }
    assert lab.memory[:4] == b"good"


def test_more_packets_than_the_pipe_holds(lab):
    """The pipe and what comes back are emptied meanwhile."""
    count = 3000
    text = bytes(1000)
    done = replay(lab.nic, (lab.packet(lab.write(100 + i, text)) for i in range(count)), fast=True)
    assert (done.packets, done.accepted) == (count, count)
    assert done.answered > 0


def test_time_stamps_are_kept(lab, monkeypatch):
    """By a clock that only sleeping moves."""
    now, put = [0.0], []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds
            time.sleep(0)

    original = wire.Replay.write
    monkeypatch.setattr(wire, "time", Clock)
    monkeypatch.setattr(wire.Replay, "write", lambda self, packet: put.append(now[0]) or original(self, packet))
    stamps = [5.0, 5.25, 5.2, 7.0]  # the third is late: it comes at once
    packets = [lab.packet(lab.write(100 + i, b"1234"), round(at * 1e9)) for i, at in enumerate(stamps)]
    assert replay(lab.nic, packets).accepted == 4
    assert put == pytest.approx([0.0, 0.25, 0.25, 2.0])
    put.clear()
    packets = [lab.packet(lab.write(104 + i, b"1234"), round(at * 1e9)) for i, at in enumerate(stamps)]
    start = now[0]
    assert replay(lab.nic, packets, fast=True).accepted == 4
    assert put == [start] * 4


def test_a_gap_longer_than_the_timeout(lab):
    packets = [lab.packet(lab.write(100, b"1234")), lab.packet(lab.write(101, b"1234"), 3600 * 10**9)]
    with pytest.raises(TimedOutError, match="packet 2 of the capture is due 3600 s after the first, but the timeout"):
        replay(lab.nic, packets, timeout=20)


def test_a_nic_that_takes_nothing(lab):
    lab.nic.pause()
    with pytest.raises(TimedOutError, match="soft6 has not taken packet 1 of the capture in time: it is paused"):
        replay(lab.nic, [lab.packet(lab.write(100, b"1234"))], timeout=0.05)
    lab.nic.resume()
    until(lambda: lab.memory[:4] == b"1234", "the packet to be taken")


def test_another_wire():
    with verbs.open("soft6") as ctx, pytest.raises(InvalidValueError, match="is 'auto': open"):
        replay(ctx.provider.nic, [])  # type: ignore[attr-defined]


def test_uc():
    lab = Lab(QpType.UC)
    try:
        first = Made(UC + WRITE_FIRST, 100, lab.qp.qpn, reth=(lab.mr.address, lab.mr.rkey, 1030), payload=b"a" * 1024)
        packets = [lab.packet(first), lab.packet(Made(UC + WRITE_LAST, 101, lab.qp.qpn, payload=b"b" * 6))]
        done = replay(lab.nic, packets, fast=True)
        assert (done.accepted, done.answered) == (2, 0)
        assert lab.memory[1020:1032] == b"aaaabbbbbb\0\0"
    finally:
        lab.close()


# --- the command -----------------------------------------------------------------------------------------------------


def captured(path: Path, addresses: tuple[str, str] | None = (OWN, PEER), **config: Any) -> None:
    """A file of what the second of two NICs takes and sends: six requests and their answers."""
    ports = [PortConfig(addresses[i : i + 1] if addresses else (), mtu=4200, **config) for i in range(2)]
    ports[1] = PortConfig(ports[1].addresses, mtu=4200, capture=path, **config)
    with verbs.open("soft6", port=ports[0]) as near, verbs.open("soft7", port=ports[1]) as far:
        ends = []
        for ctx in (near, far):
            pd, cq = ctx.create_pd(), ctx.create_cq(8)
            mr = pd.register(np.zeros(SIZE, np.uint8))
            ends.append((pd.create_qp(sq_wr=8, rq_wr=8, send_cq=cq, receive_cq=cq), cq, mr))
        (a, cq, here), (b, _, there) = ends
        a.connect(b)
        b.post_recv(RecvWr(sges=[Sge(there.address, SIZE, there.lkey)]))
        remote = {"remote_addr": there.address, "rkey": there.rkey}
        for opcode, nbytes, words in (
            (WrOpcode.RDMA_WRITE, LONG, remote), (WrOpcode.SEND, LONG, {}), (WrOpcode.RDMA_READ, LONG, remote),
            (WrOpcode.ATOMIC_FETCH_AND_ADD, 8, {**remote, "add": 1}),
        ):
            a.post_send(SendWr(opcode=opcode, sges=[Sge(here.address, nbytes, here.lkey)], **words))
            until(lambda: cq.poll(1), f"a {opcode.name}")


@pytest.mark.parametrize(
    "config, address",
    [
        ({}, PEER),
        ({"addresses": ("fd00:97::1", "fd00:97::2")}, "fd00:97::2"),
        ({"addresses": None, "link_layer": LinkLayer.INFINIBAND}, "LID 0x8"),
    ],
    ids=["ipv4", "ipv6", "infiniband"],
)
def test_a_capture_is_executed_again(tmp_path, config, address):
    """All operations, by a NIC whose numbers are others."""
    captured(tmp_path / "file", **config)
    options = ReplayOptions(tmp_path / "file", fast=True, device="soft6", capture=tmp_path / "again")
    result = command.run(options)
    done = result.replayed
    assert (command.shown(result.address), result.queues, result.skipped, result.reasons) == (address, 1, {}, [])
    assert (done.packets, done.accepted, done.refused) == (6, 6, {})
    assert done.packets + result.elsewhere == result.records
    assert done.counters["rx_write_requests"] == done.counters["rx_read_requests"] == 1
    assert done.counters["rx_atomic_requests"] == 1
    assert len(records(tmp_path / "again")) == done.packets + done.answered


def test_packets_to_the_other_end(tmp_path):
    """Answers to requests that this NIC has not sent."""
    captured(tmp_path / "file")
    result = command.run(ReplayOptions(tmp_path / "file", OWN, fast=True, device="soft6"))
    assert result.queues == result.replayed.accepted == 0
    assert result.replayed.refused == {"rx_no_qp": result.replayed.packets}


def test_requests_that_are_refused(tmp_path, monkeypatch):
    """The NIC says why: here the region is missing."""
    monkeypatch.setattr(command, "MAX_REGION", 100)
    captured(tmp_path / "file")
    result = command.run(ReplayOptions(tmp_path / "file", fast=True, device="soft6"))
    assert result.replayed.refused["rx_refused"] >= 1
    assert any("no memory region of the peer has rkey" in reason for reason in result.reasons)


def test_addresses_that_cannot_be(tmp_path):
    captured(tmp_path / "file")
    with pytest.raises(NotFoundError, match=f"has no packet to 10.0.0.9: its packets go to {PEER}, {OWN}"):
        command.run(ReplayOptions(tmp_path / "file", "10.0.0.9"))
    with pytest.raises(InvalidValueError, match="'0x2' is no IP address: the capture is of RoCE"):
        command.run(ReplayOptions(tmp_path / "file", "0x2"))
    (tmp_path / "other").write_bytes(pcap(bytes(Ether() / ARP())))
    with pytest.raises(NotFoundError, match="has no packet to replay: of 1 records, 1 are not RoCE v2"):
        command.run(ReplayOptions(tmp_path / "other"))


def test_the_command(tmp_path):
    captured(tmp_path / "file")
    run = CliRunner().invoke
    arguments = ["replay", str(tmp_path / "file"), "--fast", "-d", "soft6"]
    result = run(app, [*arguments, "--json"])
    document = json.loads(result.stdout)
    assert mistakes(document, schema("replay")) == []
    assert (document["address"], document["replayed"], document["accepted"]) == (PEER, 6, 6)
    lines = run(app, arguments).stdout.splitlines()
    assert f"replayed to {PEER}" in lines[2]
    assert [line.split() for line in lines[2:4]] == [["replayed", "to", PEER, "6"], ["accepted", "6"]]
    assert lines[-1].endswith(" s, 1 queue pairs")
    failed = run(app, ["replay", str(tmp_path / "nowhere")])
    assert failed.exit_code == 1
    assert "cannot read the capture file" in failed.stderr


def test_a_sender_that_is_its_receiver(tmp_path):
    """As captured on one card in loopback. scapy computes the ICRC."""
    packets = [Made(SEND_ONLY, 5 + n, 0x99, payload=b"ping").build() for n in range(3)]
    (tmp_path / "file").write_bytes(pcap(*(roce(Ether() / IP(src=OWN, dst=OWN), packet) for packet in packets)))
    result = command.run(ReplayOptions(tmp_path / "file", fast=True, device="soft6"))
    assert (command.shown(result.address), result.queues) == (OWN, 1)
    assert (result.replayed.accepted, result.replayed.refused) == (3, {})


# --- all frames, to Ethernet queues ----------------------------------------------------------------------------------


FRAMES = [
    bytes(Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06") / layers)
    for layers in (
        ARP(), IP(src=PEER, dst=OWN) / UDP(dport=53) / Raw(bytes(1000)), Dot1Q(vlan=7) / IPv6() / UDP(),
        Raw(b"whatever it is"), IP(src=PEER, dst=OWN) / UDP(dport=4791) / Raw(bytes(64)),
    )
]


def test_all_frames_reach_a_receive_queue(tmp_path):
    """As they are, in order and at their times, whatever they contain."""
    (tmp_path / "file").write_bytes(pcap(*FRAMES * 100))
    port = PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}")
    with verbs.open("soft6", port=port) as ctx, eth.ManagedRxq(ctx.create_pd(), 1024, 2048) as rxq:
        with FlowPort(ctx) as flows:
            flows.steer(match.everything(), to=rxq)
            start = time.monotonic()
            done = replay_frames(ctx.provider.nic)  # type: ignore[attr-defined]
            assert time.monotonic() - start >= 499 * 3.5e-6
            assert (done.packets, done.accepted, done.refused) == (500, 500, {})
        got = rxq.receive(500, least=500, timeout=10)
        assert [bytes(packet.data) for packet in got] == FRAMES * 100
        for packet in got:
            packet.release()


def test_frames_wait_for_room_in_a_queue(tmp_path):
    (tmp_path / "file").write_bytes(pcap(*FRAMES * 200))
    port = PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}")
    got = []
    with verbs.open("soft6", port=port) as ctx, eth.ManagedRxq(ctx.create_pd(), 4, 2048) as rxq, FlowPort(ctx) as flows:

        def receive() -> None:
            for packet in rxq.receive(3, timeout=0):
                got.append(bytes(packet.data))
                packet.release()

        flows.steer(match.everything(), to=rxq)
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        done = replay_frames(nic, fast=True, rqns=[rxq.rqn], meanwhile=receive)
        until(lambda: receive() or len(got) == 1000, "the last frames")
    assert (done.accepted, done.refused) == (1000, {})
    assert got == FRAMES * 200


@pytest.mark.parametrize("longest", [60, 2000, 9000])
def test_no_frame_comes_for_which_a_ring_has_no_room(tmp_path, longest):
    """The ring, whose frames take one place or several, fills up, and nobody empties it."""
    sizes = np.random.default_rng(longest).integers(60, longest + 1, 2000)
    (tmp_path / "file").write_bytes(pcap(*(FRAMES[1][:60].ljust(int(size), b".") for size in sizes)))
    port = PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}")
    with (
        verbs.open("soft6", port=port) as ctx, Gpu("host") as gpu,
        eth.CyclicRxq(gpu, ctx.create_pd(), 1024, 9216 if longest > 2000 else 2048) as rxq, FlowPort(ctx) as flows,
    ):
        flows.steer(match.everything(), to=rxq)
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        with pytest.raises(TimedOutError, match="soft6 has not taken frame"):
            replay_frames(nic, fast=True, timeout=2, rqns=[rxq.rqn])
        nic.engine.synchronize()
        assert nic.counters["rx_frames"] == nic.counters["rx_frame_delivered"] >= 256


def test_frames_that_no_queue_takes_are_counted(tmp_path):
    (tmp_path / "file").write_bytes(pcap(*FRAMES))
    with verbs.open("soft6", port=PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}")) as ctx:
        done = replay_frames(ctx.provider.nic, fast=True)  # type: ignore[attr-defined]
    assert (done.packets, done.accepted, done.refused) == (5, 0, {"rx_frame_other_mac": 5})


def test_frames_of_a_file_that_is_cut_off(tmp_path):
    """Those before the cut arrive."""
    (tmp_path / "file").write_bytes(pcap(*FRAMES)[:-1])
    with verbs.open("soft6", port=PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}")) as ctx:
        with pytest.raises(InvalidValueError, match="ends in the middle of the record at byte"):
            replay_frames(ctx.provider.nic, fast=True)  # type: ignore[attr-defined]
        until(lambda: ctx.provider.nic.counters["rx_frames"] == 4, "four frames")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data, error, text",
    [(b"nonsense", InvalidValueError, "is no pcap file"), (pcap(link=197), InvalidValueError, "has InfiniBand packets"),
     (None, OperatingSystemError, "cannot read the capture file")],
)
def test_files_that_no_wire_has(tmp_path, data, error, text):
    if data is not None:
        (tmp_path / "file").write_bytes(data)
    with pytest.raises(error, match=text):
        verbs.open("soft6", port=PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}"))


def test_frames_need_their_wire():
    wanted = r'open it with PortConfig.wire="pcap:FILE"'
    with verbs.open("soft6") as ctx, pytest.raises(InvalidValueError, match=wanted):
        replay_frames(ctx.provider.nic)  # type: ignore[attr-defined]


def test_a_nic_that_takes_no_frames(tmp_path):
    (tmp_path / "file").write_bytes(pcap(*FRAMES * 100))
    with verbs.open("soft6", port=PortConfig("10.97.1.1", f"pcap:{tmp_path / 'file'}")) as ctx:
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        nic.wire_to_others()
        nic.pause()
        with pytest.raises(TimedOutError, match="soft6 has not taken frame"):
            replay_frames(nic, fast=True, timeout=0.1)
        nic.resume()


def test_frames_of_any_length(tmp_path):
    """Also those that no link carries: 65535 bytes and more, as offloads make them, up to the longest record."""
    sizes = (9216, 9217, 65_534, 65_535, 65_600, 70_000, 1 << 18)
    (tmp_path / "file").write_bytes(pcap(*(FRAMES[1][:60].ljust(size, b".") for size in sizes)))
    result = command.run(ReplayOptions(tmp_path / "file", fast=True, device="soft6", frames=True))
    assert (result.replayed.accepted, result.replayed.refused) == (len(sizes), {})


def test_the_command_for_frames(tmp_path):
    (tmp_path / "file").write_bytes(pcap(*FRAMES * 20))
    arguments = ["replay", str(tmp_path / "file"), "--frames", "--fast", "-d", "soft6", "--pcap", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    document = json.loads(result.stdout)
    assert mistakes(document, schema("replay")) == []
    assert (document["records"], document["replayed"], document["accepted"], document["refused"]) == (100, 100, 100, {})
    assert [bytes(frame) for frame in rdpcap(str(tmp_path / "out"))] == FRAMES * 20
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert lines[-1].endswith(" s, a receive queue")
    refused = CliRunner().invoke(app, [*arguments, "--address", OWN])
    assert (refused.exit_code, "leave --address out" in refused.stderr) == (2, True)
