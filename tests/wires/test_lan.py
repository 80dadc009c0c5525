"""The LAN of software NICs: which NIC gets a frame."""

import pytest

from stations import BROADCAST, frame, lan, turn

STRANGER = bytes.fromhex("020000aabbcc")


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_broadcast_reaches_all_others(count):
    with lan([{}] * count) as stations:
        first, *others = stations
        sent = frame(BROADCAST, first.mac, b"to all")
        first.send(sent)
        turn(stations)
        assert [station.got() for station in others] == [[sent]] * (count - 1)
        assert first.got() == []


def test_macs_are_learned():
    with lan([{}] * 3) as stations:
        a, b, c = stations
        unknown = frame(b.mac, a.mac, b"where are you?")
        a.send(unknown)
        turn(stations)
        assert b.got() == c.got() == [unknown]
        answer = frame(a.mac, b.mac, b"here")
        b.send(answer)
        turn(stations)
        assert (a.got(), c.got()) == ([answer], [])
        known = frame(b.mac, a.mac, b"good")
        a.send(known)
        turn(stations)
        assert (b.got(), c.got()) == ([known], [])
