"""The engine: the thread that is the NIC. It turns `step` over, without the GIL, and sleeps when nothing is to do."""

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

from ..device.compile import engine_function
from ..device.ops import (
    clock_ns, exchange64, ld16, ld32, ld64, ld_relaxed64, pause, st64, st_relaxed64, st_release64, yield_thread,
)  # fmt: skip
from ..errors import BadStateError, FullError, TimedOutError
from ..fabric.bell import Bell
from ..fabric.frames import PIPE, pipe_end_at
from ..fabric.injector import faults_at
from ..fabric.udp_records import MSG_DONTWAIT, MSG_NOSIGNAL
from ..memory import HostMemory
from ..service import STOP_TIMEOUT, ServiceThread
from . import lost_memory
from .step import TOO_FULL, WRITE_ROW, WRONG_STATE, scan_records, step
from .datagrams import receive_datagrams, send_datagrams
from .doorbells import RTS
from .movers import at_work
from .tables import NIC, PIPES, QP_ROW, WIRE, Table, channel_at, nic_at, qp_row_at, watch_at, wire_at
from .watch import entry

_poll = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))
_send = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.uint64, types.int32))
_recv = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.uint64, types.int32))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.uint64))

FEW_CORES = 4
SCAN_EVERY = 256  # idle turns between looks at all doorbell records
MAX_POLLED = 80  # one for each wire, the UDP sockets, and our own
POLLFD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
RINGS = 16  # of one bell, which are taken at a time: net.unix.max_dgram_qlen is 10, if nobody has changed it
_PR_SET_TIMERSLACK = 29


@engine_function
def _work_left(nic):
    """Whether a posted WQE waits for a retry or for an acknowledgement, or something else waits for room."""
    n = nic_at(nic)
    if n.due_count != 0 or (n.mover_count != 0 and at_work(nic)):
        return True
    for i in range(n.wire_count):
        w = wire_at(ld64(n.wires + 8 * i))
        if w.faults != 0 and faults_at(w.faults).held != 0:
            return True
    for i in range(n.active_count):
        w = watch_at(entry(nic, i))
        if w.awake != 0:
            q = qp_row_at(w.row)
            if q.sq_ci != q.sq_pi and q.state >= RTS:
                return True
    return False


@engine_function
def _set_asleep(nic, asleep):
    """Tell the NICs of this host, and posters of this process, whether they have to wake this engine.

    An exchange, because what is looked at afterwards must not be looked at before.
    """
    n = nic_at(nic)
    exchange64(nic + NIC.asleep, asleep)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if wire_at(wire).kind == PIPES:
            st_relaxed64(pipe_end_at(wire + WIRE.rx).pipe + PIPE.asleep, asleep)


@engine_function
def _sleep(nic):
    """Sleep until kicked, until a datagram comes, or for `sleep_ms`: a kernel's doorbell cannot wake a thread."""
    n = nic_at(nic)
    if _poll(n.pollfds, n.pollfd_count, n.sleep_ms) > 0:
        for i in range(n.event_count):
            if ld16(n.pollfds + 8 * i + 6) != 0:
                _take_rings(nic, ld32(n.pollfds + 8 * i))


@engine_function
def _take_rings(nic, fd):
    """Take the rings of a bell (fabric/bell.py). More than RINGS wake the engine once more."""
    for _ in range(RINGS):
        if _recv(fd, nic + NIC.word, 1, MSG_DONTWAIT) < 0:
            break


@engine_function
def _wake_peers(nic):
    """Wake the engines that sleep while there are frames for them."""
    n = nic_at(nic)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        w = wire_at(wire)
        e = pipe_end_at(wire + WIRE.tx)
        if w.wake_fd != 0 and w.woken != e.position and ld_relaxed64(e.pipe + PIPE.asleep) != 0:
            w.woken = e.position
            _send(w.wake_fd, nic + NIC.word, 1, MSG_DONTWAIT | MSG_NOSIGNAL)  # a full queue wakes the peer, too


@engine_function
def _ring_service(nic):
    """Wake the service thread: error records wait."""
    n = nic_at(nic)
    n.error_event = 0
    st64(nic + NIC.word, 1)
    _write(n.service_fd, nic + NIC.word, 8)


@engine_function
def _ring_channels(nic):
    """Count the events of this turn on the descriptors of their channels."""
    n = nic_at(nic)
    for i in range(n.ringing_count):
        c = channel_at(ld64(n.ringing + 8 * i))
        st64(nic + NIC.word, c.unheard)
        c.unheard = 0
        _write(c.fd, nic + NIC.word, 8)
    n.ringing_count = 0


@engine_function
def run(nic):
    """Serve the NIC until told to stop.

    Before it sleeps it says so, and has one more turn, for what was rung or published before anybody could see that.
    """
    n = nic_at(nic)
    idle = 0
    idle_since = 0
    while ld_relaxed64(nic + NIC.stop) == 0:
        done = receive_datagrams(nic) + step(nic)
        if n.error_event != 0:
            _ring_service(nic)
        if n.ringing_count != 0:
            _ring_channels(nic)
        if n.wire_count != 0:
            send_datagrams(nic)
            _wake_peers(nic)
        if done > 0:
            idle = 0
            idle_since = 0
            if n.asleep:
                _set_asleep(nic, 0)
            continue
        if n.asleep:
            scan_records(nic)
            if ld_relaxed64(nic + NIC.busy) > 0 or _work_left(nic):
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
        if ld_relaxed64(nic + NIC.busy) > 0:
            continue
        now = clock_ns()
        if idle_since == 0:
            idle_since = now
        elif now - idle_since > n.spin_ns and not _work_left(nic):
            _set_asleep(nic, 1)


@engine_function
def post_command(nic, op, row, source, nbytes, state):
    n = nic_at(nic)
    n.command_op, n.command_row, n.command_src = op, row, source
    n.command_bytes, n.command_state = nbytes, state
    st_release64(nic + NIC.command_seq, n.command_seq + 1)


def yield_every() -> int:
    """Idle turns after which an engine gives others the core.

    Two processes with an engine and a kernel each are four threads. Where they share few cores, a message goes on when
    whoever waits gives way: 2 instead of 16 turns took 40 % off its way over UDP.
    """
    return 2 if len(os.sched_getaffinity(0)) < FEW_CORES else 16


def compile_engine() -> None:
    """Compile what an engine runs, or load it from the cache: no command has to wait for that."""
    run.compile((types.int64,))
    post_command.compile((types.int64,) * 6)
    lost_memory.handler()


class Engine:
    """The thread, which `start()` starts, and the door through which commands reach it.

    `memory` is the tables of keys and UMEMs, which say whose memory it touches.
    """

    def __init__(self, name: str, nic_record: np.void, address: int, memory: tuple[Table, Table]):
        self._name, self._nic, self._address, self._memory = name, nic_record, address, memory
        with contextlib.ExitStack() as undo:
            self._staging, self._pollfds = HostMemory(QP_ROW.size), HostMemory(MAX_POLLED * POLLFD.itemsize)
            undo.callback(self._staging.close)
            undo.callback(self._pollfds.close)
            self._bell: Bell | None = Bell()
            undo.pop_all()
        self._lock = threading.Lock()  # one command at a time
        self._kick_lock = threading.Lock()  # kernels end whenever they like, also while the NIC closes
        nic_record["kick_fd"] = self._bell.rope
        self._pollfds.view(POLLFD)[0] = (self._bell.fd, select.POLLIN, 0)
        nic_record["pollfds"], nic_record["pollfd_count"], nic_record["event_count"] = self._pollfds.address, 1, 1
        nic_record["yield_every"] = yield_every()
        compile_engine()
        self._thread = ServiceThread(f"gpunetio {name} engine", self._run)

    def start(self) -> None:
        """Serve the NIC from now on, until `stop()`."""
        self._nic["stop"] = 0
        self._thread.start()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        with lost_memory.named(self._name, *self._memory):
            run(self._address)

    @property
    def kick_fd(self) -> int:
        """The rope of the bell that wakes the engine: for NICs that lay a wire to this one."""
        return int(self._nic["kick_fd"])

    def watch(self, events: Sequence[int], sockets: Sequence[int]) -> None:
        """Besides kicks, wake the engine by these bells, and when something can be read from these sockets."""
        fds = (*events, *sockets)
        table = np.array([(fd, select.POLLIN, 0) for fd in fds], POLLFD)
        counts = np.array([1 + len(fds), 1 + len(events)], np.int64)
        self.post(WRITE_ROW, self._address + NIC.pollfd_count, np.ones(2, np.int64))
        self.post(WRITE_ROW, self._pollfds.address + POLLFD.itemsize, table)
        self.post(WRITE_ROW, self._address + NIC.pollfd_count, counts)

    def kick(self) -> None:
        """Wake the engine if it sleeps."""
        with self._kick_lock:
            if self._bell is not None:
                self._bell.ring()

    def doorbell_rung(self) -> None:
        """A thread of this process has rung a doorbell: wake the engine if it sleeps.

        In a race that is lost the engine finds the doorbell when it wakes by itself. What releases a lock after ringing
        loses none where that is a fence, as on x86.
        """
        if self._nic["asleep"]:
            self.kick()

    def busy(self, change: int) -> None:
        """Kernels have been launched (+1) or have ended (-1): the engine spins while there are any."""
        with self._kick_lock:
            self._nic["busy"] = max(0, int(self._nic["busy"]) + change)  # of those launched since it opened
        self.kick()

    def post(
        self, op: int, row: int, prepared: np.ndarray | None = None, state: int = 0, timeout: float = 10.0
    ) -> None:
        """Have the engine carry out `op` on `row` between two WQEs; `prepared` is the row's new content.

        Returns once it is done: from then on the engine touches nothing that the old row named. BadStateError when the
        row has left `state` meanwhile; FullError when a ring is too small; TimedOutError when the engine does not
        answer.
        """
        with self._lock:
            end = time.monotonic() + timeout
            self._wait(end, timeout)
            data = b"" if prepared is None else prepared.tobytes()
            self._staging.array[: len(data)] = np.frombuffer(data, np.uint8)
            post_command(self._address, op, row, self._staging.address, len(data), state)
            self.kick()
            self._wait(end, timeout)
            if int(self._nic["command_result"]) == WRONG_STATE:
                raise BadStateError("the QP has changed state since it was looked at: it is in ERR")
            if int(self._nic["command_result"]) == TOO_FULL:
                raise FullError("the queue holds more than the old ring or the new one has room for")

    def settle(self) -> None:
        """Return when the turn that the engine is in is over, and what it sends behind that."""
        for _ in range(2):  # the first may be carried out in that very turn
            self.post(WRITE_ROW, self._address, np.zeros(0, np.int64))

    def _wait(self, end: float, timeout: float) -> None:
        polls = 0
        while int(self._nic["command_done"]) != int(self._nic["command_seq"]):
            polls += 1
            if polls > 500:
                time.sleep(50e-6)
            elif polls > 20:
                os.sched_yield()  # an engine that is awake answers within microseconds, a sleep takes a hundred
            if time.monotonic() > end:
                raise TimedOutError(
                    f"the engine of {self._name} did not answer a command within {timeout:g} s: "
                    "it is in the middle of a very large copy, or starved of CPU time"
                )

    @property
    def running(self) -> bool:
        """Whether the thread serves the NIC, and may touch whatever its tables name."""
        return self._thread.running

    def stop(self) -> None:
        """Stop the thread; afterwards nothing touches any memory.

        TimedOutError when the thread does not stop: nothing may be freed then, and `stop` can be called again.
        """
        self._nic["stop"] = 1
        self.kick()
        if not self._thread.join():
            raise TimedOutError(
                f"the engine of {self._name} did not stop within {STOP_TIMEOUT:g} s: it is in the middle of a very "
                "large copy, or starved of CPU time; nothing that it uses was freed, so close the device again"
            )
        with self._kick_lock:
            bell, self._bell = self._bell, None
            if bell is not None:
                bell.close()
        self._staging.close()
        self._pollfds.close()
