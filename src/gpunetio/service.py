"""Threads that serve until they are told to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from .errors import NoMemoryError
from .interrupts import deferred
from .limits import cure

STOP_TIMEOUT = 10.0  # seconds that a thread may take to stop
_LOOK = 100e-6
_OWN = {  # raised by a thread's own faults: handlers that print its stack must run
    signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP,
}
_OTHERS = signal.valid_signals() - _OWN


_here = threading.local()


def serving() -> bool:
    """Return whether this thread is a service thread."""
    return getattr(_here, "serving", False)


def take_no_signals() -> None:
    """Leave signals to the other threads: a program may wait for them in its own thread (sigwait(3), signalfd(2))."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _OTHERS)


class ServiceThread:
    """A daemon thread with its own running flag, which the thread clears after its last step.

    The flag replaces the state of `threading.Thread`: before Python 3.13, an `is_alive()` or `join()` that a signal
    interrupts counts a running thread as ended (bpo-45274), and a caller that believes this frees memory under the
    thread. The flag takes no lock, which an interrupt could leave locked.
    """

    name: str

    def __init__(self, name: str, serve: Callable[[], None]):
        self.name, self._serve = name, serve
        self._running = False
        self._thread: threading.Thread | None = None
        self.native_id: int | None = None

    def start(self) -> None:
        """Start the thread, for the first time or after it has ended.

        NoMemoryError if the system has no room for another thread. The caller must then undo what it has made.
        """
        with deferred():
            self._running = True
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # "can't start new thread": any other reason would be a bug here
                self._running, self._thread = False, None
                raise NoMemoryError(f"cannot start the thread {self.name!r}: {cure(error)}") from error

    def _run(self) -> None:
        take_no_signals()
        self.native_id = threading.get_native_id()
        _here.serving = True
        try:
            self._serve()
        finally:
            self._running = False

    @property
    def running(self) -> bool:
        """Return whether the thread was started and has not ended."""
        return self._running

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return self.native_id == threading.get_native_id()

    def join(self, timeout: float = STOP_TIMEOUT) -> bool:
        """Wait at most `timeout` seconds for the thread to end. Return whether it has ended."""
        end = time.monotonic() + timeout
        while self._running:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK)
        if self._thread is not None:
            self._thread.join(timeout)  # the thread only has to leave Python's list of threads
        return True
