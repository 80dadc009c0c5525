"""A peer in another process that dies, hangs, or takes away what a transfer needs: errors in time, and life goes on."""

import contextlib
import os
import signal
import socket

import pytest

from far import DEADLINE, Far, Farm, Side, side, write_all
from gpunetio.nic.state.reasons import Reason
from neighbour import address
from nic_rig import (
    ALWAYS,
    FLUSHED,
    READ,
    REMOTE_ACCESS,
    REQ,
    REQ_ERR,
    RETRY_EXCEEDED,
    error_of,
    raddr,
    reports_of,
    until,
)

BIG, MANY = 1 << 20, 60  # bytes of a WRITE, and how many: it takes a while
ACK_TIMEOUT, RETRIES = 14, 3  # 4.096 µs · 2^14 = 67 ms
# IBTA 9.7.6.1.3: a requester detects a loss within one to four times the timeout; here for every try.
AT_MOST = 4 * 4.096e-6 * 2**ACK_TIMEOUT * (RETRIES + 1)
GRACE = 10.0  # for two busy cores


@pytest.fixture(scope="module")
def farm():
    with Farm() as opened:
        yield opened


@pytest.fixture(params=["auto", pytest.param("udp", marks=pytest.mark.slow)])  # each waits until retries end
def wire(request):
    return request.param


@pytest.fixture
def pair(farm, wire):
    """A side here, one in another process, and a queue pair of each, connected."""
    with side(wire) as near:
        far = farm.spawn(address(), wire)
        join(near, far)
        yield near, far
        farm.clear()


def join(near: Side, far: Far, nbytes: int = BIG, **options) -> dict:
    """A new queue pair on each side, connected: what the far one shows."""
    here, there = near.open(nbytes, sq=256, **options), far("open", nbytes, sq=256, **options)
    link(near, len(near.queues) - 1, here, far, there)
    return there


def link(near: Side, index: int, here: dict, far: Far, there: dict, far_index: int = -1) -> None:
    near.connect(index, there, ack_timeout=ACK_TIMEOUT, retry_cnt=RETRIES)
    far("connect", far_index, here, ack_timeout=ACK_TIMEOUT, retry_cnt=RETRIES)


def write_one(near: Side, there: dict, index: int = -1) -> None:
    """A WRITE that arrives."""
    write_all(near, index, there, 1, 64)
    (cqe,) = near.take(index, 1, DEADLINE)
    assert cqe.opcode != REQ_ERR, cqe


def begin(near: Side, there: dict, index: int = -1) -> int:
    """Large WRITEs that are under way, the first of them complete: how many are not known of."""
    write_all(near, index, there, MANY, BIG)
    (cqe,) = near.take(index, 1, DEADLINE)
    assert cqe.opcode != REQ_ERR, cqe
    return MANY - 1


def end(near: Side, left: int, there: dict, syndrome: int, index: int = -1, timeout: float = AT_MOST + GRACE) -> None:
    """All completions of `left` and of one more: successes, one error of this syndrome, the rest flushed in order.

    One more, because all that was under way may have arrived before the end.
    """
    queue = near.queues[index]
    write_all(near, index, there, 1, 64)
    left += 1
    cqes = [queue.done.next(timeout)]
    while cqes[-1].opcode != REQ_ERR:
        cqes.append(queue.done.next(timeout))
    good = len(cqes) - 1
    assert cqes[-1].syndrome == syndrome, cqes[-1]
    cqes += queue.done.take(left - len(cqes))
    assert [cqe.syndrome for cqe in cqes[good + 1 :]] == [FLUSHED] * (left - good - 1)
    last = queue.index
    assert [cqe.counter for cqe in cqes] == [n & 0xFFFF for n in range(last - left, last)]
    assert queue.done.none_for()
    assert near.state(index) == "ERR"


# --- death -----------------------------------------------------------------------------------------------------------


def test_a_killed_peer(pair, farm, wire):
    near, far = pair
    there = far("shown", -1)
    left = begin(near, there)
    far.kill()
    far.ended()
    end(near, left, there, RETRY_EXCEEDED)
    report = next(reports_of(near.nic, near.queues[0].qp.qpn))
    assert report.reason == Reason.NO_RESPONSE
    assert "the peer's process has ended" in report.message
    # This NIC goes on: with itself, and with others.
    here = near.open()
    near.connect(-1, here)
    write_one(near, here)
    write_one(near, join(near, farm.spawn(address(), wire)))


def test_a_killed_peer_of_many_queues(farm, wire):
    """Of reads too, and of a queue that has nothing to send."""
    with side(wire) as near:
        far = farm.spawn(address(), wire)
        shown = [join(near, far) for _ in range(3)]
        left = begin(near, shown[0], 0)
        queue = near.queues[1]
        for _ in range(8):
            queue.put(READ, raddr(shown[1]["address"], shown[1]["rkey"]), near.buffers[1].at())
        queue.ring()
        far.kill()
        far.ended()
        end(near, left, shown[0], RETRY_EXCEEDED, 0)
        end(near, 8, shown[1], RETRY_EXCEEDED, 1)
        assert near.state(2) == "RTS"  # it has asked nobody
        end(near, 0, shown[2], RETRY_EXCEEDED, 2)


def restart(near: Side, farm: Farm, wire: str, where: str, times: int) -> list[dict[str, int]]:
    """Kill a peer in mid-transfer and connect to its successor, again and again: the resources after each time."""
    used = []
    far = farm.spawn(where, wire)
    for n in range(times):
        # Every other time the queue pair of before, reset.
        if n % 2 == 0:
            there = join(near, far)
        else:
            near.reset(-1)
            there = far("open", BIG, sq=256)
            link(near, -1, near.shown(-1), far, there)
        write_one(near, there)
        left = begin(near, there)
        far.kill()
        far.ended()
        farm.clear()
        far = farm.spawn(where, wire)  # at once, while this side still waits for the dead one
        end(near, left, there, RETRY_EXCEEDED)
        if n % 2 == 1:
            near.close_queue(-1)
            near.deregister(-1)
            near.queues.pop()
            near.buffers.pop()
        used.append(near.resources())
    return used


def check_resources(used: list[dict[str, int]]) -> None:
    """Nothing grows, from when all threads and caches are there."""
    for name in ("descriptors", "mappings", "threads"):
        assert used[-1][name] <= used[3][name], [use[name] for use in used]
    assert used[-1]["resident"] - used[3]["resident"] < 16 << 20, [use["resident"] for use in used]


@pytest.mark.slow
def test_a_peer_that_is_started_again_and_again(farm, wire):
    with side(wire) as near:
        check_resources(restart(near, farm, wire, address(), 12))
        assert near.wires() <= 3


# --- a peer that stands still ----------------------------------------------------------------------------------------


def test_a_peer_stopped_for_too_long(pair):
    near, far = pair
    there = far("shown", -1)
    left = begin(near, there)
    far.kill(signal.SIGSTOP)
    try:
        end(near, left, there, RETRY_EXCEEDED)
    finally:
        far.kill(signal.SIGCONT)
    # The same two, connected anew.
    near.reset(-1)
    far("reset", -1)
    link(near, -1, near.shown(-1), far, far("shown", -1))
    write_one(near, there)


def test_a_peer_stopped_for_a_while(farm, wire):
    with side(wire) as near:
        far = farm.spawn(address(), wire)
        here, there = near.open(BIG, sq=256), far("open", BIG, sq=256)
        for connect, to in ((near.connect, there), (lambda *a, **o: far("connect", *a, **o), here)):
            connect(-1, to, ack_timeout=14, retry_cnt=7)
        left = begin(near, there)
        before = near.counter("local_ack_timeout_err")
        far.kill(signal.SIGSTOP)
        try:
            write_all(near, -1, there, 1, 64)  # all that was under way may have arrived before
            until(lambda: near.counter("local_ack_timeout_err") > before, "a timeout", DEADLINE)
        finally:
            far.kill(signal.SIGCONT)
        assert {cqe.opcode for cqe in near.take(-1, left + 1, DEADLINE)} == {0}
        assert near.state(-1) == "RTS"


def test_what_a_stopped_peer_was_sent_is_old_afterwards(farm):
    """Every life begins with the same PSN. The peer executes an old WRITE late, in its old life, and nothing else."""
    with side() as near:
        far = farm.spawn(address())
        here, there = ({**shown, "psn": 7} for shown in (near.open(), far("open")))
        queue, buffer = near.queues[0], near.buffers[0]
        near.connect(0, there, psn=7, ack_timeout=1, retry_cnt=0)
        far("connect", 0, here, psn=7)
        buffer.bytes[:] = 1
        far.stop()
        try:
            write_all(near, 0, there, 1, 64)
            assert error_of(queue.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
            near.reset(0)
            near.connect(0, there, psn=7, ack_timeout=17, retry_cnt=7)
            buffer.bytes[:] = 2
            write_all(near, 0, there, 1, 64, offset=64)
        finally:
            far.kill(signal.SIGCONT)
        until(lambda: far("byte", 0, 0) == 1, "the old WRITE")
        until(lambda: far("counter", "rx_stale"), "the new WRITE to come too early")
        until(lambda: near.counter("rx_stale"), "the old WRITE's acknowledgement")
        assert queue.done.poll() is None
        far("reset", 0)
        far("fill", 0, 0)
        far("connect", 0, here, psn=7)
        assert queue.done.next().opcode == REQ
        assert [far("byte", 0, offset) for offset in (0, 64)] == [0, 2]
        farm.clear()


# --- a peer that takes things away -----------------------------------------------------------------------------------


def test_a_peer_that_closes(pair):
    near, far = pair
    there = far("shown", -1)
    left = begin(near, there)
    far("close")
    end(near, left, there, RETRY_EXCEEDED)


def test_a_peer_that_destroys_its_queue(pair):
    near, far = pair
    other = join(near, far)
    there = far("shown", 0)
    left = begin(near, there, 0)
    far("close_queue", 0)
    end(near, left, there, RETRY_EXCEEDED, 0)
    assert far("counter", "rx_no_qp") > 0
    write_one(near, other)


def test_a_peer_that_deregisters(pair):
    near, far = pair
    there = far("shown", -1)
    left = begin(near, there)
    far("deregister", -1)
    end(near, left, there, REMOTE_ACCESS)
    assert far("state", -1) == "ERR"
    far("fill", -1, 0x5A)  # nothing touches it any more
    assert far("byte", -1, BIG - 1) == 0x5A


def test_a_peer_that_deregisters_what_is_read(pair):
    near, far = pair
    there = far("shown", -1)
    queue = near.queues[-1]
    for _ in range(MANY):
        queue.put(READ, raddr(there["address"], there["rkey"]), near.buffers[-1].at(), ce=ALWAYS)
    queue.ring()
    near.take(-1, 1, DEADLINE)
    far("deregister", -1)
    end(near, MANY - 1, there, REMOTE_ACCESS)


def test_a_peer_that_exits(pair):
    """With everything open, as programs do."""
    near, far = pair
    there = far("shown", -1)
    left = begin(near, there)
    far.start("exit")
    far.ended()
    end(near, left, there, RETRY_EXCEEDED)


# --- forks -----------------------------------------------------------------------------------------------------------


def test_a_fork_of_a_peer(pair):
    """It can neither use nor end what its parent has."""
    near, far = pair
    there = far("shown", -1)
    assert "BadStateError: context soft0 was opened in process" in far("fork_and_close")
    write_one(near, there)


def test_a_fork_outlives_its_parent(pair, farm, wire):
    """And holds nothing: the parent's death is seen, and its address can be had again."""
    near, far = pair
    where = next(iter(near.nic.links._wires)).peer
    where = str(where.peer_address) if wire == "auto" else str(_address_of(far))
    there = far("shown", -1)
    left = begin(near, there)
    child = far("fork")
    far.kill()
    try:
        until(lambda: _gone(far.pid), "the process to end", DEADLINE)
        end(near, left, there, RETRY_EXCEEDED)
        again = farm.spawn(where, wire)
        write_one(near, join(near, again))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def _address_of(far: Far) -> str:
    return socket.inet_ntoa(bytes.fromhex(far("shown", -1)["gid"])[12:])


# --- sleep -----------------------------------------------------------------------------------------------------------


def test_frames_wake_a_sleeping_engine(pair):
    """A peer that would sleep for a minute: every WRITE has to wake it."""
    near, far = pair
    there, here = ({**shown, "psn": 7} for shown in (far("shown", -1), near.shown(-1)))
    near.reset(-1)
    far("reset", -1)
    for connect, to in ((near.connect, there), (lambda *a, **o: far("connect", *a, **o), here)):
        connect(-1, to, psn=7, ack_timeout=20, retry_cnt=7)  # 4 s, which no busy machine takes
    far("sleep_for", 60_000)
    for _ in range(5):
        until(lambda: far("asleep"), "the other engine to sleep", DEADLINE)
        write_one(near, there)
    assert near.counter("local_ack_timeout_err") == 0
