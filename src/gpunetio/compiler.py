"""LLVM compiles kernels, the software NIC, and the code between a CPU and a ring.

Nothing else needs it, and it is loaded when the first of these is used. So hardware can be controlled where llvmlite is
not installed.
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
_MOST_SECONDS = 10.0  # by which the end of a program is held up
_MOST_OF_FORK = 60.0  # seconds by which a fork is held up: twice what compiling the software NIC takes


@contextmanager
def little_garbage_collection() -> Iterator[None]:
    """Collect garbage seldom: what compilers, and modules of compiled functions, make is kept.

    Looking through that takes a fifth of their time.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _SELDOM:  # the program collects none, or another thread is here, which puts back what was
        yield
        return
    gc.set_threshold(_SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_lock = threading.RLock()  # of the thread that compiles code or loads it


@contextmanager
def compiling() -> Iterator[None]:
    """Let one thread at a time compile code or load it. No other part of this process forks meanwhile."""
    with _lock:
        yield


def end() -> None:
    """Wait until nobody compiles code or loads it, and let nobody do so any more: the program ends.

    LLVM's destructors come next, and a thread that used LLVM meanwhile would crash.
    """
    _lock.acquire(timeout=_MOST_SECONDS)


_end_of_program: list[int] = []  # the address of the function of C that calls `end`, in a program that is not Python's


def ends_by(address: int) -> None:
    """Know the function of C that calls `end` when the program ends."""
    _end_of_program[:] = [address]


def has_compiled() -> None:
    """Have `end` called before the destructors of what LLVM has made since: they run in the reverse order."""
    for address in _end_of_program:
        ctypes.CDLL(None)["__cxa_atexit"](ctypes.c_void_p(address), None, None)


_held: list[bool] = []  # while a thread forks: whether it has the lock


def _wait() -> None:
    """Have a fork wait until nobody compiles code or loads it.

    The thread that compiles is not there in the child, where all its locks would stay taken: this one, llvmlite's,
    those of cached properties. New ones would guard what it has left half-made, LLVM's structures among it.
    """
    _held.append(_lock.acquire(timeout=_MOST_OF_FORK))
    if not _held[-1]:
        logger.warning(
            "a process forks while it compiles, as that has not ended within %g s: the child may be unable to "
            "open software NICs or to launch kernels", _MOST_OF_FORK,
        )  # fmt: skip


def _go_on() -> None:
    if _held and _held.pop():  # none of a fork that began before this module was there
        _lock.release()


def _go_on_in_child() -> None:
    global _lock
    if not _held:
        return
    if _held.pop():
        _lock.release()
    else:
        _lock = threading.RLock()  # at least this wait would be for ever


os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on_in_child)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Import compiled modules in this context. Without llvmlite, raise NotSupportedError, which begins with `what`."""
    try:
        with little_garbage_collection():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "llvmlite":
            raise
        raise NotSupportedError(f"{what} without llvmlite ({error}): pip install llvmlite") from error
