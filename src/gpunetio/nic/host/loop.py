"""The loop of a worker: make turns, and pause, yield, nap or sleep between them. Other threads can make turns for it.

A C program that polls never yields its core. Where cores are few, the worker's thread is starved
(`SoftNic.expect_polling`). A thread that polls without success therefore makes a turn itself (`help_out`). The word
WORKER.taken is the lock: only the thread that holds it makes turns.
"""

from __future__ import annotations

from ...fabric.frames import PIPE, PipeEnd
from ...fabric.injector import FaultInjector
from ...fabric.udp_records import MSG_DONTWAIT, MSG_NOSIGNAL
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    clock_ns, exchange64, fence_sys, futex_wait, ld16, ld32, ld64, ld_relaxed64, pause, st64, st_relaxed64,
    st_release64, yield_thread,
)
from ...jit.ops.calls import external
from ..memory.streams import copies_in_flight
from ..queues.wakeups import wake_threads
from ..state.cq import CHANNEL, Channel
from ..state.wire import WIRE, WireState
from ..state.work_queue import entry
from ..state.worker import WORKER, WorkerState
from ..transport.wire_kinds import has_pipe_in, is_to_wake, pump_in, pump_out
from ..turn.turn import scan, turn, wake_poster
from ..turn.work_queues import waits

_poll = external("poll", 64, 64, 32, ret=32)
_send = external("send", 32, 64, 64, 32, ret=64)
_recv = external("recv", 32, 64, 64, 32, ret=64)
_write = external("write", 32, 64, 64, ret=64)
_pthread_self = external("pthread_self", ret=64)

SCAN_EVERY = 256  # idle turns between scans of all doorbell records
NOTIFICATIONS = 16  # received from a notifier at a time: net.unix.max_dgram_qlen is 10 by default
MOST_TRUST_NS = 200_000  # longest nap of the worker's thread while polling threads make the turns


@engine_function
def _work_left(worker: WorkerState) -> bool:
    """Return whether work remains that needs more turns.

    A WQE waits for a retry or an acknowledgement, a response waits for room, copies are in flight, or the fault
    injector holds frames.
    """
    if worker.pending_count != 0 or (worker.stream_count != 0 and copies_in_flight(worker)):
        return True
    for i in range(worker.wire_count):
        w = WireState(ld64(worker.wires + 8 * i))
        if w.faults != 0 and FaultInjector(w.faults).held != 0:
            return True
    for i in range(worker.active_count):
        w = entry(worker, i)
        if w.awake != 0 and waits(w.kind, w.row):
            return True
    return False


@engine_function
def _set_asleep(worker: WorkerState, asleep: int) -> None:
    """Announce to the NICs of this host and to posters of this process whether they have to wake this engine.

    No later load moves before these stores: on x86 because the last store is an exchange, on Arm because of the fence.
    """
    for i in range(worker.wire_count):
        wire = ld64(worker.wires + 8 * i)
        if has_pipe_in(wire):
            st_relaxed64(PipeEnd(wire + WIRE.rx).pipe + PIPE.asleep, asleep)
    exchange64(worker + WORKER.asleep, asleep)
    fence_sys()


@device_function
def _has_queues(worker: WorkerState) -> bool:
    """Return whether the worker serves any doorbell. Commands, which can change this, wake the worker."""
    return worker.active_count + worker.cq_count + worker.uars != 0


@engine_function
def _sleep(worker: WorkerState) -> None:
    """Sleep until a notification or a datagram arrives.

    With queues, sleep at most `sleep_ms`: a kernel that rings a doorbell cannot wake a thread.
    """
    if _poll(worker.pollfds, worker.pollfd_count, worker.sleep_ms if _has_queues(worker) else -1) > 0:
        for i in range(worker.event_count):
            if ld16(worker.pollfds + 8 * i + 6) != 0:
                _drain_notifications(worker, ld32(worker.pollfds + 8 * i))


@device_function
def _may_ring(worker: WorkerState) -> bool:
    """Return whether a running kernel may ring a doorbell of this worker."""
    return ld_relaxed64(worker + WORKER.busy) > 0 and _has_queues(worker)


@engine_function
def _drain_notifications(worker: WorkerState, fd: int) -> None:
    """Receive pending notifications (fabric/notifier.py). Any beyond NOTIFICATIONS wake the engine again."""
    for _ in range(NOTIFICATIONS):
        if _recv(fd, worker + WORKER.word, 1, MSG_DONTWAIT) < 0:
            break


@engine_function
def _wake_peers(worker: WorkerState) -> None:
    """Wake the peers' engines that sleep while frames for them are in the pipe."""
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        if is_to_wake(wire):
            wire.woken = PipeEnd(wire + WIRE.tx).position
            # If the notifier's queue is full, the send fails, but the peer wakes all the same.
            _send(wire.wake_fd, worker + WORKER.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)


@engine_function
def _notify_service(worker: WorkerState) -> None:
    """Wake the service thread to read the error records."""
    worker.error_event = 0
    st64(worker + WORKER.word, 1)
    _write(worker.service_fd, worker + WORKER.word, 8)


@engine_function
def _notify_channels(worker: WorkerState) -> None:
    """Add the events of this turn to the eventfds of their channels."""
    for i in range(worker.ringing_count):
        channel = Channel(ld64(worker.ringing + 8 * i))
        st64(worker + WORKER.word, exchange64(channel + CHANNEL.unheard, 0))
        _write(channel.fd, worker + WORKER.word, 8)
    worker.ringing_count = 0


@engine_function
def _make_turn(worker: WorkerState) -> int:
    """Make one turn, and wake the threads that wait for its results. Return the amount of work done, 0 if idle."""
    done = pump_in(worker) + turn(worker)
    if ld_relaxed64(worker + WORKER.awaited) != 0:
        wake_poster(worker)
    if worker.error_event != 0:
        _notify_service(worker)
    if worker.ringing_count != 0:
        _notify_channels(worker)
    if worker.waking != 0:
        wake_threads(worker)
    if worker.wire_count != 0:
        pump_out(worker)
        _wake_peers(worker)
    if done > 0:
        worker.idle = worker.idle_since = 0
    elif ld_relaxed64(worker + WORKER.hold) == 0:
        worker.idle += 1
        if worker.asleep != 0 or worker.idle & (SCAN_EVERY - 1) == 0:
            scan(worker)
    return done


@device_function
def _try_lock_turns(worker: WorkerState) -> bool:
    """Try to lock WORKER.taken, which gives the right to make turns. Return whether this thread has locked it."""
    return exchange64(worker + WORKER.taken, 1) == 0


@device_function
def _unlock_turns(worker: WorkerState) -> None:
    """Unlock WORKER.taken, so that other threads can make turns."""
    st_release64(worker + WORKER.taken, 0)


@device_function
def _nap(worker: WorkerState, nanos: int) -> None:
    """Sleep for `nanos` nanoseconds."""
    futex_wait(worker + WORKER.asleep, 0, nanos)


@engine_function
def _acquire_turns(worker: WorkerState) -> bool:
    """Lock WORKER.taken for the worker's thread. If other threads make the turns, nap and return False.

    Each nap in a row doubles `trust`, the length of the next nap. A worker that has announced its sleep makes its last
    turn itself.
    """
    helped = worker.asleep == 0 and clock_ns() - ld_relaxed64(worker + WORKER.helped_at) < worker.trust
    if not helped and _try_lock_turns(worker):
        return True
    worker.trust = min(2 * worker.trust, MOST_TRUST_NS)
    _nap(worker, worker.trust)
    return False


_NO_REST, _PAUSE, _YIELD, _NAP, _SLEEP = range(5)  # how a worker rests between two turns


@engine_function
def _rest_after(worker: WorkerState, done: int) -> int:
    """Return how the worker rests after a turn that did `done` work. Set and clear the announcement of its sleep.

    Before the worker sleeps, it announces the sleep and makes one more turn, for doorbells and frames that arrived
    before others could see the announcement.
    """
    if done > 0:
        if worker.asleep:
            _set_asleep(worker, 0)
        return _NO_REST
    if ld_relaxed64(worker + WORKER.hold) != 0:
        return _YIELD
    if worker.asleep:
        if not _may_ring(worker) and not _work_left(worker):
            return _SLEEP
        _set_asleep(worker, 0)
        return _NO_REST
    if worker.idle % worker.yield_every != 0:
        return _PAUSE
    if not _may_ring(worker):
        now = clock_ns()
        if worker.idle_since == 0:
            worker.idle_since = now
        elif now - worker.idle_since > worker.spin_ns and not _work_left(worker):
            _set_asleep(worker, 1)
            return _NO_REST
    return _NAP if worker.nap_ns != 0 else _YIELD


@engine_function
def _rest(worker: WorkerState, how: int) -> None:
    if how == _PAUSE:
        pause()
    elif how == _YIELD:
        yield_thread()
    elif how == _NAP:
        _nap(worker, worker.nap_ns)
    elif how == _SLEEP:
        _sleep(worker)


@engine_function
def run(worker: WorkerState) -> None:
    """Make turns for the NIC until WORKER.stop is set."""
    while ld_relaxed64(worker + WORKER.stop) == 0:
        has_helpers = worker.nap_ns != 0
        if has_helpers and not _acquire_turns(worker):
            continue
        done = _make_turn(worker)
        rest = _rest_after(worker, done)
        if has_helpers:
            if done > 0:
                worker.trust = worker.nap_ns
            _unlock_turns(worker)
        _rest(worker, rest)


@engine_function
def help_out(worker: WorkerState, posted: int) -> None:
    """Make a turn for the worker, unless another thread makes one. `posted`: the caller has posted, not just polled.

    If another thread is making a turn, yield, because that thread may wait for this core. A sleeping worker makes its
    own turns: arriving frames wake it, and so does this function if the caller has posted.
    """
    if not _try_lock_turns(worker):
        yield_thread()
    elif worker.asleep != 0:
        _unlock_turns(worker)
        if posted:
            _send(worker.kick_fd, worker + WORKER.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)
    else:
        worker.helper = _pthread_self()
        _make_turn(worker)
        worker.helper = 0
        worker.helped_at = clock_ns()
        _unlock_turns(worker)
