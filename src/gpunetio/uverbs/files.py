"""Open device files, and the objects in them."""

from __future__ import annotations

import atexit
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import TimedOutError
from ..nic.engine.port import PortConfig
from ..providers import soft
from ..verbs import QP, UAR, Context, Handle
from .abi import DESTROY_RESP, DESTROYED, Object
from .call import Call, Refused
from .counter_files import CounterFiles
from .pump import Pump


@dataclass
class Held:
    """An object of a file: its kind, the object itself, the subscriber of its events, and what to undo when it closes.
    """

    kind: Object
    what: Any
    subscriber: int = 0
    undo: ExitStack = field(default_factory=ExitStack)


class OpenFile:
    """One open of a device file. Closing it closes all objects.

    `worker` is the NIC's work that polling threads may help with, until `end_help` is called.
    """

    def __init__(self, device: str, port: PortConfig, end_help: Callable[[], bool], counters: CounterFiles):
        self.provider = soft.open_beside_others(device, port)
        with ExitStack() as undo:
            undo.callback(self.provider.close)
            self.ctx = Context(self.provider)  # type: ignore[arg-type]
            self.provider.nic.expect_polling()
            self.worker = self.provider.nic.to_help()
            self.pump = Pump(f"gpunetio {self.ctx.name}")
            self._counters = counters
            counters.begin(self.provider.nic)
            undo.pop_all()
        atexit.register(self._end_counting)
        atexit.register(self.pump.stop)  # atexit calls it before it ends the NIC
        self._end_help = end_help
        atexit.register(self._be_alone)
        self.lock = threading.Lock()
        self.uars: dict[int, UAR] = {}  # by page id
        self.channels: dict[int, int] = {}  # completion channels, by descriptor
        self.event_channels: dict[int, int] = {}  # channels of DEVX, by descriptor
        self.subscribers: dict[tuple[int, int | None], int] = {}  # subscribers on DEVX channels, by channel and object
        self.ways: dict[int, int] = {}  # paths that libmlx5's address handles need, by LID
        self.asynchronous: int | None = None  # the channel of asynchronous events
        self.caps: dict[QP, np.ndarray] = {}  # the capabilities that each was created with
        self._held: dict[int, Held] = {}
        self._next = 1

    def uar(self, page: int) -> UAR:
        """Return a doorbell page. Refused with EINVAL if the program has no such page."""
        if page not in self.uars:
            raise Refused(errno.EINVAL, f"there is no doorbell page {page}")
        return self.uars[page]

    def add(self, kind: Object, what: object, subscriber: int = 0, undo: ExitStack | None = None) -> int:
        """Keep an object, and return its handle."""
        handle, self._next = self._next, self._next + 1
        self._held[handle] = Held(kind, what, subscriber, undo or ExitStack())
        return handle

    @contextmanager
    def whole_call(self) -> Iterator[None]:
        """Run one call at a time. If it fails, remove the objects that it has made."""
        with self.lock:
            first = self._next
            try:
                yield
            except BaseException:
                for handle in range(self._next - 1, first - 1, -1):
                    self.remove(self._held[handle].kind, handle)
                raise

    def held(self, kind: Object, handle: int) -> Held:
        """Return an object by its handle. Refused with EINVAL if there is none."""
        held = self._held.get(handle)
        if held is None or held.kind != kind:
            raise Refused(errno.EINVAL, f"no {kind.name} has the handle {handle}")
        return held

    def get(self, kind: Object, handle: int) -> Any:
        """Return the object that has this handle."""
        return self.held(kind, handle).what

    def handles(self) -> list[int]:
        """Return the handles of all objects, oldest first."""
        return list(self._held)

    def anything(self, handle: int) -> Any:
        """Return the object of any kind that has this handle. Refused with EINVAL if there is none."""
        if handle not in self._held:
            raise Refused(errno.EINVAL, f"nothing has the handle {handle}")
        return self._held[handle].what

    def remove(self, kind: Object, handle: int) -> Held:
        """Close an object. If that fails, the object stays."""
        held = self.held(kind, handle)
        if isinstance(held.what, Handle):
            held.what.close()
        held.undo.close()
        del self._held[handle]
        return held

    def bury(self, call: Call) -> None:
        """Answer a call that destroys an object after Python has ended and all NICs are closed."""
        held = self._held.pop(call.number(DESTROYED), None) if DESTROYED in call else None
        if held is not None and held.subscriber:
            call.put(DESTROY_RESP, self.reported(held))

    def reported(self, held: Held) -> bytes:
        """Return how many events of a removed object the program has read: for a CQ, first those of completions."""
        completions, others = self.pump.forget(held.subscriber)
        counts = (completions, others) if held.kind == Object.CQ else (others,)
        return b"".join(count.to_bytes(4, "little") for count in counts)

    def _be_alone(self) -> None:
        """Stop threads from helping."""
        if not self._end_help():
            raise TimedOutError(f"a thread of the program has been making a turn of {self.ctx.name} for 10 s")

    def _end_counting(self) -> None:
        """Stop reading the NIC's counters."""
        self._counters.end(self.provider.nic)

    def close(self) -> None:
        """Close all objects, and the device."""
        self._end_counting()
        atexit.unregister(self._end_counting)
        self._be_alone()
        atexit.unregister(self._be_alone)
        atexit.unregister(self.pump.stop)
        with ExitStack() as steps:
            steps.callback(self.ctx.close)
            for held in self._held.values():  # closed in reverse order
                steps.callback(held.undo.close)
            steps.callback(self.pump.close)
        self._held.clear()
