"""Numba compiles kernels, the software NIC, and the code between a CPU and a ring.

Nothing else needs Numba, and it is loaded when the first of these is used. So hardware can be controlled where Numba is
not installed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import NotSupportedError

_SELDOM = 100_000  # new objects between two collections
_MOST_SECONDS = 10.0  # by which the end of a program is held up


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
