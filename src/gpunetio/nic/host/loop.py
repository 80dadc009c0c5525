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
)
from ...jit.ops.calls import external
from ..memory.streams import at_work
from ..queues.wakeups import wake_threads
from ..state.cq import CHANNEL, Channel
from ..state.wire import WIRE, WireState
from ..state.work_queue import WorkQueue, entry
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
NOTIFICATIONS = 16  # taken from a notifier at a time: net.unix.max_dgram_qlen is 10 by default
MOST_TRUST_NS = 200_000  # how long the worker's thread relies on threads that poll, at most


@engine_function
def _work_left(worker: WorkerState) -> bool:
    """Return whether a posted WQE waits for a retry or an acknowledgement, or other work waits for room."""
    if worker.pending_count != 0 or (worker.stream_count != 0 and at_work(worker)):
        return True
    for i in range(worker.wire_count):
        w = WireState(ld64(worker.wires + 8 * i))
        if w.faults != 0 and faults_at(w.faults).held != 0:
            return True
    for i in range(worker.active_count):
        w = WorkQueue(entry(worker, i))
        if w.awake != 0 and waits(w.kind, w.row):
            return True
    return False


@engine_function
def _set_asleep(worker: WorkerState, asleep: int) -> None:
    """Tell the NICs of this host, and posters of this process, whether they have to wake this engine.

    No later load moves before these stores: on x86 because the last one is an exchange, on Arm because of the fence.
    """
    for i in range(worker.wire_count):
        wire = ld64(worker.wires + 8 * i)
        if has_pipe_in(wire):
            st_relaxed64(pipe_end_at(wire + WIRE.rx).pipe + PIPE.asleep, asleep)
    exchange64(worker + WORKER.asleep, asleep)
    fence_sys()


@device_function
def _has_queues(worker: WorkerState) -> bool:
    """Return whether a doorbell may ring that this worker serves. Commands, which change that, wake it."""
    return worker.active_count + worker.cq_count + worker.uars != 0


@engine_function
def _sleep(worker: WorkerState) -> None:
    """Sleep until a kick or a datagram, for `sleep_ms` at most: a doorbell rung by a kernel cannot wake a thread."""
    if _poll(worker.pollfds, worker.pollfd_count, worker.sleep_ms if _has_queues(worker) else -1) > 0:
        for i in range(worker.event_count):
            if ld16(worker.pollfds + 8 * i + 6) != 0:
                _take_notifications(worker, ld32(worker.pollfds + 8 * i))


@device_function
def _may_ring(worker: WorkerState) -> bool:
    """Return whether a kernel that runs may ring a doorbell of this worker."""
    return ld_relaxed64(worker + WORKER.busy) > 0 and _has_queues(worker)


@engine_function
def _take_notifications(worker: WorkerState, fd: int) -> None:
    """Take notifications (fabric/notifier.py). If there are more than NOTIFICATIONS, the rest wake the engine again."""
    for _ in range(NOTIFICATIONS):
        if _recv(fd, worker + WORKER.word, 1, MSG_DONTWAIT) < 0:
            break


@engine_function
def _wake_peers(worker: WorkerState) -> None:
    """Wake the peers' engines that sleep while frames wait for them."""
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        if is_to_wake(wire):
            wire.woken = pipe_end_at(wire + WIRE.tx).position
            # A full queue wakes the peer, too.
            _send(wire.wake_fd, worker + WORKER.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)


@engine_function
def _ring_service(worker: WorkerState) -> None:
    """Wake the service thread, for which error records wait."""
    worker.error_event = 0
    st64(worker + WORKER.word, 1)
    _write(worker.service_fd, worker + WORKER.word, 8)


@engine_function
def _ring_channels(worker: WorkerState) -> None:
    """Add the events of this turn to the eventfds of their channels."""
    for i in range(worker.ringing_count):
        channel = Channel(ld64(worker.ringing + 8 * i))
        st64(worker + WORKER.word, exchange64(channel + CHANNEL.unheard, 0))
        _write(channel.fd, worker + WORKER.word, 8)
    worker.ringing_count = 0


@engine_function
def _look(worker: WorkerState) -> int:
    """Make one turn, and wake all who wait for what was done in it: return how much was done."""
    done = pump_in(worker) + turn(worker)
    if ld_relaxed64(worker + WORKER.awaited) != 0:
        wake_poster(worker)
    if worker.error_event != 0:
        _ring_service(worker)
    if worker.ringing_count != 0:
        _ring_channels(worker)
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
def _take_turns(worker: WorkerState) -> bool:
    """Take the right to make turns, if no thread has it: return whether this one has it now."""
    return exchange64(worker + WORKER.taken, 1) == 0


@device_function
def _give_turns(worker: WorkerState) -> None:
    """Let other threads make turns."""
    st_release64(worker + WORKER.taken, 0)


@device_function
def _nap(worker: WorkerState, nanos: int) -> None:
    """Sleep for so long."""
    futex_wait(worker + WORKER.asleep, 0, nanos)


@engine_function
def _turns_are_mine(worker: WorkerState) -> bool:
    """Take the right to make turns, for the worker's thread; or nap, and return False, while others make them.

    The more often it finds that they do, the longer it naps (`trust`). A worker that has announced that it sleeps makes
    its last turn before that itself.
    """
    helped = worker.asleep == 0 and clock_ns() - ld_relaxed64(worker + WORKER.helped_at) < worker.trust
    if not helped and _take_turns(worker):
        return True
    worker.trust = min(2 * worker.trust, MOST_TRUST_NS)
    _nap(worker, worker.trust)
    return False


_NO_REST, _PAUSE, _YIELD, _NAP, _SLEEP = range(5)  # how a worker rests between two turns


@engine_function
def _rest_after(worker: WorkerState, done: int) -> int:
    """Return how the worker rests after a turn that has done so much. Here it falls asleep, and wakes up.

    Before it sleeps, it announces that and takes one more turn, for doorbells and frames from before anyone could see
    the announcement.
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
    """Be a worker of the NIC until `stop` is set."""
    while ld_relaxed64(worker + WORKER.stop) == 0:
        has_helpers = worker.nap_ns != 0
        if has_helpers and not _turns_are_mine(worker):
            continue
        done = _look(worker)
        rest = _rest_after(worker, done)
        if has_helpers:
            if done > 0:
                worker.trust = worker.nap_ns
            _give_turns(worker)
        _rest(worker, rest)


@engine_function
def help_out(worker: WorkerState, posted: int) -> None:
    """Make a turn for the worker, if no other thread makes one. `posted`: the thread has posted, and not just polled.

    If another thread makes a turn, it may wait for this core. A worker that sleeps makes its turns itself: what arrives
    wakes it, and so does a thread that has posted.
    """
    if not _take_turns(worker):
        yield_thread()
    elif worker.asleep != 0:
        _give_turns(worker)
        if posted:
            _send(worker.kick_fd, worker + WORKER.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)
    else:
        worker.helper = _pthread_self()
        _look(worker)
        worker.helper = 0
        worker.helped_at = clock_ns()
        _give_turns(worker)
