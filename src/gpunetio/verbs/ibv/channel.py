"""Completion channels of libibverbs.

libibverbs reports only completions that arrive after a request for an event. `CQ.req_notify` promises an event also for
completions that are already in the queue. So a CQ looks for completions after a request, and if it finds one, adds its
event to the reader here.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ...formats.events import EventType
from ...providers.event_queue import EventQueue
from ...providers.plain_verbs import PlainVerbs
from ...providers.provider import Event
from ..channel import CompChannel
from ..events import Reader
from .device import plain_verbs

if TYPE_CHECKING:
    from ..handle import Handle
    from .cq import PlainCQ


class PlainReader(Reader):
    """A completion channel of libibverbs, and the CQs that it reports."""

    handle: int

    def __init__(self, plain: PlainVerbs, undo: ExitStack):
        super().__init__()
        self._plain = plain
        self.handle = plain.create_comp_channel()
        undo.callback(plain.destroy_comp_channel, self.handle)
        self._told: EventQueue[int] = EventQueue(plain.comp_channel_fd(self.handle))
        undo.callback(self._told.close)
        self.fd: int = self._told.fd
        self._cqs: WeakValueDictionary[int, PlainCQ] = WeakValueDictionary()
        self._asked: set[int] = set()  # handles of CQs that have requested an event and not had it yet
        self._waiting: set[int] = set()  # handles of CQs whose event waits here
        self._lock = threading.Lock()

    def subscribe(self, cq: PlainCQ, undo: ExitStack) -> None:
        """Subscribe to a CQ until `undo` is closed."""
        self._cqs[cq.handle] = cq
        undo.callback(self._forget, cq.handle)

    def _forget(self, handle: int) -> None:
        with self._lock:
            self._cqs.pop(handle, None)
            self._asked.discard(handle)
            self._waiting.discard(handle)

    def ask(self, cq: PlainCQ) -> bool:
        """Request one event for a CQ. Return whether the CQ must ask the device, or False if an event is waiting."""
        with self._lock:
            self._fetch()  # events of earlier requests do not count for this one
            if cq.handle in self._waiting:
                return False
            self._asked.add(cq.handle)
            return True

    def tell(self, handle: int) -> None:
        """Add the event that this CQ requested."""
        with self._lock:
            self._tell(handle)

    def _tell(self, handle: int) -> None:
        if handle in self._asked:
            self._asked.remove(handle)
            self._waiting.add(handle)
            self._told.put(handle)

    def _fetch(self) -> None:
        while handle := self._plain.get_cq_event(self.handle):
            self._tell(handle)

    def take(self) -> tuple[Handle | None, Event] | None:
        with self._lock:
            self._fetch()
            while handle := self._told.get():
                if handle in self._waiting:  # the CQ was not closed in the meantime
                    self._waiting.remove(handle)
                    if (cq := self._cqs.get(handle)) is not None:
                        return cq, Event(0, EventType.COMPLETION, cq.cqn)
        return None


class PlainCompChannel(CompChannel):
    """A completion channel of libibverbs."""

    reader: PlainReader

    def _create(self, undo: ExitStack) -> None:
        self.reader = PlainReader(plain_verbs(self.ctx), undo)
