"""Open device files, and the objects in them."""

from __future__ import annotations

import atexit
import errno
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..nic.control.port import PortConfig
from ..providers import soft
from ..verbs import QP, UAR, Context, Handle
from .abi import DESTROY_RESP, DESTROYED, Object
from .call import Call, Refused
from .pump import Pump


@dataclass
class Entry:
    """An object of a file: what it is, what its events are about, and what it needs besides."""

    kind: Object
    what: Any
    subscriber: int = 0
    undo: ExitStack = field(default_factory=ExitStack)


class OpenFile:
    """One open of a device file. Closing it closes all objects."""

    def __init__(self, device: str, port: PortConfig):
        self.provider = soft.open_beside_others(device, port)
        self.ctx = Context(self.provider)  # type: ignore[arg-type]
        self.provider.nic.expect_polling()
        self.lock = threading.Lock()  # calls are made one at a time
        self.pump = Pump(f"gpunetio {self.ctx.name}")
        atexit.register(self.pump.stop)  # later than the NIC's end, so before it
        self.uars: dict[int, UAR] = {}  # by page id
        self.channels: dict[int, int] = {}  # completion channels, by descriptor
        self.event_channels: dict[int, int] = {}  # those of DEVX, by descriptor
        self.subscribers: dict[tuple[int, int | None], int] = {}  # on the latter, by channel and object
        self.asynchronous: int | None = None  # the channel of asynchronous events
        self.caps: dict[QP, np.ndarray] = {}  # what each was created with
        self._entries: dict[int, Entry] = {}
        self._next = 1

    def add(self, kind: Object, what: object, subscriber: int = 0, undo: ExitStack | None = None) -> int:
        """Keep an object, and return its handle."""
        handle, self._next = self._next, self._next + 1
        self._entries[handle] = Entry(kind, what, subscriber, undo or ExitStack())
        return handle

    def entry(self, kind: Object, handle: int) -> Entry:
        """Return an object by its handle. Refused with EINVAL if there is none."""
        entry = self._entries.get(handle)
        if entry is None or entry.kind != kind:
            raise Refused(errno.EINVAL, f"no {kind.name} has the handle {handle}")
        return entry

    def get(self, kind: Object, handle: int) -> Any:
        """Return what has this handle."""
        return self.entry(kind, handle).what

    def anything(self, handle: int) -> Any:
        """Return what has this handle, whatever it is. Refused with EINVAL if nothing has it."""
        if handle not in self._entries:
            raise Refused(errno.EINVAL, f"nothing has the handle {handle}")
        return self._entries[handle].what

    def remove(self, kind: Object, handle: int) -> Entry:
        """Close an object. If it cannot be closed, it stays."""
        entry = self.entry(kind, handle)
        if isinstance(entry.what, Handle):
            entry.what.close()
        entry.undo.close()
        del self._entries[handle]
        return entry

    def bury(self, call: Call) -> None:
        """Answer a call that destroys an object, when Python has ended and all NICs are closed."""
        entry = self._entries.pop(call.number(DESTROYED), None) if DESTROYED in call else None
        if entry is not None and entry.subscriber:
            call.put(DESTROY_RESP, self.reported(entry))

    def reported(self, entry: Entry) -> bytes:
        """Return how many events of a removed object the program has read: for a CQ, those of completions first."""
        completions, others = self.pump.forget(entry.subscriber)
        counts = (completions, others) if entry.kind == Object.CQ else (others,)
        return b"".join(count.to_bytes(4, "little") for count in counts)

    def close(self) -> None:
        """Close all objects, and the device."""
        atexit.unregister(self.pump.stop)
        with ExitStack() as steps:
            for entry in self._entries.values():
                steps.callback(entry.undo.close)
            steps.callback(self.ctx.close)
            steps.callback(self.pump.close)
        self._entries.clear()
