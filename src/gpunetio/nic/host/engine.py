"""The engine: the threads that are the NIC. They repeat `step` without the GIL, and sleep when there is no work."""

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
from ..engine.hardware import Engine, Opened
from ..engine.place import Place
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
_LOOKS = 50  # of a thread that waits for a command, before it sleeps
_LONGEST_SLEEP_NS = 10_000_000
_FUTEX_BITS = (1 << 32) - 1  # of the word, which has 64


@engine_function
def post_command(worker: WorkerState, op: int, row: int, source: int, nbytes: int, state: int) -> None:
    worker.command_op, worker.command_row, worker.command_src = op, row, source
    worker.command_bytes, worker.command_state = nbytes, state
    st_release64(worker + WORKER.command_seq, worker.command_seq + 1)


@engine_function
def count_kernels(worker: WorkerState, change: int) -> bool:
    """Count kernels that were launched or have ended. Return whether the worker sleeps, or is about to.

    The worker announces its sleep before it looks whether kernels run (`loop._set_asleep`). This counts before it looks
    for the announcement, with the same fences in between. So one of both sees the other's store.
    """
    running = worker.busy + change
    exchange64(worker + WORKER.busy, running if running > 0 else 0)  # kernels from before it opened may end
    fence_sys()
    return ld_relaxed64(worker + WORKER.asleep) != 0


@engine_function
def await_command(worker: WorkerState, nanos: int) -> bool:
    """Wait until the command that was posted is executed, for about `nanos` at most. Return whether it is.

    The thread sleeps: if it yielded instead, it would get the core back only after all others, spinning engines too.
    An engine that has executed the command before `awaited` was set does not wake it, but then this sees that.
    """
    posted = ld_relaxed64(worker + WORKER.command_seq)
    for _ in range(_LOOKS):
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
    """Return whether engines have to share their cores with threads that wait for them."""
    return len(os.sched_getaffinity(0)) < FEW_CORES


def yield_every() -> int:
    """Return how many idle turns an engine takes before it yields the core.

    Two processes with an engine and a kernel each are four threads. If they share few cores, a message makes progress
    only when a waiting thread yields: 2 turns instead of 16 took 40 % off its latency over UDP.
    """
    return 2 if few_cores() else 16


def default_workers() -> int:
    """Return how many threads an engine has unless the port says so: one for each four cores, and four at most.

    Kernels and the program need cores, too, and one thread saturates the memory of a small machine.
    """
    return min(max(1, len(os.sched_getaffinity(0)) // CORES_PER_WORKER), MOST_BY_DEFAULT)


def compile_engine() -> None:
    """Compile what each engine runs, or load it from the cache."""
    run.compile()
    post_command.compile()
    await_command.compile()
    count_kernels.compile()
    lost_memory.handler()


def compile_extensions() -> None:
    """Compile what some engines run besides, or load it from the cache."""
    for extension in extensions.ALL:
        extension.load()


class Worker:
    """A thread that runs `serve`, its WORKER record at `address`, and the way in which commands reach it.

    `number` counts from 0 in the engine of the NIC `nic`.
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
        """Return whether the worker serves any queue. If it has not answered a command, it may."""
        r = self.record
        return bool(r["active_count"] or r["cq_count"] or r["command_done"] != r["command_seq"])

    @property
    def pollfds(self) -> int:
        """Return the address of the descriptors that wake the thread; the first is its notifier's."""
        return self._pollfds.address

    def kick(self) -> None:
        """Wake the thread if it sleeps."""
        with self._kick_lock:
            if self._notifier is not None:
                self._notifier.notify()

    def wake(self) -> None:
        """Wake the thread for what is posted to queues, if it has any. The first one is woken in any case."""
        if self._is_first or self.has_queues:
            self.kick()

    def busy(self, change: int) -> bool:
        """Count kernels that were launched or have ended. Return whether the thread may sleep."""
        with self._kick_lock:
            return self._notifier is not None and bool(count_kernels(self.address, change))

    def begin(self, op: int, row: int, prepared: Row | None, state: int) -> None:
        """Post a command. The one before must have been executed."""
        data = b"" if prepared is None else prepared.tobytes()
        self._staging.array[: len(data)] = np.frombuffer(data, np.uint8)
        post_command(self.address, op, row, self._staging.address, len(data), state)
        self.kick()

    def prepared(self, nbytes: int) -> bytes:
        """Return what lies where a command's row was prepared."""
        return self._staging.array[:nbytes].tobytes()

    def wait(self, end: float, timeout: float) -> None:
        """Wait until the command is executed, or until the monotonic clock is at `end`, the end of `timeout`."""
        while not await_command(self.address, _LONGEST_SLEEP_NS):
            if time.monotonic() > end:
                raise TimedOutError(
                    f"{self._who} did not answer a command within {timeout:g} s: it is in the middle of a very large "
                    "copy, or starved of CPU time"
                )

    def ask_to_stop(self) -> None:
        """Have the thread end."""
        self.record["stop"] = 1
        self.kick()

    def stop(self) -> None:
        """Stop the thread. Afterwards it touches no memory. TimedOutError if it does not stop."""
        self.ask_to_stop()
        if not self._thread.join():
            raise TimedOutError(
                f"{self._who} did not stop within {STOP_TIMEOUT:g} s: it is in the middle of a very large copy, or "
                "starved of CPU time; nothing that it uses was freed, so close the device again"
            )

    def close(self) -> None:
        """Free what belongs to the thread, which has stopped."""
        with self._kick_lock:
            notifier, self._notifier = self._notifier, None
            if notifier is not None:
                notifier.close()
        self._staging.close()
        self._pollfds.close()


class ThreadEngine(Engine):
    """An engine of threads of the host: one for each of `records`, of which the first lies at `address`.

    `memory` are the tables of keys and UMEMs, which name the memory that the engine touches. With a `place`, the
    threads make their turns there, in slices: queues and payload may lie in memory that only slices reach.
    """

    def __init__(
        self, name: str, records: np.ndarray, address: int, memory: tuple[Table, Table], place: Place | None
    ):
        self._name, self._memory, self._place = name, memory, place
        self._lock = threading.RLock()  # one command at a time
        compile_engine()
        self._workers: list[Worker] = []
        with contextlib.ExitStack() as undo:
            for i, record in enumerate(records):
                worker = Worker(name, i, record, address + i * WORKER.size, self._run)
                undo.callback(worker.close)
                record["next"] = address + (i + 1) * WORKER.size if i + 1 < len(records) else 0
                record["yield_every"] = yield_every()
                if place:
                    place.add(record, worker.address)
                self._workers.append(worker)
            undo.pop_all()

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def _run(self, address: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        with lost_memory.named(self._name, address + WORKER.helper, *self._memory):
            run(address)

    def reaches(self, address: int, nbytes: int) -> bool:
        return self._place is not None and self._place.contains(address, nbytes)

    @property
    def sharing(self) -> str:
        return self._place.sharing if self._place else ""

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
        return self._place.share(address, nbytes) if self._place else None

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> Opened:
        assert self._place
        return self._place.open_shared(nbytes, handle, fds)

    def is_near(self, address: int, nbytes: int) -> bool:
        return self._place is not None and self._place.is_near(address, nbytes)

    def lines(self, lines: HostMemory) -> int:
        return self._place.lines(lines) if self._place else lines.address

    def map(self, address: int, nbytes: int) -> None:
        if self._place and not self._place.contains(address, nbytes):
            self._place.map(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        if self._place and not self._place.contains(address, nbytes):
            self._place.unmap(address, nbytes)

    def recall(self) -> None:
        if self._place:
            for i, worker in enumerate(self._workers):
                self.post(EngineCommand.WRITE_ROW, worker.address, worker=i)

    def read(self, address: int, nbytes: int) -> bytes:
        if not self.reaches(address, nbytes):
            return super().read(address, nbytes)
        with self._lock:
            self.post(EngineCommand.READ_ROW, address, np.zeros(nbytes, np.uint8))
            return self._workers[0].prepared(nbytes)

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
        """Wake the workers that sleep and have queues: a thread of this process has rung a doorbell.

        If this misses a worker that is about to sleep, the worker finds the doorbell when it wakes by itself. A thread
        that releases a lock after ringing misses none if the release is a full fence, as on x86.
        """
        for worker in self._workers:
            if worker.record["asleep"]:
                worker.wake()

    def busy(self, change: int) -> None:
        """Count kernels. A launch wakes the workers that sleep and have queues, and an end wakes none.

        To wake a worker costs a system call, and a worker that spins sees for itself when the last kernel has ended.
        """
        for worker in self._workers:
            asleep = worker.busy(change)
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
            to.begin(op, row, prepared, state)
            self._await(to, end, timeout)
            if int(to.record["command_result"]) == Result.WRONG_STATE:
                raise BadStateError("the queue has changed its state meanwhile: it is in ERR")
            if int(to.record["command_result"]) == Result.TOO_FULL:
                raise FullError("the queue holds more entries than the old ring or the new ring has room for")

    def _check(self, worker: Worker) -> None:
        """DriverError if the worker makes no turns any more."""
        if why := self._place.why_failed(worker.record) if self._place else "":
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
            # The rest look at no table. But one that gets a queue must wake, and not before it has all of them.
            moves = any(op == EngineCommand.MOVE_QP for op, *_ in commands)
            held = [worker for worker in others if moves or worker.has_queues]
            if held:
                held.append(first)  # so that the commands do not have to wait for a turn of it
            end = time.monotonic() + timeout
            try:
                for worker in held:
                    worker.wait(end, timeout)
                for worker in held:
                    worker.record["hold"] = 1
                    worker.begin(EngineCommand.WRITE_ROW, worker.address, None, 0)  # no bytes: done after the turn
                for worker in held:
                    worker.wait(end, timeout)
                for command in commands:
                    self.post(*command)
            finally:
                for worker in held:
                    worker.record["hold"] = 0

    def settle(self) -> None:
        for _ in range(2):  # the current turn may still execute the first
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
