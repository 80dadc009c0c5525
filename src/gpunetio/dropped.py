"""Close open objects that nothing refers to any more, with a ResourceWarning.

Python closes a dropped file immediately. Here a finalizer may run in any thread and between any two steps, even while a
lock is held that closing needs. So the finalizer only records the object, which lives on (PEP 442). The object is
closed when no such lock is held: when another object is made from its owner. An owner that is closed properly, such as
a context, closes everything that was made from it, dropped or not, without a warning.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import tracemalloc
import warnings
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from .service import serving


class Closable(Protocol):
    """An object that can be dropped."""

    @property
    def open_here(self) -> bool:
        """Return whether the object is open, and was opened by this process."""
        ...

    def close(self) -> None:
        """Close the object. Idempotent."""
        ...


What = TypeVar("What", bound=Closable)
Known = TypeVar("Known")


def living(known: WeakValueDictionary[int, Known]) -> list[Known]:
    """Return the values of a dictionary, even while other threads add to it: its own `values()` would then fail."""
    return [what for each in known.valuerefs() if (what := each()) is not None]


class Dropped(Generic[What]):
    """Open objects of one owner that nothing refers to. `closing` is held while one of them is closed."""

    closing: threading.RLock

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all objects: a forked child has neither the objects nor the threads that close them."""
        self._noted: deque[What] = deque()
        self._stuck: list[What] = []  # objects that could not be closed are left to the owner
        self.closing = threading.RLock()  # an owner must not close an object that is being closed

    def note(self, what: What) -> None:
        """Record an object, for its finalizer. This takes no lock, and runs no other code."""
        self._noted.append(what)

    def close_all(self) -> None:
        """Close the objects, and warn of each. Do nothing in service threads: they must not wait for themselves."""
        while self._noted and not serving():
            with self.closing:
                self._close_one()

    def _close_one(self) -> None:
        with suppress(IndexError):  # another thread was faster
            what = self._noted.popleft()
            try:
                if not _close(what):
                    self._stuck.append(what)
            except BaseException:  # Ctrl+C while it waits for a kernel
                self._noted.append(what)
                raise

    def take(self) -> list[What]:
        """Return the objects, for an owner that closes them itself."""
        taken, self._stuck = self._stuck, []
        while self._noted:
            with suppress(IndexError):
                taken.append(self._noted.popleft())
        return taken

    def found(self) -> bool:
        """Find dropped objects that refer to each other, which only Python's collector finds, and close all objects.

        Return whether there were any, or another thread was closing some: resources are then free again.
        """
        waited = not self.closing.acquire(blocking=False)
        if waited:
            self.closing.acquire()
        try:
            gc.collect()
            found = waited or bool(self._noted)
            self.close_all()
        finally:
            self.closing.release()
        return found


def _close(what: Closable) -> bool:
    """Close a dropped object, and return whether it is closed. As in a finalizer, no exception is propagated."""
    if not what.open_here:
        return True
    warn(what, "was dropped before it was closed")
    try:
        what.close()
    except Exception as error:
        _Ignored(error)
    return not what.open_here


def warn(what: Closable, why: str) -> None:
    """Issue a ResourceWarning for an object, with the place of its creation if Python traces it (`-X tracemalloc`)."""
    try:
        warnings.warn(f"{what!r} {why}", ResourceWarning, 2, what if tracemalloc.is_tracing() else None)
    except ResourceWarning as error:  # where warnings are errors
        _Ignored(error)


class _Ignored:
    """An exception that no caller can catch, so that Python reports it (`sys.unraisablehook`)."""

    def __init__(self, error: Exception):
        self._error = error

    def __del__(self) -> None:
        raise self._error


# --- objects that can be dropped ---


class Droppable(ABC):
    """An object that is closed when nothing refers to it any more."""

    def __del__(self) -> None:
        if self.open_here:
            self.when_dropped()

    @property
    @abstractmethod
    def open_here(self) -> bool:
        """Return whether the object is open, and was opened by this process. The object may be half-made."""

    @abstractmethod
    def when_dropped(self) -> None:
        """Record the object in its owner's `Dropped`, or with `drop_root`. This is part of a finalizer."""


roots: Dropped[Closable] = Dropped()  # objects without an owner: contexts, GPUs, services
_held: WeakValueDictionary[int, Closable] = WeakValueDictionary()  # by id()
_to_the_end: list[Closable] = []

os.register_at_fork(after_in_child=roots.forget)


def hold(root: Closable) -> None:
    """Record an object without an owner. It is closed when the caller drops it, or lives until the process ends."""
    _held[id(root)] = root


def held() -> list[Closable]:
    """Return the objects without an owner that this process has opened and not closed."""
    return [root for root in living(_held) if root.open_here]


def drop_root(root: Closable) -> None:
    """Record that an object without an owner was dropped. A background thread closes it."""
    roots.note(root)
    with suppress(RuntimeError):  # no room for a thread, or Python ends: the next opening, or the exit, closes it
        start_new_thread(roots.close_all, ())


@atexit.register
def _at_exit() -> None:
    """Warn of objects that are still open when Python ends. They and their memory live until the process has ended."""
    roots.close_all()
    for root in held():
        _to_the_end.append(root)
        warn(root, "is still open when Python ends")
    del Droppable.__del__  # the modules that finalizers need are unloaded now
