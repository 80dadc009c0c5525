"""The LAN of software NICs in several processes: who enters later, who leaves, who dies."""

import contextlib
import os
import signal

import pytest

from nic_rig import until
from station_child import Child
from stations import BROADCAST, frame


def linked(count: int, *children: Child) -> None:
    """Wait until each of the NICs knows so many others. The one that enters later lays the link."""
    until(lambda: all(child.ask("neighbours") == count for child in children), f"{count} links of each NIC")


def test_two_processes():
    with Child("soft0") as a, Child("soft1") as b:
        linked(1, a)
        sent = [frame(BROADCAST, a.mac, b"to all"), frame(b.mac, a.mac, b"unknown")]
        a.ask("post", [frame.hex() for frame in sent])
        assert b.got(2) == sent
        back = frame(a.mac, b.mac, b"known")
        b.send(back)
        assert a.got(2) == [sent[0], back]  # a broadcast comes back, too
        assert b.count("rx_frames") == b.count("rx_frame_delivered") == 2
        a.ask("link", False)
        a.ask("post", [sent[0].hex()])
        b.send(back)
        until(lambda: a.count("rx_frame_link_down") == 1, "the frame to be dropped")
        a.ask("link", True)
        a.ask("post", [sent[1].hex()])
        assert b.got(1) == [sent[1]]
        assert a.count("tx_frame_link_down") == 1


@pytest.mark.slow
def test_a_frame_reaches_only_the_nic_with_the_mac():
    with contextlib.ExitStack() as undo:
        a, b, c = (undo.enter_context(Child(f"soft{i}")) for i in range(3))
        linked(2, a, b, c)
        hello = frame(BROADCAST, b.mac, b"hello")
        b.send(hello)
        assert a.got(1) == c.got(1) == [hello]
        sent = frame(b.mac, a.mac)
        a.send(sent)
        assert b.got(1) == [sent]
        last = frame(BROADCAST, a.mac, b"last")  # comes behind whatever else there is
        a.send(last)
        assert c.got(1) == [last]


@pytest.mark.slow
def test_nics_without_ethernet_queues_are_left_alone():
    with Child("soft0") as a, Child("soft1", enter=False) as b:
        assert a.ask("neighbours") == 0
        a.send(frame(BROADCAST, a.mac))
        b.ask("enter")
        linked(1, a)
        sent = frame(BROADCAST, a.mac, b"now")
        a.send(sent)
        assert b.got(1) == [sent]


@pytest.mark.slow
def test_a_process_that_dies_leaves_the_lan():
    with Child("soft0") as a, Child("soft2") as c:
        with Child("soft1") as b:
            linked(2, a, b, c)
            b.send(frame(BROADCAST, b.mac, b"hello"))
            a.got(1)
            b.kill()
        linked(1, a)
        sent = frame(b.mac, a.mac, b"nobody has this MAC any more")
        a.send(sent)
        assert c.got(2)[1] == sent  # it goes to all again
        with Child("soft1") as b:
            linked(2, a)
            sent = frame(b.mac, a.mac, b"again")
            a.send(sent)
            assert b.got(1) == [sent]


@pytest.mark.slow
def test_a_stopped_process_stops_nobody():
    with contextlib.ExitStack() as undo:
        a, b, c = (undo.enter_context(Child(f"soft{i}")) for i in range(3))
        linked(2, a)
        os.kill(b.pid, signal.SIGSTOP)
        try:
            for _ in range(100):
                a.send(*[frame(BROADCAST, a.mac, nbytes=1500)] * 40)
                assert len(c.got(40)) == 40
            dropped = a.count("tx_frame_no_room")
            assert 4000 - (1 << 19) // 1500 <= dropped < 4000
        finally:
            os.kill(b.pid, signal.SIGCONT)
        until(lambda: b.count("rx_frames") == 4000 - dropped, "the frames that found room")
        sent = frame(BROADCAST, a.mac, b"it goes on")
        a.send(sent)
        c.got(1)
        until(lambda: b.count("rx_frames") == 4001 - dropped, "one frame more")


@pytest.mark.slow
def test_a_process_is_reached_once_it_goes_on():
    """It was stopped when the other entered the LAN, and could not be asked."""
    with Child("soft0") as a, Child("soft1", enter=False) as b:
        os.kill(a.pid, signal.SIGSTOP)
        try:
            b.ask("enter")
        finally:
            os.kill(a.pid, signal.SIGCONT)
        linked(1, a, b)
        sent = frame(BROADCAST, a.mac)
        a.send(sent)
        assert b.got(1) == [sent]


@pytest.mark.slow
def test_eight_processes():
    with contextlib.ExitStack() as undo:
        children = [undo.enter_context(Child(f"soft{i}")) for i in range(8)]
        linked(7, *children)
        for child in children:
            sent = frame(BROADCAST, child.mac, b"hello")
            child.send(sent)
            assert all(other.got(1) == [sent] for other in children if other is not child)
        for child in children:
            for other in children:
                if other is not child:
                    sent = frame(other.mac, child.mac)
                    child.send(sent)
                    assert other.got(1) == [sent]
        assert all(child.count("rx_frames") == 14 for child in children)
