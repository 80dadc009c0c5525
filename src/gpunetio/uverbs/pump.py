"""The thread that passes events of a NIC on to the program."""

from __future__ import annotations

import os
import selectors
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..service import ServiceThread
from ..verbs import Handle

# Returns the oldest event, as the object that it is about and the message for the program; None if there is none.
Take = Callable[[], tuple[Handle | None, bytes] | None]
_LONGEST = 64  # bytes of a message, at least


@dataclass(frozen=True)
class _Pipe:
    """A pipe to the program, which reads one message at a time.

    `unread` is another descriptor of the end from which it reads. `completions`: of a completion channel.
    """

    take: Take
    ours: int
    unread: int
    completions: bool


class Pump:
    """Writes events to the program's pipes: what `take` returns when its descriptor is readable."""

    def __init__(self, name: str):
        self._told: Counter[tuple[Handle | None, bool]] = Counter()  # events by object and kind of pipe
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stop = False
        self._thread = ServiceThread(f"{name} events", self._run)
        self._thread.start()

    def open_pipe(self, fd: int, take: Take, completions: bool) -> int:
        """Return the end of a new pipe from which the program reads, and which it closes."""
        theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
        os.set_blocking(ours, False)
        unread = os.open(f"/proc/self/fd/{theirs}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, _Pipe(take, ours, unread, completions))
        os.eventfd_write(self._wake, 1)
        return theirs

    def _pipes(self) -> list[_Pipe]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _run(self) -> None:
        while not self._stop:
            ready = self._selector.select(timeout=1)
            with self._lock:
                for key, _ in ready:
                    if key.data is not None:
                        self._pass_on(key.data)
                    else:
                        with suppress(BlockingIOError):
                            os.eventfd_read(self._wake)

    def _pass_on(self, pipe: _Pipe) -> None:
        while found := pipe.take():
            target, message = found
            with suppress(BlockingIOError):  # the program has not read thousands of events
                os.write(pipe.ours, message)
                self._told[target, pipe.completions] += 1

    def forget(self, what: Handle, element: bytes) -> tuple[int, int]:
        """Return how many events of an object the program has read: of completions, and others.

        Those that it has not read, which begin with `element`, are taken back.
        """
        with self._lock:
            for pipe in self._pipes():
                unread = list(iter(lambda unread=pipe.unread: _read(unread), b""))
                for message in unread:
                    if message.startswith(element):
                        self._told[what, pipe.completions] -= 1
                    else:
                        os.write(pipe.ours, message)
            return self._told.pop((what, True), 0), self._told.pop((what, False), 0)

    def close(self) -> None:
        """Stop the thread, and close our ends of all pipes."""
        self._stop = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for pipe in self._pipes():
            os.close(pipe.ours)
            os.close(pipe.unread)
        self._selector.close()
        os.close(self._wake)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _LONGEST)
    except BlockingIOError:
        return b""
