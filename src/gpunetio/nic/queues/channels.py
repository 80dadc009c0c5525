"""Event channels: events that the engine has raised, as the host reads them. events.py is the engine's side."""

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

    `ring` is the address of the RING. Whoever takes events reads `fd` first.
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

        Raise FullError, once, if events were lost because nobody read them.
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
        """Give the cookie 0 to the events that wait with this one. Nobody takes events meanwhile."""
        waiting = np.arange(self._counts["tail"], self._counts["head"]) % CAPACITY
        self._slots["cookie"][waiting[self._slots["cookie"][waiting] == cookie]] = 0

    def close(self) -> None:
        """Close the channel. The engine must not know it any more."""
        os.close(self.fd)
        self._memory.close()
