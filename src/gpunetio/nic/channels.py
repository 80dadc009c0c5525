"""Event channels: what the engine has told, for whoever reads. The host's side of events.py."""

from __future__ import annotations

import os
import threading
from ..errors import FullError
from ..fabric.ring import RING, next_full, release
from ..formats.events import EventType, eqe
from ..memory import HostMemory
from .tables import CHANNEL, EVENT

CAPACITY = 1 << 14  # events; every CQ of a NIC may have one on its way


class EventChannel:
    """A ring that the engine fills, and `fd`, an event counter that can be polled: readable while there are events."""

    address: int
    fd: int

    def __init__(self) -> None:
        self._memory = HostMemory(CHANNEL.size + CAPACITY * EVENT.size)
        self._slots = self._memory.view(EVENT.dtype, CHANNEL.size, CAPACITY)
        self._record = self._memory.view(CHANNEL.dtype)[0]
        self.address = self._memory.address
        self._ring = self.address + CHANNEL.ring
        ring = self._memory.view(RING.dtype, CHANNEL.ring)[0]
        ring["slots"], ring["slot_size"], ring["capacity"] = self.address + CHANNEL.size, EVENT.size, CAPACITY
        try:
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        except OSError:
            self._memory.close()
            raise
        self._record["fd"] = self.fd
        self._lock, self._told = threading.Lock(), 0

    def get(self) -> tuple[int, EventType, int, bytes] | None:
        """The oldest event: cookie, type, the number of its object, and its EQE; or None.

        FullError, once, when some were lost because nobody read.
        """
        with self._lock:
            if lost := int(self._record["lost"]) - self._told:
                self._told += lost
                raise FullError(
                    f"{lost} events were lost: {CAPACITY} had been waiting to be read. Look at every object anew, and "
                    "read events more often"
                )
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                return None
            slot = self._slots[(next_full(self._ring) - self.address - CHANNEL.size) // EVENT.size]
            kind, number = EventType(int(slot["type"])), int(slot["number"])
            event = int(slot["cookie"]), kind, number, eqe(kind, number, int(slot["syndrome"]))
            release(self._ring)
            return event

    def close(self) -> None:
        """The engine does not know the channel any more."""
        os.close(self.fd)
        self._memory.close()
