"""Numba compiles kernels, the software NIC, and the code between a CPU and a ring.

Nothing else needs Numba, and it is loaded when the first of these is used. So hardware can be controlled where Numba is
not installed.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


def end() -> None:
    """Wait until nobody compiles code or loads it, and let nobody do so any more: the program ends.

    LLVM's destructors come next, and a thread that used LLVM meanwhile would crash.
    """
    from numba.core.compiler_lock import global_compiler_lock

    global_compiler_lock._lock.acquire(timeout=_MOST_SECONDS)


def let_forks_wait() -> None:
    """Have each fork of this process wait until nobody compiles code or loads it.

    The thread that compiles is not there in the child, where all its locks would stay taken: Numba's, llvmlite's, those
    of cached properties. New ones would guard what it has left half-made, LLVM's structures among it.
    """
    from numba.core.compiler_lock import global_compiler_lock

    def wait() -> None:
        if not global_compiler_lock._lock.acquire(timeout=_MOST_OF_FORK):
            logger.warning(
                "a process forks while it compiles, as that has not ended within %g s: the child may be unable to "
                "open software NICs or to launch kernels", _MOST_OF_FORK,
            )  # fmt: skip

    def go_on() -> None:
        if global_compiler_lock.is_locked():  # by this thread
            global_compiler_lock._lock.release()

    def go_on_in_child() -> None:
        if not global_compiler_lock.is_locked():  # by this thread
            global_compiler_lock._lock = threading.RLock()  # at least this wait would be for ever
        go_on()

    os.register_at_fork(before=wait, after_in_parent=go_on, after_in_child=go_on_in_child)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Import compiled modules in this context. Without Numba, raise NotSupportedError, which begins with `what`."""
    try:
        with little_garbage_collection():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise NotSupportedError(f"{what} without Numba ({error}): pip install numba") from error
