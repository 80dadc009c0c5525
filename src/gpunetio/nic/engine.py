"""The engine: the thread that is the NIC. It turns `step` over, without the GIL, and sleeps when nothing is to do."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
from numba import types

from ..device.compile import engine_function
from ..device.ops import clock_ns, ld64, ld_relaxed64, pause, st64, st_release64, yield_thread
from ..errors import BadStateError, TimedOutError
from ..memory import HostMemory
from .requester import RTS
from .step import WRONG_STATE, scan_records, step
from .tables import NIC, QP_ROW, nic_at, qp_row_at

_poll = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))
_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.uint64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.uint64))

YIELD_EVERY = 16  # idle turns between giving others the core
SCAN_EVERY = 256  # idle turns between looks at all doorbell records
_POLLIN = 1
_PR_SET_TIMERSLACK = 29


@engine_function
def _work_left(nic):
    """Whether a posted WQE waits for a retry or for a reply."""
    n = nic_at(nic)
    for i in range(n.active_count):
        q = qp_row_at(ld64(n.active + 8 * i))
        if q.sq_ci != q.sq_pi and q.state >= RTS:
            return True
    return False


@engine_function
def _sleep(nic):
    """Sleep until kicked, or for `sleep_ms`: a kernel's doorbell cannot wake a thread."""
    n = nic_at(nic)
    pollfd = nic + NIC.pollfd  # {int fd; short events; short revents}
    st64(pollfd, n.kick_fd | _POLLIN << 32)
    if _poll(pollfd, 1, n.sleep_ms) > 0:
        _read(n.kick_fd, pollfd, 8)


@engine_function
def _ring_service(nic):
    """Wake the service thread: error records wait."""
    n = nic_at(nic)
    n.error_event = 0
    st64(nic + NIC.pollfd, 1)
    _write(n.service_fd, nic + NIC.pollfd, 8)


@engine_function
def run(nic):
    """Serve the NIC until told to stop."""
    n = nic_at(nic)
    idle = 0
    idle_since = 0
    while ld_relaxed64(nic + NIC.stop) == 0:
        done = step(nic)
        if n.error_event != 0:
            _ring_service(nic)
        if done > 0:
            idle = 0
            idle_since = 0
            continue
        idle += 1
        if idle & (SCAN_EVERY - 1) == 0:
            scan_records(nic)
        if idle & (YIELD_EVERY - 1) != 0:
            pause()
            continue
        yield_thread()
        if ld_relaxed64(nic + NIC.busy) > 0:
            continue
        now = clock_ns()
        if idle_since == 0:
            idle_since = now
        elif now - idle_since > n.spin_ns and not _work_left(nic):
            scan_records(nic)
            if not _work_left(nic):
                _sleep(nic)


@engine_function
def _post(nic, op, row, source, nbytes, state):
    n = nic_at(nic)
    n.command_op, n.command_row, n.command_src = op, row, source
    n.command_bytes, n.command_state = nbytes, state
    st_release64(nic + NIC.command_seq, n.command_seq + 1)


class Engine:
    """The thread, and the door through which commands reach it."""

    def __init__(self, name: str, nic_record: np.void, address: int):
        self._name, self._nic, self._address = name, nic_record, address
        self._kick_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._staging = HostMemory(QP_ROW.size)
        self._lock = threading.Lock()  # one command at a time
        self._kick_lock = threading.Lock()  # kernels end whenever they like, also while the NIC closes
        nic_record["kick_fd"] = self._kick_fd
        nic_record["stop"] = 1
        run(address)  # compiles, or loads from the cache, and returns at once: no command has to wait for that
        nic_record["stop"] = 0
        self._thread = threading.Thread(target=self._run, name=f"gpunetio {name} engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        run(self._address)

    def kick(self) -> None:
        """Wake the engine if it sleeps."""
        with self._kick_lock:
            if self._kick_fd is not None:
                os.eventfd_write(self._kick_fd, 1)

    def busy(self, change: int) -> None:
        """Kernels have been launched (+1) or have ended (-1): the engine spins while there are any."""
        with self._kick_lock:
            self._nic["busy"] += change
        self.kick()

    def post(
        self, op: int, row: int, prepared: np.ndarray | None = None, state: int = 0, timeout: float = 10.0
    ) -> None:
        """Have the engine carry out `op` on `row` between two WQEs; `prepared` is the row's new content.

        Returns once it is done: from then on the engine touches nothing that the old row named. BadStateError when the
        row has left `state` meanwhile; TimedOutError when the engine does not answer.
        """
        with self._lock:
            end = time.monotonic() + timeout
            self._wait(end, timeout)
            data = b"" if prepared is None else prepared.tobytes()
            self._staging.array[: len(data)] = np.frombuffer(data, np.uint8)
            _post(self._address, op, row, self._staging.address, len(data), state)
            self.kick()
            self._wait(end, timeout)
            if int(self._nic["command_result"]) == WRONG_STATE:
                raise BadStateError("the QP has changed state since it was looked at: it is in ERR")

    def _wait(self, end: float, timeout: float) -> None:
        polls = 0
        while int(self._nic["command_done"]) != int(self._nic["command_seq"]):
            polls += 1
            if polls > 50:
                time.sleep(20e-6)
            if time.monotonic() > end:
                raise TimedOutError(
                    f"the engine of {self._name} did not answer a command within {timeout:g} s: "
                    "requests in flight are not answered by the peer, or the engine is starved of CPU time"
                )

    @property
    def running(self) -> bool:
        """Whether the thread serves the NIC."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread; afterwards nothing touches any memory."""
        self._nic["stop"] = 1
        self.kick()
        self._thread.join()
        with self._kick_lock:
            os.close(int(self._nic["kick_fd"]))
            self._kick_fd = None
        self._staging.close()
