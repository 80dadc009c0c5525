"""The LAN of software NICs: which NIC gets a frame, and what becomes of frames that find no room."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio.fabric.inprocess import CAPACITY
from gpunetio.formats.packet import ETHERNET
from gpunetio.nic.state.lan import MAX_AGE_NS
from nic_rig import REQ, SIZE, WRITE, Queue, connect
from nic_rig import Buffer as Region
from stations import BROADCAST, Station, frame, lan, turn

COUNT = 4
NO_ROOM, NO_BUFFER, DELIVERED = "tx_frame_no_room", "rx_frame_no_buffer", "rx_frame_delivered"


def mac(number: int) -> bytes:
    """A MAC of nobody's port."""
    return b"\x02\xaa" + number.to_bytes(4, "big")


@pytest.fixture(scope="module")
def stations() -> Iterator[list[Station]]:
    with lan([{}] * COUNT) as stations:
        yield stations


@pytest.fixture
def three(stations) -> list[Station]:
    """NICs of the LAN that know nothing of each other."""
    forget(stations)
    return stations[:3]


def forget(stations: list[Station]) -> None:
    """Begin anew: nobody knows any MAC, and no frame waits."""
    while sum(len(drain(stations, station)) for station in stations):
        pass
    for station in stations:
        station.forget()


def test_macs_are_learned(three):
    a, b, c = three
    unknown = frame(b.mac, a.mac, b"where are you?")
    a.send(unknown)
    turn(three)
    assert b.got() == c.got() == [unknown]
    answer = frame(a.mac, b.mac, b"here")
    b.send(answer)
    turn(three)
    assert (a.got(), c.got()) == ([answer], [])
    known = frame(b.mac, a.mac, b"good")
    a.send(known)
    turn(three)
    assert (b.got(), c.got()) == ([known], [])


def test_a_mac_moves(three):
    a, b, c = three
    roaming = mac(1)
    for station, other in ((b, c), (c, b)):
        station.send(frame(BROADCAST, roaming))
        turn(three)
        assert len(a.got()) == len(other.got()) == 1
        sent = frame(roaming, a.mac)
        a.send(sent)
        turn(three)
        assert (station.got(), other.got()) == ([sent], [])


@pytest.mark.parametrize("source", [BROADCAST, bytes(6), b"\x01\x00\x5e\x00\x00\x01"], ids=["all", "zeros", "group"])
def test_sources_that_are_nobody(three, source):
    """A frame to such a MAC goes to all, whoever has sent from it."""
    a, b, c = three
    b.send(frame(BROADCAST, source))
    turn(three)
    a.got(), c.got()
    sent = frame(source, a.mac)
    a.send(sent)
    turn(three)
    assert b.got() == c.got() == [sent]


def test_more_macs_than_rows(three):
    """Whatever is forgotten, a frame to a MAC reaches its NIC."""
    a, b, c = three
    macs = [mac(i) for i in range(6000)]
    for i in range(0, len(macs), 50):
        b.send(*[frame(a.mac, source) for source in macs[i : i + 50]])
        turn(three)
        a.got(), c.got()
    for i in range(0, len(macs), 50):
        sent = [frame(to, a.mac) for to in macs[i : i + 50]]
        a.send(*sent)
        turn(three)
        assert b.got() == sent
        assert set(c.got()) <= set(sent)


# --- the model ------------------------------------------------------------------------------------------------------


class Switch:
    """What each NIC knows, and who gets a frame."""

    def __init__(self, count: int):
        self.known: list[dict[bytes, tuple[int, int]]] = [{} for _ in range(count)]
        self.now = 1

    def send(self, port: int, to: bytes, source: bytes) -> list[int]:
        others = [other for other in range(len(self.known)) if other != port]
        if not to[0] & 1 and to in self.known[port]:
            behind, seen = self.known[port][to]
            if self.now - seen <= MAX_AGE_NS:
                others = [behind]
        if not source[0] & 1 and any(source):
            for other in others:
                self.known[other][source] = port, self.now
        return others


PORTS, MACS = st.integers(0, COUNT - 1), st.sampled_from([*map(mac, range(4)), BROADCAST, b"\x01" + bytes(5)])
STEPS = st.one_of(st.tuples(PORTS, MACS, MACS), st.sampled_from([MAX_AGE_NS // 2, MAX_AGE_NS, MAX_AGE_NS + 1]))


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_frames_go_where_the_model_says(stations, steps):
    switch = Switch(COUNT)
    forget(stations)
    for station in stations:
        station.nic.record["virtual_time"] = 1
    try:
        for number, step in enumerate(steps):
            if isinstance(step, int):
                switch.now += step
                continue
            for station in stations:
                station.nic.record["now"] = switch.now
            port, to, source = step
            sent = frame(to, source, number.to_bytes(4, "big"))
            stations[port].send(sent)
            turn(stations)
            got = [station.got() for station in stations]
            receivers = switch.send(port, to, source)
            assert got == [[sent] if i in receivers else [] for i in range(COUNT)], (number, step)
    finally:
        for station in stations:
            station.nic.record["virtual_time"] = 0


# --- floods ---------------------------------------------------------------------------------------------------------


def numbered(to: bytes, source: bytes, numbers: range) -> list[bytes]:
    return [frame(to, source, number.to_bytes(4, "big")) for number in numbers]


def numbers(frames: list[bytes]) -> list[int]:
    return [int.from_bytes(got[ETHERNET.size : ETHERNET.size + 4], "big") for got in frames]


@pytest.mark.host_memory  # its turns are made on this thread
def test_a_flood_at_twice_the_drain_rate(three):
    """What the slow NIC misses is counted and the rest is in order; the other NIC and the queue pairs miss nothing."""
    a, b, c = three
    for station in (b, c):
        station.send(frame(BROADCAST, station.mac))
    turn(three)
    for station in three:
        station.got()
    with rdma(a, b) as write:
        dropped, taken = a.count(NO_ROOM), b.count(DELIVERED)
        slow: list[bytes] = []
        total = 0
        for _ in range(120):
            a.send(*numbered(b.mac, a.mac, range(total, total + 128)), *numbered(c.mac, a.mac, range(64)))
            total += 128
            turn([b, c], 1)  # one batch of 64
            slow += b.got()
            assert len(c.got()) == 64
        slow += write()
        while more := drain(three, b):
            slow += more
    dropped = a.count(NO_ROOM) - dropped
    assert dropped > 120 * 64 - CAPACITY // 2 // 192 - 200
    assert len(slow) + dropped == total
    assert b.count(DELIVERED) - taken == len(slow)
    assert numbers(slow) == sorted(set(numbers(slow)))


def drain(stations: list[Station], station: Station) -> list[bytes]:
    turn(stations, 1)
    return station.got()


@contextlib.contextmanager
def rdma(a: Station, b: Station) -> Iterator[Callable[[], list[bytes]]]:
    """Connect QPs of two NICs. What is yielded writes from one to the other, and returns frames that come meanwhile."""
    for station in (a, b):
        station.go_on()
    queues = [Queue(station.ctx.create_pd()) for station in (a, b)]
    connect(queues[0], queues[1], ack_timeout=20, retry_cnt=7)
    here, there = (Region(queue.qp.pd, SIZE, fill=i) for i, queue in enumerate(queues))
    for station in (a, b):
        station.stop()

    def write() -> list[bytes]:
        frames: list[bytes] = []
        queues[0].post(WRITE, there.remote(), here.at())
        for _ in range(200):
            turn([a, b], 1)
            frames += b.got()
        assert queues[0].done.next().opcode == REQ
        assert (there.bytes == here.bytes).all()
        return frames

    yield write


def test_without_receives(three):
    """Frames for which there is no receive are lost at the receiver, and nothing behind them is."""
    a, b, _ = three
    b.send(frame(BROADCAST, b.mac))
    turn(three)
    a.got()
    room = 1 << b.log
    lost = b.count(NO_BUFFER)
    sent = numbered(b.mac, a.mac, range(room + 10))
    a.send(*sent)
    turn(three)
    assert b.got() == sent[:room]
    assert b.count(NO_BUFFER) - lost == 10
    a.send(sent[-1])
    turn(three)
    assert b.got() == [sent[-1]]


def test_frames_of_any_length(three):
    """Whole pipes of them, so that they lie across its end as well."""
    a, b, _ = three
    for nbytes in (ETHERNET.size, 60, 61, 1514, 2048):
        for _ in range(CAPACITY // (nbytes * 8) // 16):
            sent = [frame(BROADCAST, a.mac, bytes([i]), nbytes) for i in range(8)]
            a.send(*sent)
            turn(three)
            assert b.got() == sent


@pytest.mark.parametrize("nbytes", [0, 1, 6, 13])
def test_frames_that_are_cut_off(three, nbytes):
    a, b, _ = three
    malformed = b.count("rx_frame_malformed")
    a.send(BROADCAST[:nbytes].ljust(nbytes, b"\xff"))
    turn(three)
    assert b.got() == []
    assert b.count("rx_frame_malformed") == malformed + 1


def test_frames_without_a_buffer_are_no_work(three):
    """So an engine that only drops them lets the kernel run that posts receives, if both have one core."""
    a, b, _ = three
    room = 1 << b.log
    a.send(*[frame(BROADCAST, a.mac)] * room)
    assert turn([b]) >= room
    dropped = b.count(NO_BUFFER)
    a.send(*[frame(BROADCAST, a.mac)] * 5)
    assert turn([b], 1) == 0
    assert b.count(NO_BUFFER) == dropped + 5
    assert len(b.got()) == room
