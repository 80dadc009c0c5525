"""Things that a process has once, and that several threads may ask for first."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Call `make` at the first call, and return at each call what it returned then.

    Threads that ask while another one makes it wait for that one. `functools.cache` would call `make` in each of them.
    If it raises, the next call tries again.
    """
    made = functools.cache(make)
    lock = threading.RLock()

    def renew_lock() -> None:
        nonlocal lock
        lock = threading.RLock()

    os.register_at_fork(after_in_child=renew_lock)  # the thread that holds it may be the parent's

    @functools.wraps(make)
    def get() -> T:
        with lock:
            return made()

    return get
