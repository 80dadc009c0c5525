"""Packets of a queue pair's earlier life, with the numbers that they would have today: they are taken for nothing else.

A life ends with a reset. Programs that fix their PSNs begin each one with the same.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpunetio.fabric.faults import Faults
from gpunetio.nic.control.queues.qp import QueuePairs
from nic_rig import READ, RETRY_EXCEEDED, WRITE, Ends, Queue, error_of, pause, until

PSN = 7
OLD, NEW = slice(0, 64), slice(64, 128)  # what the WRITEs of the first and of the second life take, there and here
HASTY: dict[str, Any] = {"ack_timeout": 1, "retry_cnt": 0}  # gives up after a millisecond
PATIENT: dict[str, Any] = {"ack_timeout": 13, "retry_cnt": 7}  # a second in all, for a machine that is busy


@pytest.fixture(params=["auto", "udp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    opened = Ends.apart(wire=request.param)
    yield opened
    opened.close()


@pytest.fixture
def piped() -> Iterator[Ends]:
    opened = Ends.apart()
    yield opened
    opened.close()


def connect(ends: Ends, end: Queue, psn: int = PSN, **attributes: Any) -> None:
    """One end, with the same PSNs each time."""
    peer = ends.b if end is ends.a else ends.a
    end.qp.connect(peer.qp.endpoint(psn=PSN), psn=psn, **attributes)


def write(ends: Ends, where: slice) -> None:
    ends.a.post(WRITE, ends.there.remote(where.start), ends.here.at(where.start, 64))


def arrived(ends: Ends, where: slice) -> bool:
    return np.array_equal(ends.there.bytes[where], ends.here.bytes[where])


def fail(ends: Ends, **attributes: Any) -> None:
    """A first life, which ends with a WRITE to a peer that stands still."""
    for end in (ends.a, ends.b):
        end.reset()
        connect(ends, end, **HASTY | attributes)
    pause(ends.b)
    write(ends, OLD)
    assert error_of(ends.a.done.next())[0] == RETRY_EXCEEDED


def succeed(ends: Ends) -> None:
    """The second life's WRITE arrives, and nothing else."""
    assert ends.a.done.next().opcode == 0
    assert arrived(ends, NEW)
    assert not ends.there.bytes[OLD].any()


# --- both ends begin anew --------------------------------------------------------------------------------------------


def test_an_old_write_is_not_taken_for_the_new_one(ends):
    fail(ends)
    ends.a.reset()
    ends.b.reset()
    connect(ends, ends.b, **PATIENT)
    connect(ends, ends.a, **PATIENT)
    stale = int(ends.b.nic.counters["rx_stale"])
    write(ends, NEW)
    ends.b.nic.resume()
    succeed(ends)
    assert int(ends.b.nic.counters["rx_stale"]) > stale


def begin_anew(ends: Ends, chance: random.Random) -> None:
    """The same at random moments: the peer goes on at any of them, and either end may be the first."""
    ends.there.bytes[:] = 0
    fail(ends)

    def clear() -> None:
        ends.there.bytes[:] = 0  # until it was reset, the peer might execute the old WRITE

    connects: list[Callable[[], None]] = [
        lambda: connect(ends, ends.b, **PATIENT),
        lambda: (connect(ends, ends.a, **PATIENT), write(ends, NEW)),  # type: ignore[list-item,func-returns-value]
    ]
    resets = [ends.a.reset, ends.b.reset]
    chance.shuffle(resets)
    chance.shuffle(connects)
    steps = [*resets, clear, *connects]
    steps.insert(chance.randrange(len(steps) + 1), ends.b.nic.resume)
    for step in steps:
        step()
        if chance.random() < 0.5:
            time.sleep(chance.random() * 300e-6)
    succeed(ends)


def test_at_random_moments(ends):
    chance = random.Random(1)
    for _ in range(20):
        begin_anew(ends, chance)


@pytest.mark.slow
def test_hundreds_of_times(ends):
    chance = random.Random(2)
    for _ in range(300):
        begin_anew(ends, chance)


@pytest.mark.parametrize("wire", ["auto", "udp"])
def test_what_the_injector_holds_is_taken_back(wire):
    """Frames that a fault injector delays have not left their NIC when the QP is reset."""
    ends = Ends.apart(wire=wire, faults=Faults(delay_us=100_000))
    fail(ends)
    ends.b.nic.resume()
    for end in (ends.a, ends.b):
        end.reset()
    for end in (ends.a, ends.b):
        connect(ends, end, ack_timeout=18)
    write(ends, NEW)
    succeed(ends)
    ends.close()


def test_another_queue_pair_with_the_same_number(ends, monkeypatch):
    fail(ends)
    numbers = [ends.a.qp.qpn, ends.b.qp.qpn]
    monkeypatch.setattr(QueuePairs, "free_number", lambda _: numbers.pop(0))
    for name in ("a", "b"):
        queue = getattr(ends, name)
        queue.qp.close()
        setattr(ends, name, Queue(queue.qp.pd))
    assert not numbers
    connect(ends, ends.a, **PATIENT)
    connect(ends, ends.b, **PATIENT)
    write(ends, NEW)
    ends.b.nic.resume()
    succeed(ends)


def test_each_life_has_a_new_psn(ends):
    """Unless the caller gives one."""
    first = []
    for _ in range(8):
        ends.a.qp.connect(ends.b.qp)
        psns = [end.qp.psn for end in (ends.a, ends.b)]
        assert [end.qp.query()[0].sq_psn for end in (ends.a, ends.b)] == psns
        assert [end.qp.query()[0].rq_psn for end in (ends.b, ends.a)] == psns
        first += psns
        for end in (ends.a, ends.b):
            end.reset()
    assert len(set(first)) > 12


# --- one end alone ---------------------------------------------------------------------------------------------------


def post(ends: Ends, opcode: int) -> None:
    """A request of the second life."""
    ends.a.post(opcode, ends.there.remote(NEW.start), ends.here.at(NEW.start, 64))


@pytest.mark.parametrize("opcode", [WRITE, READ])
def test_one_end_before_the_other(piped, opcode):
    """An acknowledgement of the old WRITE, which the peer executes in its old life, is none of the new request."""
    ends = piped
    fail(ends)
    ends.a.reset()
    connect(ends, ends.a, ack_timeout=14, retry_cnt=7)
    if opcode == READ:
        ends.there.bytes[NEW] = 0x5A
    post(ends, opcode)
    ends.b.nic.resume()
    until(lambda: arrived(ends, OLD), "the old WRITE")
    until(lambda: ends.b.nic.counters["rx_stale"], "the new request, which belongs to no life of this end")
    until(lambda: ends.a.nic.counters["rx_stale"], "the old WRITE's acknowledgement")
    assert ends.a.done.poll() is None
    ends.b.reset()
    connect(ends, ends.b)
    assert ends.a.done.next().opcode == 0
    assert arrived(ends, NEW)


def test_a_peer_that_is_not_reset_is_not_reached(piped):
    """What another life has executed is no duplicate: the request fails, as to any peer that does not answer."""
    ends = piped
    for end in (ends.a, ends.b):
        connect(ends, end)
    write(ends, OLD)
    assert ends.a.done.next().opcode == 0
    ends.a.reset()
    connect(ends, ends.a, **HASTY)
    write(ends, NEW)
    assert error_of(ends.a.done.next())[0] == RETRY_EXCEEDED
    assert not ends.there.bytes[NEW].any()


def test_a_sender_of_an_earlier_life_is_not_heard(piped):
    """Two queue pairs send to one. It hears the one that began later, even if the other's PSN is the next."""
    ends = piped
    later = Queue(ends.a.qp.pd)
    connect(ends, ends.b)
    connect(ends, ends.a, psn=PSN + 1, **HASTY)
    later.qp.connect(ends.b.qp.endpoint(psn=PSN), psn=PSN, **HASTY)
    later.post(WRITE, ends.there.remote(OLD.start), ends.here.at(OLD.start, 64))
    until(lambda: arrived(ends, OLD), "the later one's WRITE")
    write(ends, NEW)
    assert error_of(ends.a.done.next())[0] == RETRY_EXCEEDED
    assert not ends.there.bytes[NEW].any()
    assert ends.b.qp.query()[0].rq_psn == PSN + 1


def test_a_life_that_goes_on_at_the_next_psn(ends):
    """Only one end is reset, and begins where the other expects it to."""
    for end in (ends.a, ends.b):
        connect(ends, end)
    for _ in range(3):
        write(ends, OLD)
        assert ends.a.done.next().opcode == 0
        ends.a.reset()
        connect(ends, ends.a, psn=ends.b.qp.query()[0].rq_psn)
    write(ends, NEW)
    assert ends.a.done.next().opcode == 0
    assert arrived(ends, NEW)
