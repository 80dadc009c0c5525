"""Ports on the LAN of software NICs: their settings, and when they are on it."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.utils import rdpcap

from eth_receive_rig import opened
from ethernet_rig import Maker, nic_of
from gpunetio import Faults
from gpunetio.errors import DocaError
from gpunetio.nic.state.counters import FRAME_FATES
from stations import BROADCAST, Station, frame, lan, turn

STRANGER = bytes.fromhex("02aa00000001")
BEGINNINGS = st.sampled_from([b"\x08\x00E", b"\x86\xdd`", b"\x81\x00", b"\x08\x06"])  # IPv4, IPv6, a tag, ARP


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_broadcast_reaches_all_others(count):
    with lan([{}] * count) as stations:
        for i, station in enumerate(stations):
            sent = frame(BROADCAST, station.mac, b"to all")
            station.send(sent)
            turn(stations)
            assert [other.got() for other in stations] == [[sent] * (i != j) for j in range(count)]


def test_only_own_frames():
    """A port that is not promiscuous steers frames to itself and to groups."""
    with lan([{}, {"promiscuous": False}]) as stations:
        a, b = stations
        wanted = [frame(b.mac, a.mac), frame(BROADCAST, a.mac), frame(b"\x01" + bytes(5), a.mac)]
        a.send(*wanted, frame(STRANGER, a.mac))
        turn(stations)
        assert b.got() == wanted
        assert b.count("rx_frame_other_mac") == 1


def test_a_link_that_is_down():
    with lan([{}] * 2) as stations:
        a, b = stations
        b.nic.records["link_down"] = 1
        a.send(frame(BROADCAST, a.mac))
        turn(stations)
        assert b.got() == []
        assert b.count("rx_frame_link_down") == 1
        b.nic.records["link_down"] = 0
        sent = frame(BROADCAST, a.mac)
        a.send(sent)
        turn(stations)
        assert b.got() == [sent]


def test_captures(tmp_path):
    files = [tmp_path / f"{name}.pcap" for name in "ab"]
    with lan([{"capture": file} for file in files]) as stations:
        a, b = stations
        sent = [frame(b.mac, a.mac, b"unknown"), frame(BROADCAST, a.mac, b"to all")]
        a.send(*sent)
        turn(stations)
        sent.append(frame(a.mac, b.mac, b"known"))
        b.send(sent[2])
        turn(stations)
    for file in files:
        assert [bytes(packet) for packet in rdpcap(str(file))] == sent


def test_faults():
    """Frames are lost, doubled and reordered as packets are. A damaged one is counted, and not steered."""
    with lan([{"faults": Faults(corruption=1, seed=3)}, {"faults": Faults(duplication=1, seed=3)}]) as stations:
        a, b = stations
        a.send(*[frame(BROADCAST, a.mac)] * 20)
        turn(stations)
        assert b.got() == []
        assert b.count("rx_frame_malformed") == 20
        sent = frame(BROADCAST, b.mac)
        b.send(sent)
        turn(stations)
        assert a.got() == [sent, sent]


@pytest.mark.parametrize(("tags", "nbytes"), [(0, 1514), (1, 1518), (2, 1522), (3, 1522)])
def test_frames_longer_than_the_mtu_of_their_receiver(tags, nbytes):
    """The length of up to two VLAN tags does not count."""
    with lan([{"mtu": 1500}, {"mtu": 1600}]) as stations:
        a, b = stations
        head = BROADCAST + b.mac + b"\x81\0\0\x05" * tags + b"\x08\0"
        sent = [head.ljust(n, b"x") for n in (nbytes, nbytes + 1)]
        b.send(*sent)
        turn(stations)
        assert a.got() == sent[:1]
        assert (a.count("rx_frame_oversize"), a.count("rx_frames")) == (1, 2)


def test_a_nic_is_on_the_lan_while_it_has_a_queue():
    with opened() as ctx:
        lan = nic_of(ctx).links.lan
        make = Maker(ctx)
        cqn, tisn = make.cq().number, make.tis(make.domain().number).number
        assert not lan.joined
        with make.rq(cqn):
            assert lan.joined
            with make.sq(cqn, tisn):
                assert lan.joined
            assert lan.joined
            with pytest.raises(DocaError):
                make.rq(0xFFFFFF)
        assert not lan.joined


# --- without rules ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsteered() -> Iterator[list[Station]]:
    """Two NICs without flow rules."""
    with lan([{}] * 2) as stations:
        for station in stations:
            station.go_on()
            station.unsteer()
            station.stop()
        yield stations


def test_frames_that_no_rule_takes(unsteered):
    """Each is counted by what it is."""
    a, b = unsteered
    a.send(frame(STRANGER, a.mac), frame(BROADCAST, a.mac))
    turn(unsteered)
    assert b.got() == []
    assert b.count("rx_frame_other_mac") == b.count("rx_frame_other_protocol") == 1
    assert b.count("rx_frames") == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(BEGINNINGS, st.binary(max_size=120))))
def test_any_bytes(unsteered, bodies):
    """Whatever comes is counted once, by what it is."""
    a, b = unsteered
    before = {name: b.count(name) for name in ("rx_frames", *FRAME_FATES)}
    a.send(*[BROADCAST + a.mac + kind + body for kind, body in bodies])
    turn([b])
    counted = {name: b.count(name) - before[name] for name in before}
    assert counted.pop("rx_frames") == sum(counted.values()) == len(bodies)
