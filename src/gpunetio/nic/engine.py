"""The engine: the thread that is the NIC. It repeats `step` without the GIL, and sleeps when there is nothing to do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Sequence

import numpy as np
from numba import types

from ..jit.compile import engine_function
from ..jit.ops import (
    clock_ns, exchange64, ld16, ld32, ld64, ld_relaxed64, pause, st64, st_relaxed64, st_release64, yield_thread,
)  # fmt: skip
from ..errors import BadStateError, FullError, TimedOutError
from ..fabric.notifier import Notifier
from ..fabric.frames import PIPE, pipe_end_at
from ..fabric.injector import faults_at
from ..fabric.udp_records import MSG_DONTWAIT, MSG_NOSIGNAL
from ..memory import HostMemory
from ..service import STOP_TIMEOUT, ServiceThread
from .dma import lost_memory
from .hardware import Engine
from .step import TOO_FULL, WRITE_ROW, WRONG_STATE, scan_records, step
from .transport.wire_kinds import has_pipe_in, pump_in, pump_out
from .dma.streams import at_work
from .state.cq import channel_at
from .state.worker import WORKER, worker_at
from .state.qp import QP_ROW
from .state.tables import Table
from .state.wire import WIRE, wire_at
from .state.work_queue import entry, work_queue_at
from .work_queues import waits

_poll = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))
_send = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.uint64, types.int32))
_recv = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.uint64, types.int32))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.uint64))

FEW_CORES = 4
SCAN_EVERY = 256  # idle turns between scans of all doorbell records
MAX_POLLED = 80  # descriptors: one per wire, the UDP sockets, and the engine's notifier
POLLFD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
NOTIFICATIONS = 16  # taken from a notifier at a time: net.unix.max_dgram_qlen is 10 by default
_PR_SET_TIMERSLACK = 29


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

    The store is an exchange, so that no later load moves before it.
    """
    n = worker_at(nic)
    exchange64(nic + WORKER.asleep, asleep)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if has_pipe_in(wire):
            st_relaxed64(pipe_end_at(wire + WIRE.rx).pipe + PIPE.asleep, asleep)


@engine_function
def _sleep(nic):
    """Sleep until a kick or a datagram, for `sleep_ms` at most: a doorbell rung by a kernel cannot wake a thread."""
    n = worker_at(nic)
    if _poll(n.pollfds, n.pollfd_count, n.sleep_ms) > 0:
        for i in range(n.event_count):
            if ld16(n.pollfds + 8 * i + 6) != 0:
                _take_notifications(nic, ld32(n.pollfds + 8 * i))


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
        w = wire_at(wire)
        e = pipe_end_at(wire + WIRE.tx)
        if w.wake_fd != 0 and w.woken != e.position and ld_relaxed64(e.pipe + PIPE.asleep) != 0:
            w.woken = e.position
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
        c = channel_at(ld64(n.ringing + 8 * i))
        st64(nic + WORKER.word, c.unheard)
        c.unheard = 0
        _write(c.fd, nic + WORKER.word, 8)
    n.ringing_count = 0


@engine_function
def run(nic):
    """Serve the NIC until `stop` is set.

    Before the engine sleeps, it announces that and takes one more turn, for doorbells and frames from before anyone
    could see the announcement.
    """
    n = worker_at(nic)
    idle = 0
    idle_since = 0
    while ld_relaxed64(nic + WORKER.stop) == 0:
        done = pump_in(nic) + step(nic)
        if n.error_event != 0:
            _ring_service(nic)
        if n.ringing_count != 0:
            _ring_channels(nic)
        if n.wire_count != 0:
            pump_out(nic)
            _wake_peers(nic)
        if done > 0:
            idle = 0
            idle_since = 0
            if n.asleep:
                _set_asleep(nic, 0)
            continue
        if n.asleep:
            scan_records(nic)
            if ld_relaxed64(nic + WORKER.busy) > 0 or _work_left(nic):
                _set_asleep(nic, 0)
            else:
                _sleep(nic)
            continue
        idle += 1
        if idle & (SCAN_EVERY - 1) == 0:
            scan_records(nic)
        if idle % n.yield_every != 0:
            pause()
            continue
        yield_thread()
        if ld_relaxed64(nic + WORKER.busy) > 0:
            continue
        now = clock_ns()
        if idle_since == 0:
            idle_since = now
        elif now - idle_since > n.spin_ns and not _work_left(nic):
            _set_asleep(nic, 1)


@engine_function
def post_command(nic, op, row, source, nbytes, state):
    n = worker_at(nic)
    n.command_op, n.command_row, n.command_src = op, row, source
    n.command_bytes, n.command_state = nbytes, state
    st_release64(nic + WORKER.command_seq, n.command_seq + 1)


def yield_every() -> int:
    """Return how many idle turns an engine takes before it yields the core.

    Two processes with an engine and a kernel each are four threads. If they share few cores, a message makes progress
    only when a waiting thread yields: 2 turns instead of 16 took 40 % off its latency over UDP.
    """
    return 2 if len(os.sched_getaffinity(0)) < FEW_CORES else 16


def compile_engine() -> None:
    """Compile what an engine runs, or load it from the cache, so that no command has to wait for it."""
    run.compile((types.int64,))
    post_command.compile((types.int64,) * 6)
    lost_memory.handler()


class ThreadEngine(Engine):
    """An engine that is a thread of the host, and the way in which commands reach it.

    `memory` are the tables of keys and UMEMs, which name the memory that the engine touches.
    """

    def __init__(self, name: str, nic_record: np.void, address: int, memory: tuple[Table, Table]):
        self._name, self._nic, self._address, self._memory = name, nic_record, address, memory
        with contextlib.ExitStack() as undo:
            self._staging, self._pollfds = HostMemory(QP_ROW.size), HostMemory(MAX_POLLED * POLLFD.itemsize)
            undo.callback(self._staging.close)
            undo.callback(self._pollfds.close)
            self._notifier: Notifier | None = Notifier()
            undo.pop_all()
        self._lock = threading.Lock()  # one command at a time
        self._kick_lock = threading.Lock()  # kernels may end at any time, also while the NIC closes
        nic_record["kick_fd"] = self._notifier.notify_fd
        self._pollfds.view(POLLFD)[0] = (self._notifier.fd, select.POLLIN, 0)
        nic_record["pollfds"], nic_record["pollfd_count"], nic_record["event_count"] = self._pollfds.address, 1, 1
        nic_record["yield_every"] = yield_every()
        compile_engine()
        self._thread = ServiceThread(f"gpunetio {name} engine", self._run)

    def start(self) -> None:
        self._nic["stop"] = 0
        self._thread.start()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        with lost_memory.named(self._name, *self._memory):
            run(self._address)

    @property
    def kick_fd(self) -> int:
        return int(self._nic["kick_fd"])

    def watch(self, events: Sequence[int], sockets: Sequence[int]) -> None:
        fds = (*events, *sockets)
        table = np.array([(fd, select.POLLIN, 0) for fd in fds], POLLFD)
        counts = np.array([1 + len(fds), 1 + len(events)], np.int64)
        self.post(WRITE_ROW, self._address + WORKER.pollfd_count, np.ones(2, np.int64))
        self.post(WRITE_ROW, self._pollfds.address + POLLFD.itemsize, table)
        self.post(WRITE_ROW, self._address + WORKER.pollfd_count, counts)

    def kick(self) -> None:
        with self._kick_lock:
            if self._notifier is not None:
                self._notifier.notify()

    def doorbell_rung(self) -> None:
        """Wake the engine if it sleeps: a thread of this process has rung a doorbell.

        If this misses an engine that is about to sleep, the engine finds the doorbell when it wakes by itself. A thread
        that releases a lock after ringing misses none if the release is a full fence, as on x86.
        """
        if self._nic["asleep"]:
            self.kick()

    def busy(self, change: int) -> None:
        with self._kick_lock:
            self._nic["busy"] = max(0, int(self._nic["busy"]) + change)  # kernels from before it opened may end
        self.kick()

    def post(
        self, op: int, row: int, prepared: np.ndarray | None = None, state: int = 0, timeout: float = 10.0
    ) -> None:
        with self._lock:
            end = time.monotonic() + timeout
            self._wait(end, timeout)
            data = b"" if prepared is None else prepared.tobytes()
            self._staging.array[: len(data)] = np.frombuffer(data, np.uint8)
            post_command(self._address, op, row, self._staging.address, len(data), state)
            self.kick()
            self._wait(end, timeout)
            if int(self._nic["command_result"]) == WRONG_STATE:
                raise BadStateError("the QP has changed its state meanwhile: it is in ERR")
            if int(self._nic["command_result"]) == TOO_FULL:
                raise FullError("the queue holds more entries than the old ring or the new ring has room for")

    def settle(self) -> None:
        for _ in range(2):  # the current turn may still execute the first
            self.post(WRITE_ROW, self._address, np.zeros(0, np.int64))

    def _wait(self, end: float, timeout: float) -> None:
        polls = 0
        while int(self._nic["command_done"]) != int(self._nic["command_seq"]):
            polls += 1
            if polls > 500:
                time.sleep(50e-6)
            elif polls > 20:
                os.sched_yield()  # an engine that is awake answers within microseconds; a sleep takes a hundred
            if time.monotonic() > end:
                raise TimedOutError(
                    f"the engine of {self._name} did not answer a command within {timeout:g} s: "
                    "it is in the middle of a very large copy, or starved of CPU time"
                )

    @property
    def running(self) -> bool:
        return self._thread.running

    def stop(self) -> None:
        self._nic["stop"] = 1
        self.kick()
        if not self._thread.join():
            raise TimedOutError(
                f"the engine of {self._name} did not stop within {STOP_TIMEOUT:g} s: it is in the middle of a very "
                "large copy, or starved of CPU time; nothing that it uses was freed, so close the device again"
            )
        with self._kick_lock:
            notifier, self._notifier = self._notifier, None
            if notifier is not None:
                notifier.close()
        self._staging.close()
        self._pollfds.close()
