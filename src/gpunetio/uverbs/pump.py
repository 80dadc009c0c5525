"""The thread that passes events of a NIC on to the program, which reads them from pipes (pump_loop.py)."""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from ..errors import NoMemoryError, TimedOutError
from ..formats.events import EventType
from ..interrupts import deferred
from ..memory import HostMemory
from ..nic.host.engine import POLLFD
from ..nic.queues.channels import EventChannel
from ..service import ServiceThread
from ..verbs.events import ASYNC_TYPES
from .pump_loop import MOST_PIPES, PIPE, PUMP, SUBSCRIBER, compile_pump, serve

_TYPES = 256  # of events
_MOST_SUBSCRIBERS = 1 << 16
_LONGEST = 128  # bytes of a message, at least
_libc = ctypes.CDLL(None)


class Pump:
    """Passes on events of the channels for which pipes were opened.

    The cookie of a channel's event is the address of a subscriber.
    """

    def __init__(self, name: str):
        self._name, self._lock = name, threading.Lock()
        rows = (POLLFD.itemsize + PIPE.size) * MOST_PIPES
        self._memory = HostMemory(PUMP.size + rows + _TYPES)
        self._subscribers = HostMemory(SUBSCRIBER.size * _MOST_SUBSCRIBERS)
        self._rows = self._subscribers.view(SUBSCRIBER.dtype, 0, _MOST_SUBSCRIBERS)
        self._free: list[int] = []
        self._unused = itertools.count()
        self._pollfds = self._memory.view(POLLFD, PUMP.size, MOST_PIPES)
        self._pipes = self._memory.view(PIPE.dtype, PUMP.size + POLLFD.itemsize * MOST_PIPES, MOST_PIPES)
        names = self._memory.view(np.dtype(np.uint8), PUMP.size + rows, _TYPES)
        for kind, asynchronous in ASYNC_TYPES.items():
            names[kind] = asynchronous
        (self._record,) = self._memory.view(PUMP.dtype, 0, 1)
        self._mutex = ctypes.c_void_p(self._memory.address + PUMP.mutex)  # all 0: PTHREAD_MUTEX_INITIALIZER
        self._record["pollfds"] = self._memory.address + PUMP.size
        self._record["pipes"] = self._memory.address + PUMP.size + POLLFD.itemsize * MOST_PIPES
        self._record["names"] = self._memory.address + PUMP.size + rows
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pollfds[0], self._record["count"] = (self._wake, select.POLLIN, 0), 1
        self._channels: list[EventChannel] = []  # of the pipes
        self._unread: list[int] = []  # duplicates of the descriptors from which the program reads
        self._cookies: list[HostMemory] = []
        compile_pump()
        self._thread = ServiceThread(f"{name} events", lambda: serve(self._memory.address))
        self._thread.start()

    def subscriber(self, element: int) -> int:
        """Return a new subscriber for the object that the program calls `element`. NoMemoryError if there are too many.
        """
        with self._lock:
            place = self._free.pop() if self._free else next(self._unused)
        if place >= _MOST_SUBSCRIBERS:
            raise NoMemoryError(f"{self._name}: the program has {_MOST_SUBSCRIBERS} objects with events, the maximum")
        self._rows[place] = (element, 0, 0, 0)
        return self._subscribers.address + place * SUBSCRIBER.size

    def devx_subscriber(self) -> int:
        """Return a new subscriber on a channel of DEVX, without subscriptions."""
        address = self.subscriber(0)
        self._cookies.append(HostMemory(8 * _TYPES))
        self._cookies[-1].view(np.dtype(np.int64), 0, _TYPES)[:] = -1
        self._row(address)["cookies"] = self._cookies[-1].address
        return address

    def set_cookies(self, subscriber: int, kinds: Iterable[EventType], cookie: int) -> None:
        """Set the cookie that the program gets with events of these types."""
        (memory,) = (each for each in self._cookies if each.address == int(self._row(subscriber)["cookies"]))
        memory.view(np.dtype(np.uint64), 0, _TYPES)[[int(kind) for kind in kinds]] = cookie

    def _row(self, subscriber: int) -> np.void:
        row: np.void = self._rows[(subscriber - self._subscribers.address) // SUBSCRIBER.size]
        return row

    def open_pipe(self, channel: EventChannel, devx: int = 0) -> int:
        """Open a pipe for a channel's events. Return the end from which the program reads; the program closes it."""
        with self._lock:
            place = int(self._record["count"])
            if place == MOST_PIPES:
                raise NoMemoryError(f"{self._name}: the program has {MOST_PIPES - 1} event channels, the most possible")
            theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)  # each read returns one message
            os.set_blocking(ours, False)
            self._unread.append(os.open(f"/proc/thread-self/fd/{theirs}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            self._channels.append(channel)
            self._pipes[place] = (channel.ring, ours, devx, channel.fd, 0)
            self._pollfds[place] = (channel.fd, select.POLLIN, 0)
            self._record["count"] = place + 1
        os.eventfd_write(self._wake, 1)
        return theirs

    def forget(self, subscriber: int) -> tuple[int, int]:
        """Forget an object that is gone. Return how many of its events the program has read: completions, and others.

        Events that the program has not read are removed from the pipes.
        """
        row = self._row(subscriber)
        element = int(row["element"]).to_bytes(8, "little", signed=True)
        with self._lock, self._held():
            for channel in self._channels:
                channel.disown(subscriber)
            for place, unread in enumerate(self._unread, start=1):
                if self._pipes[place]["devx"]:
                    continue
                for message in list(iter(lambda unread=unread: _read(unread), b"")):
                    if message[:8] != element:
                        os.write(int(self._pipes[place]["fd"]), message)
                    elif len(message) == 8:
                        row["completions"] -= 1
                    else:
                        row["others"] -= 1
            self._free.append((subscriber - self._subscribers.address) // SUBSCRIBER.size)
            return int(row["completions"]), int(row["others"])

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the thread from filling pipes while they are emptied here. The thread never holds the mutex for long."""
        with deferred():
            _libc.pthread_mutex_lock(self._mutex)
            try:
                yield
            finally:
                _libc.pthread_mutex_unlock(self._mutex)

    def stop(self) -> None:
        """Stop the thread, so that the channels may close. Idempotent. TimedOutError if it does not stop."""
        self._record["stop"] = 1
        os.eventfd_write(self._wake, 1)
        if not self._thread.join():
            raise TimedOutError(f"the thread that passes on events of {self._name} does not stop")
        self._channels.clear()

    def close(self) -> None:
        """Stop the thread, and close our ends of all pipes."""
        self.stop()
        for fd in (*self._unread, *self._pipes["fd"][1 : int(self._record["count"])].tolist(), self._wake):
            os.close(fd)
        for memory in (self._memory, self._subscribers, *self._cookies):
            memory.close()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _LONGEST)
    except BlockingIOError:
        return b""
