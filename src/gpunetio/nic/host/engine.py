"""The engine on CPU threads. The threads make the NIC's turns without the GIL, and sleep when there is no work."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import BadStateError, DriverError, FullError, TimedOutError
from ...fabric.notifier import Notifier
from ...jit.compile import engine_function
from ...jit.ops import exchange64, fence_sys, futex_wait, ld_acquire64, ld_relaxed64, pause, st_release64
from ...memory import HostMemory
from ...service import STOP_TIMEOUT, ServiceThread
from ..engine.hardware import Engine, SharedMapping
from ..engine.slice_backend import SliceBackend
from ..memory import lost_memory
from ..state import extensions
from ..state.ethernet_queues import SQ_ROW
from ..state.tables import Row, Table
from ..state.worker import WORKER, WorkerState
from ..turn.commands import EngineCommand, Result
from .loop import run

FEW_CORES = 4
CORES_PER_WORKER, MOST_BY_DEFAULT = 4, 4
MAX_POLLED = 80  # descriptors: one per wire, the UDP sockets, and the engine's notifier
POLLFD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
_PR_SET_TIMERSLACK = 29
_SPINS = 50  # checks by a thread that waits for a command, before it sleeps
_LONGEST_SLEEP_NS = 10_000_000
_FUTEX_BITS = (1 << 32) - 1  # a futex compares the low 32 bits of the 64-bit word


@engine_function
def post_command(worker: WorkerState, op: int, row: int, source: int, nbytes: int, state: int) -> None:
    worker.command_op, worker.command_row, worker.command_src = op, row, source
    worker.command_bytes, worker.command_state = nbytes, state
    st_release64(worker + WORKER.command_seq, worker.command_seq + 1)


@engine_function
def count_kernels(worker: WorkerState, change: int) -> bool:
    """Count kernels that were launched or have ended. Return whether the worker sleeps or is about to sleep.

    The worker announces its sleep before it checks for running kernels (`loop._set_asleep`). This function counts
    before it checks for the announcement. Both have a fence in between, so at least one sees the other's store.
    """
    running = worker.busy + change
    exchange64(worker + WORKER.busy, running if running > 0 else 0)  # kernels launched before the NIC opened may end
    fence_sys()
    return ld_relaxed64(worker + WORKER.asleep) != 0


@engine_function
def await_command(worker: WorkerState, nanos: int) -> bool:
    """Wait about `nanos` nanoseconds at most for the posted command to complete. Return whether it has completed.

    The thread sleeps. If it yielded, it would get the core back only after all other threads, even spinning engines.
    An engine that executes the command before `awaited` is set does not wake the thread; the check after that sees it.
    """
    posted = ld_relaxed64(worker + WORKER.command_seq)
    for _ in range(_SPINS):
        if ld_acquire64(worker + WORKER.command_done) == posted:
            return True
        pause()
    exchange64(worker + WORKER.awaited, 1)
    done = ld_acquire64(worker + WORKER.command_done)
    if done != posted:
        futex_wait(worker + WORKER.command_done, done & _FUTEX_BITS, nanos)
        done = ld_acquire64(worker + WORKER.command_done)
    return done == posted


def few_cores() -> bool:
    """Return whether there are so few cores that engines share them with the threads that wait for the engines."""
    return len(os.sched_getaffinity(0)) < FEW_CORES


def yield_every() -> int:
    """Return how many idle turns an engine makes before it yields the core.

    Two processes with an engine and a kernel each have four threads. If these share few cores, a message makes progress
    only when a waiting thread yields: 2 turns instead of 16 reduced the latency over UDP by 40 %.
    """
    return 2 if few_cores() else 16


def default_workers() -> int:
    """Return the default number of threads of an engine: one per four cores, at most four.

    Kernels and the program also need cores, and one thread saturates the memory of a small machine.
    """
    return min(max(1, len(os.sched_getaffinity(0)) // CORES_PER_WORKER), MOST_BY_DEFAULT)


def compile_engine() -> None:
    """Compile the functions that every engine runs, or load them from the cache."""
    run.compile()
    post_command.compile()
    await_command.compile()
    count_kernels.compile()
    lost_memory.handler()


def compile_extensions() -> None:
    """Compile the optional functions that only some engines run, or load them from the cache."""
    for extension in extensions.ALL:
        extension.load()


class Worker:
    """A thread that runs `serve`, its WORKER record at `address`, and the memory through which it gets commands.

    `nic` is the NIC's name. `number` is the worker's number in the NIC's engine, from 0.
    """

    def __init__(self, nic: str, number: int, record: np.void, address: int, serve: Callable[[int], None]):
        self._who = f"the engine of {nic}" if number == 0 else f"worker {number} of the engine of {nic}"
        self.record, self.address = record, address
        with contextlib.ExitStack() as undo:
            self._staging, self._pollfds = HostMemory(SQ_ROW.size), HostMemory(MAX_POLLED * POLLFD.itemsize)
            undo.callback(self._staging.close)
            undo.callback(self._pollfds.close)
            self._notifier: Notifier | None = Notifier()
            undo.pop_all()
        self._is_first = number == 0
        self._kick_lock = threading.Lock()  # kernels may end at any time, also while the NIC closes
        record["kick_fd"] = self._notifier.notify_fd
        self._pollfds.view(POLLFD)[0] = (self._notifier.fd, select.POLLIN, 0)
        record["pollfds"], record["pollfd_count"], record["event_count"] = self._pollfds.address, 1, 1
        thread = f"gpunetio {nic} engine" + (f" {number}" if number else "")
        self._thread = ServiceThread(thread, lambda: serve(address))

    def start(self) -> None:
        """Start the thread."""
        self.record["stop"] = 0
        self._thread.start()

    @property
    def running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.running

    @property
    def has_queues(self) -> bool:
        """Return whether the worker may serve a queue: it serves one, or a command that can add one is pending."""
        r = self.record
        return bool(r["active_count"] or r["cq_count"] or r["command_done"] != r["command_seq"])

    @property
    def pollfds(self) -> int:
        """Return the address of the descriptors that wake the thread (struct pollfd). The first is the notifier's."""
        return self._pollfds.address

    def kick(self) -> None:
        """Wake the thread if it sleeps."""
        with self._kick_lock:
            if self._notifier is not None:
                self._notifier.notify()

    def wake(self) -> None:
        """Wake the thread to serve its queues. A worker without queues is not woken, except the first worker."""
        if self._is_first or self.has_queues:
            self.kick()

    def count_kernels(self, change: int) -> bool:
        """Count kernels that were launched or have ended. Return whether the thread sleeps or is about to sleep."""
        with self._kick_lock:
            return self._notifier is not None and bool(count_kernels(self.address, change))

    def post(self, op: int, row: int, prepared: Row | None, state: int) -> None:
        """Post a command. The previous command must have completed."""
        data = b"" if prepared is None else prepared.tobytes()
        self._staging.array[: len(data)] = np.frombuffer(data, np.uint8)
        post_command(self.address, op, row, self._staging.address, len(data), state)
        self.kick()

    def read_staging(self, nbytes: int) -> bytes:
        """Return `nbytes` of the staging memory, which holds the row of the last command."""
        return self._staging.array[:nbytes].tobytes()

    def wait(self, end: float, timeout: float) -> None:
        """Wait until the command has completed. TimedOutError when the monotonic clock reaches `end`.

        `timeout` is the whole time in seconds, for the message.
        """
        while not await_command(self.address, _LONGEST_SLEEP_NS):
            if time.monotonic() > end:
                raise TimedOutError(
                    f"{self._who} did not answer a command within {timeout:g} s: it is in the middle of a very large "
                    "copy, or starved of CPU time"
                )

    def ask_to_stop(self) -> None:
        """Request the thread to end. Does not wait for it."""
        self.record["stop"] = 1
        self.kick()

    def stop(self) -> None:
        """Stop the thread, which then touches no more memory. TimedOutError if it does not stop."""
        self.ask_to_stop()
        if not self._thread.join():
            raise TimedOutError(
                f"{self._who} did not stop within {STOP_TIMEOUT:g} s: it is in the middle of a very large copy, or "
                "starved of CPU time; nothing that it uses was freed, so close the device again"
            )

    def close(self) -> None:
        """Free the memory and the notifier of the thread, which must have stopped."""
        with self._kick_lock:
            notifier, self._notifier = self._notifier, None
            if notifier is not None:
                notifier.close()
        self._staging.close()
        self._pollfds.close()


class ThreadEngine(Engine):
    """An engine on threads of the host: one thread per record in `records`. The first record lies at `address`.

    `memory` contains the tables of memory keys and UMEMs, which name the memory that the engine touches. If there is a
    `backend`, it makes the turns in slices, so queues and payload may lie in memory that only slices reach.
    """

    def __init__(
        self, name: str, records: np.ndarray, address: int, memory: tuple[Table, Table], backend: SliceBackend | None
    ):
        self._name, self._memory, self._backend = name, memory, backend
        self._lock = threading.RLock()  # one command at a time
        compile_engine()
        self._workers: list[Worker] = []
        with contextlib.ExitStack() as undo:
            for i, record in enumerate(records):
                worker = Worker(name, i, record, address + i * WORKER.size, self._run)
                undo.callback(worker.close)
                record["next"] = address + (i + 1) * WORKER.size if i + 1 < len(records) else 0
                record["yield_every"] = yield_every()
                if backend:
                    backend.add(record, worker.address)
                self._workers.append(worker)
            undo.pop_all()

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def _run(self, address: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        with lost_memory.reporting(self._name, address + WORKER.helper, *self._memory):
            run(address)

    def reaches(self, address: int, nbytes: int) -> bool:
        return self._backend is not None and self._backend.contains(address, nbytes)

    @property
    def sharing(self) -> str:
        return self._backend.sharing if self._backend else ""

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
        return self._backend.share(address, nbytes) if self._backend else None

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> SharedMapping:
        assert self._backend
        return self._backend.open_shared(nbytes, handle, fds)

    def is_near(self, address: int, nbytes: int) -> bool:
        return self._backend is not None and self._backend.is_near(address, nbytes)

    def doorbell_lines(self, lines: HostMemory) -> int:
        return self._backend.doorbell_lines(lines) if self._backend else lines.address

    def map(self, address: int, nbytes: int) -> None:
        if self._backend and not self._backend.contains(address, nbytes):
            self._backend.map(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        if self._backend and not self._backend.contains(address, nbytes):
            self._backend.unmap(address, nbytes)

    def write_back(self) -> None:
        if self._backend:
            for i, worker in enumerate(self._workers):
                self.post(EngineCommand.WRITE_ROW, worker.address, worker=i)

    def read(self, address: int, nbytes: int) -> bytes:
        if not self.reaches(address, nbytes):
            return super().read(address, nbytes)
        with self._lock:
            self.post(EngineCommand.READ_ROW, address, np.zeros(nbytes, np.uint8))
            return self._workers[0].read_staging(nbytes)

    @property
    def workers(self) -> list[int]:
        return [worker.address for worker in self._workers]

    @property
    def kick_fd(self) -> int:
        return int(self._workers[0].record["kick_fd"])

    def watch(self, events: Sequence[int], sockets: Sequence[int]) -> None:
        first, fds = self._workers[0], (*events, *sockets)
        table = np.array([(fd, select.POLLIN, 0) for fd in fds], POLLFD)
        counts = np.array([1 + len(fds), 1 + len(events)], np.int64)
        self.post(EngineCommand.WRITE_ROW, first.address + WORKER.pollfd_count, np.ones(2, np.int64))
        self.post(EngineCommand.WRITE_ROW, first.pollfds + POLLFD.itemsize, table)
        self.post(EngineCommand.WRITE_ROW, first.address + WORKER.pollfd_count, counts)

    def kick(self) -> None:
        for worker in self._workers:
            worker.kick()

    def doorbell_rung(self) -> None:
        """Wake the sleeping workers that have queues, after a thread of this process has rung a doorbell.

        This can miss a worker that is about to sleep; that worker finds the doorbell when its sleep times out. A thread
        that releases a lock after ringing misses no worker if the release is a full fence, as on x86.
        """
        for worker in self._workers:
            if worker.record["asleep"]:
                worker.wake()

    def count_kernels(self, change: int) -> None:
        """Count kernels. A launch wakes the sleeping workers that have queues. The end of a kernel wakes no worker.

        Waking a worker costs a system call, and a spinning worker notices without it that the last kernel has ended.
        """
        for worker in self._workers:
            asleep = worker.count_kernels(change)
            if change > 0 and asleep:
                worker.wake()

    def post(
        self, op: int, row: int, prepared: Row | None = None, state: int = 0, timeout: float = 10.0,
        worker: int = 0,
    ) -> None:
        to = self._workers[worker]
        with self._lock:
            end = time.monotonic() + timeout
            self._check(to)
            to.wait(end, timeout)
            to.post(op, row, prepared, state)
            self._await(to, end, timeout)
            if int(to.record["command_result"]) == Result.WRONG_STATE:
                raise BadStateError("the queue has changed its state meanwhile: it is in ERR")
            if int(to.record["command_result"]) == Result.TOO_FULL:
                raise FullError("the queue holds more entries than the old ring or the new ring has room for")

    def _check(self, worker: Worker) -> None:
        """Raise DriverError if the worker can make no more turns."""
        if why := self._backend.why_failed(worker.record) if self._backend else "":
            raise DriverError(f"{self._name} makes no turns any more: {why}; start a new process")

    def _await(self, worker: Worker, end: float, timeout: float) -> None:
        try:
            worker.wait(end, timeout)
        except TimedOutError:
            self._check(worker)
            raise

    def post_alone(self, *commands: tuple[int, int, Row], timeout: float = 10.0) -> None:
        with self._lock:
            first, *others = self._workers
            # Workers without queues read no table. A worker that gets queues must wake only once it has all of them.
            moves = any(op == EngineCommand.MOVE_QP for op, *_ in commands)
            held = [worker for worker in others if moves or worker.has_queues]
            if held:
                held.append(first)  # a held worker makes no turns, so the commands do not wait for one
            end = time.monotonic() + timeout
            try:
                for worker in held:
                    worker.wait(end, timeout)
                for worker in held:
                    worker.record["hold"] = 1
                    worker.post(EngineCommand.WRITE_ROW, worker.address, None, 0)  # writes nothing: waits for a turn
                for worker in held:
                    worker.wait(end, timeout)
                for command in commands:
                    self.post(*command)
            finally:
                for worker in held:
                    worker.record["hold"] = 0

    def synchronize(self) -> None:
        for _ in range(2):  # the current turn may execute the first command, but not the second
            for i, worker in enumerate(self._workers):
                self.post(EngineCommand.WRITE_ROW, worker.address, worker=i)

    @property
    def running(self) -> bool:
        return any(worker.running for worker in self._workers)

    def stop(self) -> None:
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.close()
