"""Packets as others see them: tshark and scapy on our captures, and on what the kernel saw."""

import contextlib
import fcntl
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gpunetio.fabric.pcap
from gpunetio import Faults, LinkLayer, PortConfig, verbs
from gpunetio.cli import app
from gpunetio.enums import QpType
from gpunetio.errors import InUseError, OperatingSystemError
from gpunetio.fabric.capture import capture
from gpunetio.fabric.pcap import Pcap, capture_file, infiniband_icrc
from gpunetio.memory import HostMemory
from gpunetio.verbs import PD
from nic_rig import (
    CS,
    FA,
    READ,
    REMOTE_ACCESS,
    REMOTE_INVALID,
    REMOTE_OP,
    REQ,
    SEND,
    SEND_IMM,
    SIZE,
    WRITE,
    WRITE_IMM,
    Buffer,
    Queue,
    atomic,
    connect,
    raddr,
    until,
)
from pcap_rig import Operation, Packet, check_roce, dissect, icrc_fits, need_tshark, records
from udp_rig import Namespace, own_address

PSN = 0xFF_FFF8  # soon around the end of 24 bits
MTUS = (256, 512, 1024, 2048, 4096)
# Nothing is sent twice because a test machine is slow. Over UDP, a receiver captures the hop limit 64 whatever it was.
PATIENT = {"ack_timeout": 19, "retry_cnt": 7, "rnr_retry": 7, "hop_limit": 64}
IPV4, IPV6 = ("10.97.0.1", "10.97.0.2"), ("fd00:97::1", "fd00:97::2")  # of nobody: frames of pipes need no route


@pytest.fixture(autouse=True)
def _tools():
    need_tshark()


def two_queues(pds: list[PD], **kind: Any) -> tuple[Queue, Queue]:
    """A queue on each NIC, told apart in a capture by its number: each NIC draws its own, and they can be the same."""
    a, b = (Queue(pd, **kind) for pd in pds)
    while b.qp.qpn == a.qp.qpn:
        b = Queue(pds[1], **kind)
    return a, b


@dataclass
class Captured:
    """Two NICs that write what they send and take, a QP on each, and what was posted to the first."""

    paths: tuple[Path, Path]
    contexts: list[verbs.Context]
    mtu: int
    uc: bool = False
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self):
        kind = {"qp_type": QpType.UC} if self.uc else {}
        pds = [ctx.create_pd() for ctx in self.contexts]
        self.a, self.b = two_queues(pds, **kind)
        self.here, self.there = Buffer(pds[0], 2 * SIZE, fill=1), Buffer(pds[1], 2 * SIZE)
        connect(self.a, self.b, psn=PSN, **PATIENT)
        assert int(self.a.row["mtu"]) == self.mtu

    def post(self, opcode: int, nbytes: int = 8, **words: int) -> None:
        """One operation, and wait for it."""
        b, there = self.b, self.there
        imm = 0xC0DE_0000 + len(self.operations)
        # A SEND's packets have no address. The memory is host-ordered, the wire is not: numbers are the same.
        old = there.word()
        if opcode in (SEND, SEND_IMM, WRITE_IMM):
            b.receive(there.at())
        segments = [self.here.at(0, nbytes)]
        if nbytes == 0:
            segments = []
        if opcode in (CS, FA):
            segments.insert(0, atomic(words["swap"], words.get("compare", 0)))
        if opcode not in (SEND, SEND_IMM):
            segments.insert(0, there.remote())
        with_imm = opcode in (SEND_IMM, WRITE_IMM)
        self.a.post(opcode, *segments, imm=imm if with_imm else 0)
        assert self.a.done.next().opcode == REQ
        if opcode in (SEND, SEND_IMM, WRITE_IMM):
            assert self.b.arrived.next().byte_cnt == nbytes
        elif self.uc:
            until(lambda: self.there.bytes[:nbytes].tobytes() == self.here.bytes[:nbytes].tobytes(), "a WRITE")
        self.operations.append(Operation(opcode, nbytes, there.address, there.key, imm, old=old, **words))

    def close(self) -> None:
        for ctx in self.contexts:
            ctx.close()

    def packets(self) -> tuple[list[Packet], list[Packet]]:
        """After `close`: what went to b, and to a, as a's NIC saw it. b's must have seen the same frames."""
        ours, theirs = (dissect(path) for path in self.paths)
        to = {int(queue.qp.qpn): [p.raw for p in theirs if p.qpn == queue.qp.qpn] for queue in (self.a, self.b)}
        found = []
        for queue in (self.b, self.a):
            found.append([p for p in ours if p.qpn == queue.qp.qpn])
            assert [frame_of(p.raw) for p in found[-1]] == [frame_of(raw) for raw in to[queue.qp.qpn]]
        assert len(ours) == sum(map(len, found))
        assert [float(p.time) for p in ours] == sorted(float(p.time) for p in ours)
        assert abs(time.time() - float(ours[-1].time)) < 600
        return found[0], found[1]

    def check(self) -> list[Packet]:
        """Compare all packets with what was posted; gives them back."""
        requests, answers = self.packets()
        expected, responses, psn = [], [], PSN
        for msn, operation in enumerate(self.operations):
            expected += operation.requests(self.mtu, psn, self.uc)
            if not self.uc:
                responses += operation.responses(self.mtu, psn, msn + 1)
            psn = psn + operation.packets(self.mtu) & 0xFF_FFFF
        assert len(requests) == len(expected)
        for packet, wanted in zip(requests, expected, strict=True):
            packet.has(**wanted)
        for packet in requests:  # who has to be answered says so
            if not self.uc and packet.opcode not in (0x00, 0x01, 0x06, 0x07):
                packet.has(ack=1)
        acks = [p for p in answers if p.opcode == 0x11]  # a long message may have been acknowledged on its way, too
        between = [p for p in acks if p.psn not in [r["psn"] for r in responses if r["opcode"] == 0x11]]
        for packet in between:
            packet.has(syndrome=0x1F)
        rest = [p for p in answers if all(p is not other for other in between)]
        assert len(rest) == len(responses)
        for packet, wanted in zip(rest, responses, strict=True):
            packet.has(**wanted)
        return requests + answers


def frame_of(raw: bytes) -> bytes:
    """A frame without what is the capturer's own: an ERF record's time."""
    return raw[8:] if raw[8] == 21 and raw[9] & ~0x10 == 4 else raw


def open_two(tmp_path: Path, mtu: int, addresses: tuple[str, str] | None, uc: bool = False, **config) -> Captured:
    paths = tmp_path / "a.pcap", tmp_path / "b.pcap"
    with contextlib.ExitStack() as undo:
        contexts = []
        for i, path in enumerate(paths):
            own = (addresses[i],) if addresses else ()
            port = PortConfig(addresses=own, mtu=mtu + 80, capture=str(path), **config)
            contexts.append(verbs.open(f"soft{i}", port=port))
            undo.callback(contexts[-1].close)
        opened = Captured(paths, contexts, mtu, uc)
        undo.pop_all()
        return opened


def all_operations(two: Captured) -> None:
    mtu = two.mtu
    for nbytes in (0, 1, 2, 3, 4, 100, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 5):
        nbytes = min(nbytes, 2 * SIZE)
        for opcode in (WRITE, SEND, SEND_IMM, WRITE_IMM, READ):
            if not (two.uc and opcode == READ):
                two.post(opcode, nbytes)
    if not two.uc:
        two.post(FA, swap=0x0123_4567_89AB_CDEF)
        two.post(CS, swap=0xFEED, compare=two.there.word())
        two.post(CS, swap=1, compare=2)
    two.close()


# Each starts tshark: those between the smallest and the largest MTU are in the slow suite.
WIRES = [
    pytest.param(IPV4, mtu, id=f"ipv4-{mtu}", marks=() if mtu == MTUS[0] else pytest.mark.slow)
    for mtu in MTUS
] + [pytest.param(IPV6, 1024, id="ipv6-1024")]


@pytest.mark.parametrize("uc", [False, True], ids=["RC", "UC"])
@pytest.mark.parametrize("addresses, mtu", WIRES)
def test_all_operations_in_process(tmp_path, addresses, mtu, uc):
    two = open_two(tmp_path, mtu, addresses, uc)
    all_operations(two)
    packets = two.check()
    version = 4 if addresses is IPV4 else 6
    check_roce(packets, version)
    for packet in packets:
        ends = addresses if packet.qpn == two.b.qp.qpn else addresses[::-1]
        if version == 4:
            packet.has(id=0, src=ends[0], dst=ends[1])
        else:
            packet.has(src6=ends[0], dst6=ends[1])
        assert mac_of(ends[0]) == packet.eth_src
        assert mac_of(ends[1]) == packet.eth_dst


def mac_of(address: str) -> str:
    return (b"\x02\x00" + ip_address(address).packed[-4:]).hex(":")


@pytest.mark.parametrize("mtu", [256, 4096])
def test_all_operations_over_udp(tmp_path, mtu):
    two = open_two(tmp_path, mtu, (own_address(), own_address()), wire="udp")
    all_operations(two)
    check_roce(two.check(), 4)


# --- refusals and retries ------------------------------------------------------------------------------------------


def syndromes(packets: list[Packet]) -> list[int]:
    return [packet.syndrome for packet in packets if packet.opcode == 0x11]


@pytest.mark.parametrize(
    ("what", "nak", "error"),
    [("rkey", 0x62, REMOTE_ACCESS), ("too long", 0x61, REMOTE_INVALID), ("lkey", 0x63, REMOTE_OP)],
)
def test_refusals(tmp_path, what, nak, error):
    """IBTA table 49: remote access error 0x62, invalid request 0x61, remote operational error 0x63."""
    two = open_two(tmp_path, 1024, IPV4)
    if what == "rkey":
        two.a.post(WRITE, raddr(two.there.address, two.there.key ^ 0xFF00), two.here.at(0, 100))
    else:
        two.b.receive(two.there.at(0, 50) if what == "too long" else struct.pack(">IIQ", 200, 0xBAD00, 0))
        two.a.post(SEND, two.here.at(0, 100))
    assert two.a.done.next().syndrome == error
    two.close()
    requests, answers = two.packets()
    (nack,) = answers
    nack.has(opcode=0x11, psn=PSN, syndrome=nak, msn=0)
    check_roce(requests + answers, 4)


def test_receiver_not_ready(tmp_path):
    """RNR NAK with the timer code that was asked for (IBTA table 45), then the same packet again, then the ACK."""
    two = open_two(tmp_path, 1024, IPV4)
    two.a.reset()
    two.b.reset()
    connect(two.a, two.b, psn=PSN, **{**PATIENT, "min_rnr_timer": 14})
    two.a.post(SEND, two.here.at(0, 100))
    until(lambda: two.b.nic.counters["out_of_buffer"], "the RNR NAK")
    two.b.receive(two.there.at())
    assert two.a.done.next().opcode == REQ
    two.close()
    requests, answers = two.packets()
    assert len(requests) == len(answers) >= 2
    for packet in requests:
        packet.has(opcode=0x04, psn=PSN, imm=None)
        assert packet.raw == requests[0].raw
    *naks, ack = answers
    for packet in naks:
        packet.has(opcode=0x11, psn=PSN, syndrome=0x20 | 14, msn=0)
    ack.has(opcode=0x11, psn=PSN, syndrome=0x1F, msn=1)
    check_roce(requests + answers, 4)


def test_losses(tmp_path):
    """What is sent again after a NAK "PSN sequence error" is what was sent before; what arrives damaged looks so."""
    faults = Faults(loss=0.05, corruption=0.05, seed=5)
    two = open_two(tmp_path, 256, IPV4, faults=faults)
    two.a.reset()
    two.b.reset()
    connect(two.a, two.b, psn=PSN, **{**PATIENT, "ack_timeout": 14})
    for _ in range(8):
        two.a.post(WRITE, two.there.remote(), two.here.at(0, 4096))
        assert two.a.done.next().opcode == REQ
    damaged = int(two.b.nic.counters["rx_icrc_encapsulated"])
    two.close()
    assert damaged > 0
    sent = [p for p in dissect(two.paths[0]) if p.qpn == two.b.qp.qpn]
    check_roce(sent, 4)
    payloads = {}
    for packet in sent:
        assert payloads.setdefault((packet.psn, packet.opcode), packet.raw[54:-4])[12:] == packet.raw[66:-4]
    assert len(sent) > len(payloads) == 8 * 4096 // 256
    answers = [p for p in dissect(two.paths[0]) if p.qpn == two.a.qp.qpn]
    assert 0x60 in syndromes(answers)
    assert [icrc_fits(raw) for raw in records(two.paths[1])].count(False) == damaged


# --- InfiniBand ----------------------------------------------------------------------------------------------------


def vcrc(data: bytes) -> int:
    """IBTA 7.8.2, by long division: x^16 + x^12 + x^3 + x + 1, from ones, bits in the order of the wire."""
    bits = [byte >> i & 1 for byte in data for i in range(8)] + [0] * 16
    for i in range(16):
        bits[i] ^= 1
    for i in range(len(bits) - 16):
        if bits[i]:
            for power in (16, 12, 3, 1, 0):
                bits[i + 16 - power] ^= 1
    return sum((bit ^ 1) << i for i, bit in enumerate(bits[-16:]))


@pytest.mark.parametrize("mtu", [256, 4096])
def test_all_operations_over_infiniband(tmp_path, mtu):
    two = open_two(tmp_path, mtu, None, link_layer=LinkLayer.INFINIBAND)
    all_operations(two)
    packets = two.check()
    for i, packet in enumerate(packets):
        lids = (1, 2) if packet.qpn == two.b.qp.qpn else (2, 1)
        record = packet.raw
        body = record[16:]
        packet.has(
            vl=0, lver=0, lnh=2, sl=0, slid=lids[0], dlid=lids[1], words=(len(body) - 2) // 4, pkey=0xFFFF,
            icrc=int.from_bytes(body[-6:-2], "big"), vcrc=int.from_bytes(body[-2:], "big"), ipver=None,
        )
        assert infiniband_icrc(body[:-6]) == int.from_bytes(body[-6:-2], "little")
        if i % 20 == 0:
            assert vcrc(body[:-2]) == int.from_bytes(body[-2:], "little")


# The sample packets of IBTA 7.8.3: the local one.
SAMPLE = bytes.fromhex(
    "7012375c000e17d2 0a202487 0087b1b3 000dec2a 01710a1c015d4002 38f27a05 0000000e"
    "bb884d85fd5cfba4728bc0690ed40000"
)


def test_icrc_of_the_specification():
    assert infiniband_icrc(SAMPLE).to_bytes(4, "little") == bytes.fromhex("9625b75a")


def test_icrc_of_a_global_packet_is_that_of_its_roce_v1_frame():
    """With a GRH the whole LRH counts as ones (IBTA 7.8.1), so that annex A16 needs none."""
    grh = bytes.fromhex("6abcdef1 0030 1b 07") + bytes(range(32))
    masked = bytes.fromhex("6fffffff 0030 1b ff") + bytes(range(32))
    rest = SAMPLE[8:]
    whole = b"\xff" * 8 + masked + rest[:4] + b"\xff" + rest[5:]
    for lrh in (b"\x70\x13" + SAMPLE[2:8], b"\x00\xf3\x00\x01\x00\x1a\x00\x02"):
        assert infiniband_icrc(lrh + grh + rest) == zlib.crc32(whole)


# --- what the kernel saw -------------------------------------------------------------------------------------------


class Sniffer:
    """Everything that passes an interface, into a pcap file: AF_PACKET, as tcpdump would."""

    ETH_P_ALL, PACKET_OUTGOING, PACKET_IGNORE_OUTGOING = 3, 4, 23

    def __init__(self, interface: str):
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(self.ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self._socket.setsockopt(263, self.PACKET_IGNORE_OUTGOING, 1)  # SOL_PACKET: on lo each packet passes twice
        self._socket.bind((interface, 0))
        self._socket.setblocking(False)

    def write(self, path: Path) -> None:
        """What has passed so far."""
        frames = []
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = self._socket.recv(1 << 17)
                if len(frame) > 42 and b"\x12\xb7" in frame[34:58]:
                    frames.append(frame)
        header = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 1 << 18, 1)
        path.write_bytes(header + b"".join(struct.pack("<IIII", 0, 0, len(f), len(f)) + f for f in frames))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    try:
        opened = (Namespace(), Namespace())
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    opened[0].connect(opened[1])
    yield opened
    for namespace in opened:
        namespace.close()


def lay_addresses(here: Namespace, there: Namespace, version: int) -> tuple[str, str]:
    mine, yours = ("10.9.0.1", "10.9.0.2") if version == 4 else ("fd00::1", "fd00::2")
    for namespace, interface, address in ((here, "here", mine), (there, "there", yours)):
        namespace.ip(f"address add {address}/{'24' if version == 4 else '64 nodad'} dev {interface}".replace(
            "64 nodad dev " + interface, f"64 dev {interface} nodad"))
    return mine, yours


@pytest.mark.root
@pytest.mark.parametrize("version", [4, 6])
def test_what_an_interface_sees(tmp_path, namespaces, version):
    """Both NICs' UDP wires over a veth that takes no batches: every frame has the ICRC of the id that the kernel gave.

    The veth computes UDP's checksums, too, so that these are checked.
    """
    here, there = namespaces
    for namespace, interface in ((here, "here"), (there, "there")):
        namespace.ip(f"link set {interface} gso_max_segs 1")
        namespace.run(checksums_off, interface)
    ends = lay_addresses(here, there, version)
    sniffer = there.run(Sniffer, "there")
    paths = tmp_path / "a.pcap", tmp_path / "b.pcap"
    contexts = []
    for i, namespace in enumerate((here, there)):
        port = PortConfig(addresses=(ends[i],), wire="udp", capture=str(paths[i]))
        contexts.append(namespace.run(verbs.open, f"soft{i}", port=port))
    pds = [ctx.create_pd() for ctx in contexts]
    a, b = two_queues(pds)
    local, remote = Buffer(pds[0], 4 * SIZE, fill=1), Buffer(pds[1], 4 * SIZE)
    points = a.qp.endpoint(psn=PSN), b.qp.endpoint(psn=PSN)
    here.run(a.qp.connect, points[1], psn=PSN, **PATIENT)
    there.run(b.qp.connect, points[0], psn=PSN, **PATIENT)
    a.post(WRITE, remote.remote(), local.at())
    a.post(FA, remote.remote(), atomic(1), local.at(0, 8))
    b.receive(remote.at())
    a.post(SEND, local.at(0, 1001))
    assert [cqe.opcode for cqe in a.done.take(3)] == [REQ] * 3
    for ctx in contexts:
        ctx.close()
    seen = tmp_path / "seen.pcap"
    there.run(sniffer.write, seen)
    there.run(sniffer.close)
    arrived = [p for p in dissect(seen) if p.qpn == b.qp.qpn]
    assert len(arrived) == 4 * SIZE // 1024 + 2
    check_roce(arrived, version)
    if version == 4:
        assert max(p.id for p in arrived) > 8  # batches
    # Ours and the kernel's differ in the id, what depends on it, and the MACs.
    own = [p for p in dissect(paths[0]) if p.qpn == b.qp.qpn]
    start = 42 if version == 4 else 62
    assert [p.raw[start:-4] for p in own] == [p.raw[start:-4] for p in arrived]
    check_roce(own, version)


def checksums_off(interface: str) -> None:
    """Have the kernel put checksums into packets rather than leave that to a veth, which does not (ethtool -K)."""
    siocethtool, set_tx_checksums = 0x8946, 0x17
    value = np.array([set_tx_checksums, 0], np.uint32)
    request = struct.pack("16sP8x", interface.encode(), value.ctypes.data)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, siocethtool, request)


# --- the file ------------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    before = threading.enumerate(), len(os.listdir("/proc/self/fd"))
    for folder, why in (("no", "No such file or directory"), ("file", "Not a directory")):
        path = tmp_path / folder / "x.pcap"
        with pytest.raises(OperatingSystemError, match=f"cannot write the capture file {path}: {why}"):
            verbs.open("soft5", port=PortConfig(capture=str(path)))
    assert (threading.enumerate(), len(os.listdir("/proc/self/fd"))) == before
    with verbs.open("soft5"):  # nothing of it is left
        pass


def test_a_folder_gets_a_file_for_each_time_that_a_nic_is_opened(tmp_path):
    for name in (f"soft5-{os.getpid()}.pcap", f"soft5-{os.getpid()}-2.pcap"):
        file = capture_file(tmp_path, "soft5")
        assert file == tmp_path / name
        file.touch()


def test_a_nic_without_packets_leaves_no_file_in_a_folder(tmp_path):
    port = PortConfig(capture=tmp_path)
    with verbs.open("soft5", port=port), verbs.open("soft5", port=port):  # the same NIC
        assert [path.name for path in tmp_path.iterdir()] == [f"soft5-{os.getpid()}.pcap"]
    assert [*tmp_path.iterdir()] == []


def test_two_captures_do_not_share_a_file(tmp_path):
    path = tmp_path / "x.pcap"
    port = PortConfig(capture=path)
    with verbs.open("soft5", port=port), pytest.raises(InUseError, match=f"{path} is being written already"):
        verbs.open("soft6", port=port)
    with verbs.open("soft6", port=PortConfig(capture=path)):
        pass
    assert records(path) == []


def test_the_file_grows_while_the_nic_runs(tmp_path):
    """What was sent is there soon, without anything being closed; an old file is replaced."""
    (tmp_path / "a.pcap").write_bytes(bytes(100_000))
    two = open_two(tmp_path, 1024, IPV4)
    two.post(WRITE, 100)
    until(lambda: two.paths[0].stat().st_size == 24 + 2 * 16 + 42 + 12 + 16 + 100 + 4 + 62, "two packets in the file")
    two.close()
    assert [p.opcode for p in dissect(two.paths[0])] == [0x0A, 0x11]


def test_packets_of_a_queue_pair_that_is_gone_keep_their_path(tmp_path, monkeypatch):
    """Between the GIDs that it used, also when the file is written after it was destroyed."""
    monkeypatch.setattr(gpunetio.fabric.pcap, "_PERIOD", 60)
    two = open_two(tmp_path, 1024, None)
    queues = two_queues([queue.qp.pd for queue in (two.a, two.b)])
    ends = [queue.qp.endpoint(sgid_index=1) for queue in queues]
    for queue, end in zip(queues, reversed(ends), strict=True):
        queue.qp.connect(end, sgid_index=1, **PATIENT)
    queues[0].post(WRITE, two.there.remote(), two.here.at(0, 100))
    assert queues[0].done.next().opcode == REQ
    gids = [ctx.query_gid(index=1) for ctx in two.contexts]
    two.close()
    for path in two.paths:
        request, response = dissect(path)
        request.has(opcode=0x0A)
        assert [request.raw[22:38], request.raw[38:54]] == gids
        response.has(opcode=0x11)
        assert [response.raw[22:38], response.raw[38:54]] == gids[::-1]


def test_what_finds_no_room_is_counted_and_told(tmp_path, caplog):
    path = tmp_path / "x.pcap"
    pcap = Pcap(path, infiniband=False, room=1 << 13)
    packet = HostMemory(4096)
    gid = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
    high, low = (int(word) for word in np.frombuffer(gid, np.int64))
    for _ in range(10):
        capture(pcap.address, packet.address, 1000, high, low, 0, 0, 0, 1)
    pcap.start("soft9", [gid], lambda gid: bytes(6))
    until(lambda: pcap.written == 7, "the writer")
    assert pcap.lost == 3
    with caplog.at_level(logging.WARNING):
        pcap.close()
    packet.close()
    (message,) = (record.message for record in caplog.records)
    assert message == (
        f"soft9: 3 packets are missing in the capture file {path}, which has 7: they came faster than it could be "
        "written"
    )
    assert len(dissect(path)) == 7


def test_a_file_that_ends_early_is_told(tmp_path, caplog):
    """A reader that goes away, as of `--pcap FIFO`: the NIC works on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.ExitStack() as undo:
        contexts = [
            undo.enter_context(verbs.open(f"soft{i}", port=PortConfig((address,), capture=fifo if i == 0 else None)))
            for i, address in enumerate(IPV4)
        ]
        os.close(reader)
        pds = [ctx.create_pd() for ctx in contexts]
        a, b = (Queue(pd) for pd in pds)
        here, there = Buffer(pds[0], 100, fill=1), Buffer(pds[1], 100)
        connect(a, b)
        for _ in range(3):
            a.post(WRITE, there.remote(), here.at())
            assert a.done.next().opcode == REQ
            time.sleep(0.02)
    told = [record.message for record in caplog.records if "capture" in record.message]
    assert told == [f"soft0: the capture file {fifo} ends here: Broken pipe"]


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    pytest.param((), marks=pytest.mark.slow, id="shared memory"),
    pytest.param(("--wire", "udp"), marks=pytest.mark.slow, id="udp"),
    pytest.param(("--link-layer", "infiniband"), marks=pytest.mark.slow, id="infiniband"),
])
def test_pingpong_of_two_processes(tmp_path, options):
    """--pcap and --link-layer: each end has its file, with every SEND and ACK of both."""
    pid = os.getpid()
    port = 20000 + pid % 10000
    addresses = [f"127.{64 + pid % 128}.{pid >> 7 & 127}.{11 + i}" for i in range(2)]
    server = "127.0.0.1" if "infiniband" in options else addresses[0]
    paths = [tmp_path / f"{i}.pcap" for i in range(2)]
    ends = []
    try:
        for i, (address, path) in enumerate(zip(addresses, paths, strict=True)):
            ends.append(subprocess.Popen(
                [sys.executable, "-m", "gpunetio", "pingpong", *([server] if i else []), "-d", f"soft{i}",
                 "--address", address, "--pcap", path, "-n", "3", "-s", "100", "-p", str(port), *options],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            ))
            if i == 0:
                until(lambda: is_listening(port) or ends[0].poll() is not None, "the server", 60)
        for end in ends:
            output, errors = end.communicate(timeout=60)
            assert end.returncode == 0, output + errors
    finally:
        for end in ends:
            end.kill()
            end.wait()
            for pipe in (end.stdout, end.stderr):
                assert pipe is not None
                pipe.close()
    for path in paths:
        packets = dissect(path)
        sends = [p.opcode for p in packets].count(0x04)
        assert sends >= 6
        assert {p.opcode for p in packets} == {0x04, 0x11}
        assert {p.lnh for p in packets} == ({2} if "infiniband" in options else {None})
        if "infiniband" not in options:
            check_roce(packets, 4)


def is_listening(port: int) -> bool:
    """Whether somebody listens on a TCP port; calling would be taken for the client."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(local.endswith(f":{port:04X}") and state == "0A" for _, local, _, state, *_ in lines)


def test_nothing_to_capture_with_loopback():
    result = CliRunner().invoke(app, ["put_bw", "--loopback", "--pcap", "x.pcap"])
    assert result.exit_code == 2
    assert "--loopback, which sends no packets, and --pcap exclude each other" in result.stderr
