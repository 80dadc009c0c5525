"""The loop of a worker: turns, and how it rests between them. And turns that other threads make in its place.

A program in C that polls gives its core to nobody, and where cores are few, the worker's thread gets one by and by only
(`SoftNic.expect_polling`). But a thread that polls in vain can do what it waits for: it makes a turn (`help_out`).
Threads take the right to that from each other, by a word that they exchange.
"""

from __future__ import annotations


from ...fabric.frames import PIPE, pipe_end_at
from ...fabric.injector import faults_at
from ...fabric.udp_records import MSG_DONTWAIT, MSG_NOSIGNAL
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    clock_ns, exchange64, fence_sys, futex_wait, ld16, ld32, ld64, ld_relaxed64, pause, st64, st_relaxed64,
    st_release64, yield_thread,
)  # fmt: skip
from ...jit.ops.calls import external
from ..memory.streams import at_work
from ..queues.wakeups import wake_threads
from ..state.cq import CHANNEL, channel_at
from ..state.wire import WIRE, wire_at
from ..state.work_queue import entry, work_queue_at
from ..state.worker import WORKER, worker_at
from ..transport.wire_kinds import has_pipe_in, is_to_wake, pump_in, pump_out
from ..turn.turn import scan, turn, wake_poster
from ..turn.work_queues import waits

_poll = external("poll", 64, 64, 32, ret=32)
_send = external("send", 32, 64, 64, 32, ret=64)
_recv = external("recv", 32, 64, 64, 32, ret=64)
_write = external("write", 32, 64, 64, ret=64)
_pthread_self = external("pthread_self", ret=64)

SCAN_EVERY = 256  # idle turns between scans of all doorbell records
NOTIFICATIONS = 16  # taken from a notifier at a time: net.unix.max_dgram_qlen is 10 by default
MOST_TRUST_NS = 200_000  # how long the worker's thread relies on threads that poll, at most


@engine_function
def _work_left(nic):
    """Return whether a posted WQE waits for a retry or an acknowledgement, or other work waits for room."""
    n = worker_at(nic)
    if n.pending_count != 0 or (n.stream_count != 0 and at_work(nic)):
        return True
    for i in range(n.wire_count):
        w = wire_at(ld64(n.wires + 8 * i))
        if w.faults != 0 and faults_at(w.faults).held != 0:
            return True
    for i in range(n.active_count):
        w = work_queue_at(entry(nic, i))
        if w.awake != 0 and waits(w.kind, w.row):
            return True
    return False


@engine_function
def _set_asleep(nic, asleep):
    """Tell the NICs of this host, and posters of this process, whether they have to wake this engine.

    No later load moves before these stores: on x86 because the last one is an exchange, on Arm because of the fence.
    """
    n = worker_at(nic)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if has_pipe_in(wire):
            st_relaxed64(pipe_end_at(wire + WIRE.rx).pipe + PIPE.asleep, asleep)
    exchange64(nic + WORKER.asleep, asleep)
    fence_sys()


@device_function
def _has_queues(nic):
    """Return whether a doorbell may ring that this worker serves. Commands, which change that, wake it."""
    n = worker_at(nic)
    return n.active_count + n.cq_count + n.uars != 0


@engine_function
def _sleep(nic):
    """Sleep until a kick or a datagram, for `sleep_ms` at most: a doorbell rung by a kernel cannot wake a thread."""
    n = worker_at(nic)
    if _poll(n.pollfds, n.pollfd_count, n.sleep_ms if _has_queues(nic) else -1) > 0:
        for i in range(n.event_count):
            if ld16(n.pollfds + 8 * i + 6) != 0:
                _take_notifications(nic, ld32(n.pollfds + 8 * i))


@device_function
def _may_ring(nic):
    """Return whether a kernel that runs may ring a doorbell of this worker."""
    return ld_relaxed64(nic + WORKER.busy) > 0 and _has_queues(nic)


@engine_function
def _take_notifications(nic, fd):
    """Take notifications (fabric/notifier.py). If there are more than NOTIFICATIONS, the rest wake the engine again."""
    for _ in range(NOTIFICATIONS):
        if _recv(fd, nic + WORKER.word, 1, MSG_DONTWAIT) < 0:
            break


@engine_function
def _wake_peers(nic):
    """Wake the peers' engines that sleep while frames wait for them."""
    n = worker_at(nic)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if is_to_wake(wire):
            w = wire_at(wire)
            w.woken = pipe_end_at(wire + WIRE.tx).position
            _send(w.wake_fd, nic + WORKER.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)  # a full queue wakes the peer, too


@engine_function
def _ring_service(nic):
    """Wake the service thread, for which error records wait."""
    n = worker_at(nic)
    n.error_event = 0
    st64(nic + WORKER.word, 1)
    _write(n.service_fd, nic + WORKER.word, 8)


@engine_function
def _ring_channels(nic):
    """Add the events of this turn to the eventfds of their channels."""
    n = worker_at(nic)
    for i in range(n.ringing_count):
        channel = ld64(n.ringing + 8 * i)
        st64(nic + WORKER.word, exchange64(channel + CHANNEL.unheard, 0))
        _write(channel_at(channel).fd, nic + WORKER.word, 8)
    n.ringing_count = 0


@engine_function
def _look(nic):
    """Make one turn, and wake all who wait for what was done in it: return how much was done."""
    n = worker_at(nic)
    done = pump_in(nic) + turn(nic)
    if ld_relaxed64(nic + WORKER.awaited) != 0:
        wake_poster(nic)
    if n.error_event != 0:
        _ring_service(nic)
    if n.ringing_count != 0:
        _ring_channels(nic)
    if n.waking != 0:
        wake_threads(nic)
    if n.wire_count != 0:
        pump_out(nic)
        _wake_peers(nic)
    if done > 0:
        n.idle = n.idle_since = 0
    elif ld_relaxed64(nic + WORKER.hold) == 0:
        n.idle += 1
        if n.asleep != 0 or n.idle & (SCAN_EVERY - 1) == 0:
            scan(nic)
    return done


@device_function
def _take_turns(nic):
    """Take the right to make turns, if no thread has it: return whether this one has it now."""
    return exchange64(nic + WORKER.taken, 1) == 0


@device_function
def _give_turns(nic):
    """Let other threads make turns."""
    st_release64(nic + WORKER.taken, 0)


@device_function
def _nap(nic, nanos):
    """Sleep for so long."""
    futex_wait(nic + WORKER.asleep, 0, nanos)


@engine_function
def _turns_are_mine(nic):
    """Take the right to make turns, for the worker's thread; or nap, and return False, while others make them.

    The more often it finds that they do, the longer it naps (`trust`). A worker that has announced that it sleeps makes
    its last turn before that itself.
    """
    n = worker_at(nic)
    helped = n.asleep == 0 and clock_ns() - ld_relaxed64(nic + WORKER.helped_at) < n.trust
    if not helped and _take_turns(nic):
        return True
    n.trust = min(2 * n.trust, MOST_TRUST_NS)
    _nap(nic, n.trust)
    return False


_NO_REST, _PAUSE, _YIELD, _NAP, _SLEEP = range(5)  # how a worker rests between two turns


@engine_function
def _rest_after(nic, done):
    """Return how the worker rests after a turn that has done so much. Here it falls asleep, and wakes up.

    Before it sleeps, it announces that and takes one more turn, for doorbells and frames from before anyone could see
    the announcement.
    """
    n = worker_at(nic)
    if done > 0:
        if n.asleep:
            _set_asleep(nic, 0)
        return _NO_REST
    if ld_relaxed64(nic + WORKER.hold) != 0:
        return _YIELD
    if n.asleep:
        if not _may_ring(nic) and not _work_left(nic):
            return _SLEEP
        _set_asleep(nic, 0)
        return _NO_REST
    if n.idle % n.yield_every != 0:
        return _PAUSE
    if not _may_ring(nic):
        now = clock_ns()
        if n.idle_since == 0:
            n.idle_since = now
        elif now - n.idle_since > n.spin_ns and not _work_left(nic):
            _set_asleep(nic, 1)
            return _NO_REST
    return _NAP if n.nap_ns != 0 else _YIELD


@engine_function
def _rest(nic, how):
    if how == _PAUSE:
        pause()
    elif how == _YIELD:
        yield_thread()
    elif how == _NAP:
        _nap(nic, worker_at(nic).nap_ns)
    elif how == _SLEEP:
        _sleep(nic)


@engine_function
def run(nic):
    """Be a worker of the NIC until `stop` is set."""
    n = worker_at(nic)
    while ld_relaxed64(nic + WORKER.stop) == 0:
        has_helpers = n.nap_ns != 0
        if has_helpers and not _turns_are_mine(nic):
            continue
        done = _look(nic)
        rest = _rest_after(nic, done)
        if has_helpers:
            if done > 0:
                n.trust = n.nap_ns
            _give_turns(nic)
        _rest(nic, rest)


@engine_function
def help_out(nic, posted):
    """Make a turn for the worker, if no other thread makes one. `posted`: the thread has posted, and not just polled.

    If another thread makes a turn, it may wait for this core. A worker that sleeps makes its turns itself: what arrives
    wakes it, and so does a thread that has posted.
    """
    n = worker_at(nic)
    if not _take_turns(nic):
        yield_thread()
    elif n.asleep != 0:
        _give_turns(nic)
        if posted:
            _send(n.kick_fd, nic + WORKER.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)
    else:
        n.helper = _pthread_self()
        _look(nic)
        n.helper = 0
        n.helped_at = clock_ns()
        _give_turns(nic)
