"""Readers of a device's events, and the asynchronous events of a context."""

from __future__ import annotations

import asyncio
import itertools
import select
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ..arguments import deadline
from ..enums import AsyncEventType as Async
from ..errors import InvalidValueError
from ..formats.events import EQE, PORT_SHIFT, EventType, PortSubtype
from ..providers.provider import Event, Provider
from .handle import Handle

if TYPE_CHECKING:
    from .cq import CQ
    from .qp import QP
    from .srq import SRQ

_OF_DEVICE = 0  # the cookie of events that concern no object

# The device's event types, and those of verbs (ibv_get_async_event(3)).
ASYNC_TYPES = {
    EventType.PATH_MIGRATED:       Async.PATH_MIG,
    EventType.COMM_EST:            Async.COMM_EST,
    EventType.SQ_DRAINED:          Async.SQ_DRAINED,
    EventType.CQ_ERROR:            Async.CQ_ERR,
    EventType.WQ_CATAS_ERROR:      Async.QP_FATAL,
    EventType.PATH_MIGRATE_FAILED: Async.PATH_MIG_ERR,
    EventType.INTERNAL_ERROR:      Async.DEVICE_FATAL,
    EventType.WQ_INVAL_REQ_ERROR:  Async.QP_REQ_ERR,
    EventType.WQ_ACCESS_ERROR:     Async.QP_ACCESS_ERR,
    EventType.SRQ_CATAS_ERROR:     Async.SRQ_ERR,
    EventType.SRQ_LAST_WQE:        Async.QP_LAST_WQE_REACHED,
    EventType.SRQ_RQ_LIMIT:        Async.SRQ_LIMIT_REACHED,
}
OF_QP = (
    EventType.PATH_MIGRATED, EventType.COMM_EST, EventType.SQ_DRAINED, EventType.WQ_CATAS_ERROR,
    EventType.PATH_MIGRATE_FAILED, EventType.WQ_INVAL_REQ_ERROR, EventType.WQ_ACCESS_ERROR, EventType.SRQ_LAST_WQE,
)
OF_CQ = (EventType.CQ_ERROR,)
OF_SRQ = (EventType.SRQ_CATAS_ERROR, EventType.SRQ_RQ_LIMIT)
_OF_PORT_AND_DEVICE = (EventType.PORT_CHANGE, EventType.INTERNAL_ERROR)


class Reader(ABC):
    """A source of events about objects. `fd` is readable while events wait."""

    fd: int

    def __init__(self) -> None:
        self._tasks: dict[asyncio.AbstractEventLoop, set[asyncio.Future[None]]] = defaultdict(set)

    @abstractmethod
    def take(self) -> tuple[Handle | None, Event] | None:
        """Return the oldest event and its object, or None. Skip events of closed objects."""

    def wait(self, timeout: float) -> tuple[Handle | None, Event] | None:
        """Return the oldest event and its object, or None if there is none within `timeout` seconds."""
        until = deadline(timeout)
        if timeout < 0:
            raise InvalidValueError(f"timeout = {timeout}: give seconds, 0 or more")
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while (found := self.take()) is None and (left := until - time.monotonic()) > 0:
            poll.poll(1000 * left)
        return found

    async def wait_in_loop(self) -> tuple[Handle | None, Event]:
        """Wait in asyncio's event loop, without a deadline, for the next event, and return it with its object."""
        loop = asyncio.get_running_loop()
        while (found := self.take()) is None:
            ready, waiting = loop.create_future(), self._tasks[loop]
            waiting.add(ready)  # all tasks share one reader: an event loop takes one per descriptor
            loop.add_reader(self.fd, _let_go_on, waiting)
            try:
                await ready
            finally:
                waiting.remove(ready)
                if not waiting:
                    loop.remove_reader(self.fd)
                    del self._tasks[loop]
        return found


def _let_go_on(waiting: set[asyncio.Future[None]]) -> None:
    for ready in waiting:
        if not ready.done():
            ready.set_result(None)


class EventReader(Reader):
    """A reader of one of the device's event channels, with the objects subscribed to it."""

    def __init__(self, provider: Provider, undo: ExitStack):
        super().__init__()
        self._provider = provider
        self._channel = provider.create_event_channel()
        undo.callback(provider.destroy_event_channel, self._channel)
        self.fd: int = provider.event_fd(self._channel)
        self._targets: WeakValueDictionary[int, Handle] = WeakValueDictionary()
        self._cookies = itertools.count(_OF_DEVICE + 1)

    def subscribe(self, target: Handle, handle: int, types: Iterable[EventType], undo: ExitStack) -> None:
        """Subscribe to a DEVX object until `undo` is closed."""
        cookie = next(self._cookies)
        self._targets[cookie] = target
        undo.callback(self._targets.pop, cookie, None)
        self._provider.subscribe(self._channel, handle, types, cookie)

    def subscribe_device(self) -> None:
        """Subscribe to events of the port and the device."""
        self._provider.subscribe(self._channel, None, _OF_PORT_AND_DEVICE, _OF_DEVICE)

    def take(self) -> tuple[Handle | None, Event] | None:
        while event := self._provider.get_event(self._channel):
            if event.cookie == _OF_DEVICE:
                return None, event
            if target := self._targets.get(event.cookie):
                return target, event
        return None


@dataclass(eq=False)
class AsyncEvent:
    """An event of an object, a port or the device (`doca_verbs_async_event`). Call `ack()` once.

    `element` is the QP, CQ or SRQ, the number of the port, or None for the device. `eqe` is the device's 64-byte event
    queue entry.
    """

    type: Async
    element: QP | CQ | SRQ | int | None
    acknowledged: bool = False
    eqe: bytes = b""

    @property
    def syndrome(self) -> int:
        """Return the error of a CQ, 1 for an overrun (eqe.syndrome of CQ_ERR), or 0 for any other event."""
        return self.eqe[EQE.syndrome] if self.type == Async.CQ_ERR and self.eqe else 0

    def ack(self) -> None:
        """Acknowledge the event (`doca_verbs_ack_async_event`). Its object cannot be closed until then."""
        if self.acknowledged:
            raise InvalidValueError(f"{self.type.name} was already acknowledged: acknowledge each event once")
        self.acknowledged = True
        if isinstance(self.element, Handle):
            self.element.acknowledge(1)


class AsyncEvents:
    """The asynchronous events of a context. `async for` never ends. `fd` is readable while events wait."""

    def __init__(self, provider: Provider, undo: ExitStack):
        self._name = provider.name
        self._reader = EventReader(provider, undo)
        self._reader.subscribe_device()

    def subscribe(self, target: Handle, handle: int, types: Iterable[EventType], undo: ExitStack) -> None:
        """Subscribe to a DEVX object until `undo` is closed."""
        self._reader.subscribe(target, handle, types, undo)

    @property
    def fd(self) -> int:
        """Return the descriptor for `select`, `poll` and `epoll`."""
        return self._reader.fd

    def get(self, timeout: float) -> AsyncEvent | None:
        """Return the oldest event, or None if there is none within `timeout` seconds."""
        found = self._reader.wait(timeout)
        return None if found is None else _translate(*found)

    def __repr__(self) -> str:
        return f"<asynchronous events of {self._name}>"

    def __aiter__(self) -> AsyncEvents:
        return self

    async def __anext__(self) -> AsyncEvent:
        return _translate(*await self._reader.wait_in_loop())


def _translate(target: Handle | None, event: Event) -> AsyncEvent:
    if event.type == EventType.PORT_CHANGE:
        up = event.number & (1 << PORT_SHIFT) - 1 == PortSubtype.ACTIVE
        return AsyncEvent(Async.PORT_ACTIVE if up else Async.PORT_ERR, event.number >> PORT_SHIFT, eqe=event.eqe)
    if target is not None:
        target.hold_for_event()
    return AsyncEvent(ASYNC_TYPES[event.type], target, eqe=event.eqe)  # type: ignore[arg-type]
