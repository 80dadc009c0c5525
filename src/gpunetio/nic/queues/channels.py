"""Event channels: the host's side, which reads the events that the engine has raised (events.py)."""

from __future__ import annotations

import os
import threading

import numpy as np

from ...errors import FullError
from ...fabric.ring import RING, next_full, release
from ...formats.events import EventType, eqe
from ...memory import HostMemory
from ..state.cq import CHANNEL, EVENT

CAPACITY = 1 << 14  # events: every CQ of a NIC may have one that waits


class EventChannel:
    """A ring of events that the engine fills. Poll `fd`, an eventfd: it is readable while events wait.

    `ring` is the address of the RING. A reader reads `fd` before it takes an event.
    """

    address: int
    fd: int
    ring: int

    def __init__(self) -> None:
        self._memory = HostMemory(CHANNEL.size + CAPACITY * EVENT.size)
        self._slots = self._memory.view(EVENT.dtype, CHANNEL.size, CAPACITY)
        self._record = self._memory.view(CHANNEL.dtype)[0]
        self.address = self._memory.address
        self.ring = self.address + CHANNEL.ring
        self._counts = self._memory.view(RING.dtype, CHANNEL.ring)[0]
        self._counts["slots"] = self.address + CHANNEL.size
        self._counts["slot_size"], self._counts["capacity"] = EVENT.size, CAPACITY
        try:
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        except OSError:
            self._memory.close()
            raise
        self._record["fd"] = self.fd
        self._lock, self._told = threading.Lock(), 0

    def get(self) -> tuple[int, EventType, int, bytes] | None:
        """Return the oldest event as (cookie, type, number of its object, EQE), or None.

        Raise FullError, once, if events were lost because the channel was full.
        """
        with self._lock:
            if lost := int(self._record["lost"]) - self._told:
                self._told += lost
                raise FullError(
                    f"{lost} events were lost: the channel was full, with {CAPACITY} unread events. Query every object "
                    "again, and read events more often"
                )
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                return None
            slot = self._slots[(next_full(self.ring) - self.address - CHANNEL.size) // EVENT.size]
            kind, number = EventType(int(slot["type"])), int(slot["number"])
            event = int(slot["cookie"]), kind, number, eqe(kind, number, int(slot["syndrome"]))
            release(self.ring)
            return event

    def disown(self, cookie: int) -> None:
        """Set the cookie of unread events with this cookie to 0. No thread may read events at the same time."""
        waiting = np.arange(self._counts["tail"], self._counts["head"]) % CAPACITY
        self._slots["cookie"][waiting[self._slots["cookie"][waiting] == cookie]] = 0

    def close(self) -> None:
        """Close the channel. The engine must no longer use it."""
        os.close(self.fd)
        self._memory.close()
