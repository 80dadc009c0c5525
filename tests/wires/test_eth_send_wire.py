"""Packets of SQs on a wire between two software NICs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.utils import rdpcap

from eth_receive_rig import Buffer, Cq, Rq, lead, remove_rules
from eth_send_rig import CHECKSUMS, Sq, eth, pointer
from ethernet_rig import Maker, nic_of
from gpunetio import Faults, PortConfig, verbs
from nic_rig import until

ADDRESSES = "192.168.77.1", "192.168.77.2"
COUNT, ROOM = 1024, 2048


class Ends:
    """An SQ of one NIC, and an RQ of the other that gets all frames."""

    def __init__(self, a: verbs.Context, b: verbs.Context):
        make, there = Maker(a), Maker(b)
        self.nics = nic_of(a), nic_of(b)
        self.sq, self.out = Sq(make, Cq(make, log=10), log=10), Buffer(make, 2 * ROOM * COUNT)
        self.inbox, self.arrived = Buffer(there, COUNT * ROOM), Cq(there, log=10)
        self.rq = Rq(there, self.arrived, log=10)
        for n in range(COUNT):
            self.rq.post(self.inbox.at(n * ROOM, ROOM))
        lead(b, there.direct(there.domain().number, self.rq.made.number).number)

    def frame(self, n: int, nbytes: int = 1400) -> bytes:
        macs = {"src": self.nics[0].mac.hex(":"), "dst": self.nics[1].mac.hex(":")}
        return bytes(Ether(**macs) / IP(id=n) / UDP() / bytes(nbytes - 42))

    def write(self, n: int, frame: bytes, flags: int = 0) -> None:
        self.out.memory.view("u1", n * ROOM, len(frame))[:] = list(frame)
        self.sq.write(eth(flags=flags), pointer(*self.out.at(n * ROOM, len(frame))), ask=8 if n % 64 == 63 else 0)

    def frames(self, count: int) -> list[bytes]:
        cqes: list[Any] = []
        until(lambda: cqes.extend(self.arrived.take()) or len(cqes) >= count, f"{count} frames")
        return [self.inbox.bytes(i * ROOM, int(cqe["byte_cnt"])) for i, cqe in enumerate(cqes)]


@contextlib.contextmanager
def ends(tmp_path: Path, **port: Any) -> Iterator[Ends]:
    wire = f"unix:{tmp_path / 'wire'}"
    with contextlib.ExitStack() as undo:
        a, b = (
            undo.enter_context(
                verbs.open(f"soft{n}", port=PortConfig(addresses=ADDRESSES[n], wire=wire, **(port if n == 0 else {})))
            )
            for n in range(2)
        )
        undo.callback(remove_rules, b)
        yield Ends(a, b)


def test_back_pressure(tmp_path):
    """The wire is full for a while: the SQ waits, and nothing is lost or overtaken."""
    with ends(tmp_path) as pair:
        sent = [pair.frame(n) for n in range(COUNT)]
        pair.nics[1].pause()
        for n, frame in enumerate(sent):
            pair.write(n, frame)
        pair.sq.ring()
        until(lambda: pair.nics[0].counters["tx_frames"] > 100, "some frames")
        assert pair.nics[0].counters["tx_frames"] < COUNT
        pair.nics[1].resume()
        assert pair.frames(COUNT) == sent
        assert len(pair.sq.done(COUNT // 64)) == COUNT // 64


def test_captures_of_both_ends(tmp_path):
    """They contain the frame as it was on the wire, with its checksums."""
    with ends(tmp_path, capture=tmp_path / "a.pcap") as pair:
        frame = pair.frame(1, nbytes=100)
        pair.write(0, frame[:24] + b"\xff\xff" + frame[26:], flags=CHECKSUMS)
        pair.sq.ring()
        assert pair.frames(1) == [frame]
    assert [bytes(packet) for packet in rdpcap(str(tmp_path / "a.pcap")) if packet.haslayer(UDP)] == [frame]


def test_damage_on_the_way(tmp_path):
    """The fault injector flips one bit of a frame."""
    with ends(tmp_path, faults=Faults(corruption=1.0, seed=3)) as pair:
        pair.write(0, frame := pair.frame(1, nbytes=200))
        pair.sq.ring()
        (found,) = pair.frames(1)
        assert (int.from_bytes(found, "big") ^ int.from_bytes(frame, "big")).bit_count() == 1


@pytest.mark.parametrize("wire", ["udp", "replay"])
def test_wires_without_ethernet(wire):
    """Neither an SQ nor anything else of Ethernet can be made there."""
    with verbs.open("soft0", port=PortConfig(wire=wire)) as ctx, pytest.raises(Exception, match="carries no Ethernet"):
        Maker(ctx).domain()


def test_the_lan():
    """Two NICs of a process: what one floods first, it then sends to the other alone."""
    with verbs.open("soft0") as a, verbs.open("soft1") as b:
        pair = Ends(a, b)
        sent = [pair.frame(n, nbytes=100 + n) for n in range(200)]
        for n, frame in enumerate(sent):
            pair.write(n, frame)
        pair.sq.ring()
        assert pair.frames(200) == sent
        remove_rules(b)
