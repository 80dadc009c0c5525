"""What becomes of open objects that nobody holds any more: they are closed, and a ResourceWarning names them.

Python closes a dropped file at once. Here a finalizer can come in any thread and between any two steps, also where a
lock is held that closing needs. So it only notes the object, which lives on (PEP 442). The object is closed at the next
place where nothing is held: when something else is made from its owner. An owner that closes in order, such as a
context, closes what was made from it, dropped or not, and nothing is said.
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
    """What can be dropped."""

    @property
    def open_here(self) -> bool:
        """Return whether it is open, and was opened by this process."""
        ...

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


What = TypeVar("What", bound=Closable)
Known = TypeVar("Known")


def living(known: WeakValueDictionary[int, Known]) -> list[Known]:
    """Return what is in a dictionary, also while other threads add to it: its own `values()` would fail then."""
    return [what for each in known.valuerefs() if (what := each()) is not None]


class Dropped(Generic[What]):
    """Open objects of one owner that nobody holds. `closing` is held while one of them is closed."""

    closing: threading.RLock

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all: a forked child has neither the objects nor the threads that close them."""
        self._noted: deque[What] = deque()
        self._stuck: list[What] = []  # what could not be closed stays for the owner
        self.closing = threading.RLock()  # an owner must not close what is being closed

    def note(self, what: What) -> None:
        """Take an object from its finalizer. This takes no lock, and runs nothing else."""
        self._noted.append(what)

    def close_all(self) -> None:
        """Close the objects, and warn of each one. Not in threads that serve: they must not wait for themselves."""
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
        """Look for what only Python's collector finds, objects that refer to each other, and close all.

        Return whether there was anything, or another thread was closing something: then there is room again.
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
    """Close a dropped object, and return whether it is closed. As from a finalizer, no exception leaves this."""
    if not what.open_here:
        return True
    warn(what, "was dropped before it was closed")
    try:
        what.close()
    except Exception as error:
        _Ignored(error)
    return not what.open_here


def warn(what: Closable, why: str) -> None:
    """Give a ResourceWarning of an object, and tell where it was made if Python traces that (`-X tracemalloc`)."""
    try:
        warnings.warn(f"{what!r} {why}", ResourceWarning, 2, what if tracemalloc.is_tracing() else None)
    except ResourceWarning as error:  # where warnings are errors
        _Ignored(error)


class _Ignored:
    """An exception that nobody can catch, which Python reports (`sys.unraisablehook`)."""

    def __init__(self, error: Exception):
        self._error = error

    def __del__(self) -> None:
        raise self._error


# --- what is dropped ---


class Droppable(ABC):
    """What is closed when nobody holds it."""

    def __del__(self) -> None:
        if self.open_here:
            self.when_dropped()

    @property
    @abstractmethod
    def open_here(self) -> bool:
        """Return whether the object is open, and was opened by this process. It may be half made."""

    @abstractmethod
    def when_dropped(self) -> None:
        """Note the object in its owner's `Dropped`, or by `drop_root`. This is part of a finalizer."""


roots: Dropped[Closable] = Dropped()  # objects without an owner: contexts, GPUs, services
_held: WeakValueDictionary[int, Closable] = WeakValueDictionary()  # by id()
_to_the_end: list[Closable] = []

os.register_at_fork(after_in_child=roots.forget)


def hold(root: Closable) -> None:
    """Note an object without an owner: it goes when its caller lets go of it, or with the process."""
    _held[id(root)] = root


def held() -> list[Closable]:
    """Return the objects without an owner that this process has opened and not closed."""
    return [root for root in living(_held) if root.open_here]


def drop_root(root: Closable) -> None:
    """Note that nobody holds an object without an owner. A thread closes it, for which nobody waits."""
    roots.note(root)
    with suppress(RuntimeError):  # no room for a thread, or Python ends: then the next opening closes it, or the exit
        start_new_thread(roots.close_all, ())


@atexit.register
def _at_exit() -> None:
    """Name what is still open when Python ends. It goes on until the process has ended, and so does its memory."""
    roots.close_all()
    for root in held():
        _to_the_end.append(root)
        warn(root, "is still open when Python ends")
    del Droppable.__del__  # the modules that finalizers need go now
