"""A queue of events that were already taken from a descriptor."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Events that were taken from a source but not delivered yet.

    `fd` is readable while an event waits, either in this queue or at the source.
    """

    fd: int

    def __init__(self, source: int):
        self._waiting: deque[T] = deque()
        self._lock = threading.Lock()
        self._here = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._poll = select.epoll()
        self.fd = self._poll.fileno()
        self._poll.register(self._here, select.EPOLLIN)
        self.watch(source)

    def watch(self, source: int) -> None:
        """Add a descriptor that delivers more events."""
        self._poll.register(source, select.EPOLLIN)

    def put(self, event: T) -> None:
        """Add an event."""
        with self._lock:
            self._waiting.append(event)
            os.eventfd_write(self._here, 1)

    def get(self) -> T | None:
        """Return the oldest event in this queue, or None."""
        with self._lock:
            if not self._waiting:
                return None
            os.eventfd_read(self._here)
            return self._waiting.popleft()

    def close(self) -> None:
        """Close the descriptors."""
        self._poll.close()
        os.close(self._here)
