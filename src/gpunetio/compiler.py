"""Coordinate the use of LLVM, which compiles kernels, the software NIC, and the code between a CPU and a ring.

Nothing else needs LLVM, and it is loaded when the first of these is used. So hardware can be controlled without
llvmlite.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import kept  # noqa: F401  # the steps before a fork are made in reverse, and those of `kept` must be the last
from .errors import NotSupportedError

logger: logging.Logger = logging.getLogger("gpunetio.compile")

_SELDOM = 100_000  # new objects between two collections
_MOST_SECONDS = 10.0  # the longest delay of a program's end
_MOST_OF_FORK = 60.0  # seconds, the longest delay of a fork: twice the time to compile the software NIC


@contextmanager
def little_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely inside the block, because compilers and modules of compiled functions keep their objects.

    Searching these objects would take a fifth of the time.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _SELDOM:  # collection is off, or another thread is here, which restores the threshold
        yield
        return
    gc.set_threshold(_SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_lock = threading.RLock()  # held by the thread that compiles or loads code


@contextmanager
def compiling() -> Iterator[None]:
    """Let one thread at a time compile or load code. No other thread of this process forks meanwhile."""
    with _lock:
        yield


def end() -> None:
    """Wait until no thread compiles or loads code, and let none do so any more, because the program ends.

    LLVM's destructors run next, and a thread that used LLVM meanwhile would crash.
    """
    _lock.acquire(timeout=_MOST_SECONDS)


_end_of_program: list[int] = []  # the address of the C function that calls `end`, in a program that is not Python


def ends_by(address: int) -> None:
    """Set the C function that calls `end` when the program ends."""
    _end_of_program[:] = [address]


def has_compiled() -> None:
    """Register `end` to run before the destructors of objects that LLVM has made since: these run in reverse order."""
    for address in _end_of_program:
        ctypes.CDLL(None)["__cxa_atexit"](ctypes.c_void_p(address), None, None)


_held: list[bool] = []  # while a thread forks: whether it has the lock


def _wait() -> None:
    """Make a fork wait until no thread compiles or loads code.

    A thread that compiles does not exist in the child, where all its locks would stay taken: this one, llvmlite's, and
    those of cached properties. New locks would not help, because the objects behind them are half-made, such as LLVM's.
    """
    _held.append(_lock.acquire(timeout=_MOST_OF_FORK))
    if not _held[-1]:
        logger.warning(
            "a process forks while it compiles, as that has not ended within %g s: the child may be unable to "
            "open software NICs or to launch kernels", _MOST_OF_FORK,
        )


def _go_on() -> None:
    if _held and _held.pop():  # empty if the fork began before this module was loaded
        _lock.release()


def _go_on_in_child() -> None:
    global _lock
    if not _held:
        return
    if _held.pop():
        _lock.release()
    else:
        _lock = threading.RLock()  # otherwise the child would wait forever for this lock


os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on_in_child)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Import compiled modules inside the block. Without llvmlite, raise NotSupportedError that begins with `what`."""
    try:
        with little_garbage_collection():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "llvmlite":
            raise
        raise NotSupportedError(f"{what} without llvmlite ({error}): pip install llvmlite") from error
