"""Open device files, and the objects in them."""

from __future__ import annotations

import errno
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..nic.control.port import PortConfig
from ..providers import soft
from ..verbs import QP, UAR, CompChannel, Context, Handle
from .abi import Object
from .call import Refused
from .pump import Pump


@dataclass
class Entry:
    """An object of a file: what it is, what it needs besides, and how the program calls it."""

    kind: Object
    what: Any
    user_handle: int = 0
    undo: ExitStack = field(default_factory=ExitStack)


class OpenFile:
    """One open of a device file. Closing it closes all objects."""

    def __init__(self, device: str, port: PortConfig):
        self.provider = soft.open_beside_others(device, port)
        self.ctx = Context(self.provider)  # type: ignore[arg-type]
        self.provider.nic.expect_polling()
        self.lock = threading.Lock()  # calls are made one at a time
        self.pump = Pump(f"gpunetio {self.ctx.name}")
        self.uars: dict[int, UAR] = {}  # by page id
        self.channels: dict[int, CompChannel] = {}  # by descriptor
        self.event_channels: dict[int, Any] = {}  # the Subscriptions of those of DEVX, by descriptor
        self.caps: dict[QP, np.ndarray] = {}  # what each was created with
        self._entries: dict[int, Entry] = {}
        self._next = 1

    def add(self, kind: Object, what: object, user_handle: int = 0, undo: ExitStack | None = None) -> int:
        """Keep an object, and return its handle."""
        handle, self._next = self._next, self._next + 1
        self._entries[handle] = Entry(kind, what, user_handle, undo or ExitStack())
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

    def remove(self, kind: Object, handle: int) -> Entry:
        """Close an object. If it cannot be closed, it stays."""
        entry = self.entry(kind, handle)
        if isinstance(entry.what, Handle):
            entry.what.close()
        entry.undo.close()
        del self._entries[handle]
        return entry

    def reported(self, entry: Entry) -> bytes:
        """Return how many events of a removed object the program has read: for a CQ, those of completions first."""
        completions, others = self.pump.forget(entry.what, entry.user_handle.to_bytes(8, "little"))
        counts = (completions, others) if entry.kind == Object.CQ else (others,)
        return b"".join(count.to_bytes(4, "little") for count in counts)

    def close(self) -> None:
        """Close all objects, and the device."""
        with ExitStack() as steps:
            for entry in self._entries.values():
                steps.callback(entry.undo.close)
            steps.callback(self.ctx.close)
            steps.callback(self.pump.close)
        self._entries.clear()
