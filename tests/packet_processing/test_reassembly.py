"""Pings in fragments: scapy cuts them and puts the answers together (RFC 791, RFC 1122 3.3.2)."""

import ctypes
import random

import numpy as np
import pytest
from scapy.compat import raw
from scapy.layers.inet import ICMP, IP, IPOption_NOP, defragment, fragment
from scapy.layers.l2 import Dot1Q, Ether

from gpunetio.packet_processing.reassembly import (
    PARTIAL,
    PARTIALS,
    REASSEMBLY,
    ROOM,
    data_of,
    fragment_of,
    release,
    take_fragment,
)

ME, PEER = ("02:00:00:00:00:01", "192.0.2.1"), ("02:00:00:00:00:02", "192.0.2.2")
WAITS, REFUSED = -1, -2
SECOND = 10**9


class Bench:
    """Memory for fragments, and the time."""

    def __init__(self) -> None:
        self._rows, self._rooms = np.zeros(PARTIALS * PARTIAL.size, np.uint8), np.zeros(PARTIALS * ROOM, np.uint8)
        fields = {"rows": self._rows.ctypes.data, "rooms": self._rooms.ctypes.data}
        self._memory = np.frombuffer(bytes(REASSEMBLY.pack(**fields)), np.uint8)
        self.at, self.now = self._memory.ctypes.data, SECOND

    def take(self, frame) -> int:
        """Return what becomes of a fragment: the number of its datagram, WAITS or REFUSED."""
        data = np.frombuffer(raw(frame), np.uint8).copy()
        ip = fragment_of(data.ctypes.data, len(data))
        assert ip, "it is a fragment"
        return take_fragment(self.at, data.ctypes.data, ip, self.now)

    def whole(self, number: int) -> bytes:
        """Return the data of a datagram, and forget it."""
        data, nbytes, _ = data_of(self.at, number)
        found = ctypes.string_at(data, nbytes)
        release(self.at, number)
        return found


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def pieces(nbytes: int, size: int, number: int, tags: int = 0, **ip):
    """Return the fragments of a ping, and its ICMP message."""
    l2 = Ether(src=PEER[0], dst=ME[0])
    for vlan in range(tags):
        l2 = l2 / Dot1Q(vlan=5 + vlan)
    packet = IP(src=PEER[1], dst=ME[1], id=number, **ip) / ICMP(id=3, seq=7) / random.Random(nbytes).randbytes(nbytes)
    return [l2 / one for one in fragment(packet, size)], raw(packet)[4 * IP(raw(packet)).ihl :]


@pytest.mark.parametrize(("nbytes", "size"), [(9, 8), (1473, 1480), (3000, 1480), (8192, 800), (65_507, 1480)])
@pytest.mark.parametrize("order", ["in order", "reversed", "random", "each twice"])
def test_fragments_become_the_datagram(bench, nbytes, size, order):
    parts, message = pieces(nbytes, size, nbytes, tags=nbytes % 3)
    if order == "reversed":
        parts.reverse()
    elif order == "random":
        random.Random(1).shuffle(parts)
    elif order == "each twice":
        parts = [part for part in parts[:-1] for _ in range(2)] + parts[-1:]
    found = [bench.take(part) for part in parts]
    assert found[:-1] == [WAITS] * (len(parts) - 1)
    assert bench.whole(found[-1]) == message


def test_datagrams_at_the_same_time(bench):
    """They are told apart by sender and number; options do not matter."""
    sets = [pieces(2000, 400, number, options=[IPOption_NOP()] * (4 * (number % 2))) for number in range(70, 78)]
    found = {}
    for turn in range(len(sets[0][0])):
        for parts, message in sets:
            number = bench.take(parts[turn])
            if number >= 0:
                found[number] = message
    assert len(found) == len(sets)
    for number, message in found.items():
        assert bench.whole(number) == message


def test_fragments_that_come_too_late(bench):
    """After a minute. What came before is forgotten."""
    parts, message = pieces(100, 56, 90)
    assert bench.take(parts[0]) == WAITS
    bench.now += 61 * SECOND
    assert bench.take(parts[1]) == WAITS
    assert bench.whole(bench.take(parts[0])) == message


def test_more_datagrams_than_there_is_room_for(bench):
    """The oldest gives way."""
    bench.now += 100 * SECOND
    sets = []
    for number in range(200, 200 + PARTIALS + 1):
        sets.append(pieces(100, 56, number))
        bench.now += 1
        assert bench.take(sets[-1][0][0]) == WAITS
    assert bench.whole(bench.take(sets[1][0][1])) == sets[1][1]
    assert bench.take(sets[0][0][1]) == WAITS
    bench.now += 100 * SECOND


def cut(frame, **fields):
    """Return a fragment with other fields in its IP header."""
    again = frame.copy()
    for name, value in fields.items():
        setattr(again[IP], name, value)
    del again[IP].chksum, again[IP].len
    return Ether(raw(again))


def test_fragments_that_contradict_each_other(bench):
    """Overlaps, two ends, an end within what has come: the datagram is given up (as by Linux)."""
    for number, change in enumerate(({"frag": 15}, {"flags": 0, "frag": 9}, {"flags": 0, "frag": 3})):
        parts, _ = pieces(300, 64, 300 + number)
        assert [bench.take(part) for part in parts[:2]] == [WAITS, WAITS]
        if number == 1:
            assert bench.take(cut(parts[2], flags=0, frag=40)) == WAITS
        assert bench.take(cut(parts[1], **change)) == REFUSED
        assert bench.take(parts[2]) == WAITS  # of a new datagram
    bench.now += 100 * SECOND


@pytest.mark.parametrize(
    ("fields", "nbytes"), [({"flags": "MF", "frag": 0}, 9), ({"frag": 8191}, 16), ({"frag": 8190}, 24)]
)
def test_fragments_that_cannot_be(bench, fields, nbytes):
    """Odd lengths in the middle, and beyond 65535 bytes with the header."""
    assert bench.take(Ether() / IP(src=PEER[1], dst=ME[1], proto=1, **fields) / bytes(nbytes)) == REFUSED


def test_what_is_no_fragment():
    for frame in (
        Ether() / IP() / ICMP(), Ether(type=0x86DD) / bytes(60), b"\0" * 14, Ether() / IP(flags="MF"),
        Ether() / IP(flags="MF", chksum=1) / bytes(8), Ether() / IP(flags="MF", len=200) / bytes(8),
        Ether() / IP(flags="MF", ihl=4) / bytes(8),
    ):
        data = np.frombuffer(raw(frame), np.uint8).copy()
        assert fragment_of(data.ctypes.data, len(data)) == 0


def test_scapy_agrees_about_the_pieces():
    """The rig: what this module cuts, scapy puts together."""
    parts, message = pieces(3000, 1480, 5)
    (again,) = defragment([IP(raw(part[IP])) for part in parts])
    assert raw(IP(raw(again)).payload) == message
