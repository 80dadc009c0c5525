"""Kernel launches that always end: by the kernel's own deadlines, by Ctrl+C, or on request."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import numpy as np

from ..device.status import EIO, ETIMEDOUT, NAMES
from ..enums import MemType
from ..errors import DocaError, DriverError, TimedOutError
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..jit.code import Launch
from ..jit.launch import Kernel
from .kernels.parts import NOT_INLINE, RECORD_WORDS, STOPPED, WRONG_LENGTH

logger: logging.Logger = logging.getLogger("gpunetio.bench")

WAIT_SECONDS = 10.0  # of one wait in a kernel
LAUNCH_SECONDS = 120.0  # of one launch, including compilation
GRACE_SECONDS = 2 * WAIT_SECONDS  # for a kernel that was told to stop and whose queue pairs have failed
STOP_SECONDS = 0.5  # for a kernel to notice the stop word; then its queue pairs are moved to ERR
LOOK_SECONDS = 0.05  # between checks for other reasons to end a launch

_OWN_STATUSES = {
    STOPPED: "stopped",
    WRONG_LENGTH: "a receive with a different length than was sent",
    NOT_INLINE: "a completion without its inline data",
}


class Launcher:
    """Runs kernels on `gpu` with the queue pairs in `_qps`. A kernel's last arguments are `stop` and `out`."""

    gpu: Gpu

    def __init__(self) -> None:
        self._running: Launch | None = None
        self._stack = ExitStack()  # everything that a kernel may use
        self._qps: list[ExportedQp] = []

    def _look(self) -> None:
        """Stop the kernel if it can no longer succeed. Called repeatedly while a kernel runs."""

    def _open_records(self, threads: int) -> None:
        """Allocate the records of `threads` threads."""
        self._stop, self._out = self._alloc(8), self._alloc(8 * RECORD_WORDS * threads)

    def _alloc(self, nbytes: int) -> GpuMemory:
        return self.gpu.alloc(nbytes, MemType.CPU_GPU)

    def _close(self) -> None:
        """End a kernel that still runs, then close what it used."""
        if not self._end_launch():
            logger.error("a kernel does not end: its queues and memory stay open")
            self._stack.pop_all()
        self._stack.close()

    def launch(
        self, kernel: Kernel, grid: int, block: int, *args: object, launched: Callable[[], None] = lambda: None,
        seconds: float = LAUNCH_SECONDS,
    ) -> np.ndarray:
        """Run a kernel to its end. Return a record per thread: begin and end in nanoseconds, and a status.

        `launched` is called once the kernel runs. The kernel may run for `seconds`.
        """
        records = self._out.array.view(np.int64).reshape(-1, RECORD_WORDS)
        records[:] = 0
        self._stop.array[:] = 0
        with self._interrupt_stops_the_kernel():
            self._running = launch = kernel[grid, block, self.gpu](*args, self._stop, self._out)
            try:
                launched()
                ended = self._wait(launch, seconds)
            except Exception:
                if launch.ended:  # may come from the kernel's threads
                    self._running = None
                raise
            if not ended:
                stalls = " ".join(self.gpu.watchdog.stalls)
                raise TimedOutError(f"the kernel did not end within {seconds:g} s. {stalls}".rstrip())
            self._running = None
        records = records.copy()  # tracebacks show arrays of frames after the memory is closed
        self._raise_for(records[:, 2])
        return records

    def _wait(self, launch: Launch, seconds: float) -> bool:
        end = time.monotonic() + seconds
        stopped = 0.0
        while not launch.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now > end:
                return False
            self._look()
            if self._stop.array.view(np.int64)[0] == 0:
                continue
            stopped = stopped or now
            if now > stopped + STOP_SECONDS:  # it may be waiting for a completion that never comes
                stopped = now + GRACE_SECONDS
                self._fail_queues()
        return True

    def _fail_queues(self) -> None:
        for qp in self._qps:
            with contextlib.suppress(DocaError):
                qp.qp.to_error()

    @contextmanager
    def _interrupt_stops_the_kernel(self) -> Iterator[None]:
        """Let Ctrl+C end the kernel, and only then raise KeyboardInterrupt: unwinding the stack closes its queues."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
            yield  # this handler cannot be replaced
            return
        interrupted = False

        def stop(signum: int, frame: FrameType | None) -> None:
            nonlocal interrupted
            interrupted = True
            self._tell_to_stop()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if interrupted:
            raise KeyboardInterrupt

    def _tell_to_stop(self) -> None:
        self._stop.array.view(np.int64)[0] = 1

    def _raise_for(self, statuses: np.ndarray) -> None:
        failures = [int(status) for status in statuses if status < 0]
        if not failures:
            return
        # An error at one end stops the other end or leaves it waiting. The cause is the error completion, if there is
        # one.
        cause = min(failures, key=lambda status: (status != EIO, status == STOPPED))
        errors = [str(error) for qp in self._qps if (error := qp.last_error()) is not None]
        details = "; ".join([*errors, *self.gpu.watchdog.stalls]) or f"status {cause}"
        what = f"the kernel ended with '{_OWN_STATUSES.get(cause) or NAMES.get(cause, cause)}': {details}"
        raise TimedOutError(what) if cause == ETIMEDOUT else DriverError(what)

    def _end_launch(self) -> bool:
        """Tell a kernel that is still running to stop. Return whether no kernel runs any more."""
        if self._running is None:
            return True
        self._tell_to_stop()
        if self._running.wait(STOP_SECONDS):
            return True
        self._fail_queues()
        return self._running.wait(GRACE_SECONDS)
