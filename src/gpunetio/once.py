"""Objects that a process makes once, even if several threads ask for them at the same time."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` at its first call, and returns that result at each call.

    Threads that call it while another thread runs `make` wait for that thread. `functools.cache` would call `make` in
    each of them. If `make` raises, the next call tries again.
    """
    made = functools.cache(make)
    lock = threading.RLock()

    def renew_lock() -> None:
        nonlocal lock
        lock = threading.RLock()

    os.register_at_fork(after_in_child=renew_lock)  # a thread of the parent may hold it

    @functools.wraps(make)
    def get() -> T:
        with lock:
            return made()

    return get
