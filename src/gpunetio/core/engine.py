"""Progress engines: what has ended is noticed there, and the program is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..arguments import deadline
from ..errors import BadStateError, TimedOutError

_EAGER = 256  # looks in a row that find nothing, before the first nap
_LONGEST_NAP = 1e-3  # seconds


def _nap(looks: int) -> float:
    """Return how many seconds to sleep after so many looks in a row that found nothing."""
    return min(max(0, looks - _EAGER) * 1e-6, _LONGEST_NAP)


class Connectable(Protocol):
    """What an engine looks after: a context."""

    def attach_engine(self, engine: ProgressEngine) -> None:
        """Note the engine. BadStateError if the context is started, or has one."""

    def progress(self) -> bool:
        """Take what has completed, and call callbacks. Return whether there was anything."""
        ...


class ProgressEngine:
    """Looks for completions in the contexts that are connected to it (`doca_pe`), and calls the program's callbacks.

    Callbacks run in `progress`, and nowhere else. One thread at a time uses an engine and its contexts. A context that
    is started without an engine gets one of its own.
    """

    def __init__(self) -> None:
        self._contexts: list[Connectable] = []
        self._calling = False

    def connect(self, context: Connectable) -> None:
        """Connect a context that is not started (`doca_pe_connect_ctx`). BadStateError if it has an engine already."""
        context.attach_engine(self)
        self._contexts.append(context)

    def disconnect(self, context: Connectable) -> None:
        """Forget a context that is closed."""
        self._contexts.remove(context)

    @property
    def in_callback(self) -> bool:
        """Return whether a callback of the program runs."""
        return self._calling

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Note that callbacks of the program run."""
        outer, self._calling = self._calling, True
        try:
            yield
        finally:
            self._calling = outer

    def progress(self) -> bool:
        """Take what has completed, and call callbacks (`doca_pe_progress`). Return whether there was anything.

        An exception of a callback ends the call; the other callbacks follow with the next one. BadStateError in a
        callback.
        """
        if self._calling:
            raise BadStateError("progress() in a callback: return from the callback first")
        return sum(context.progress() for context in list(self._contexts)) > 0  # all of them

    def progress_until(self, predicate: Callable[[], bool], timeout: float, what: str) -> None:
        """Make progress until `predicate()` is true.

        TimedOutError, which says that `what` did not come, after `timeout` seconds.
        """
        looks, end = 0, deadline(timeout)
        while not predicate():
            looks = 0 if self.progress() else looks + 1
            if looks:
                if time.monotonic() > end:
                    raise TimedOutError(f"{what} did not come within {timeout:g} s")
                time.sleep(_nap(looks))

    async def progress_until_async(self, predicate: Callable[[], bool]) -> None:
        """Make progress in asyncio's event loop until `predicate()` is true. `asyncio.timeout` sets a deadline.

        Other coroutines run meanwhile, and may wait in the same way.
        """
        looks = 0
        while not predicate():
            looks = 0 if self.progress() else looks + 1
            await asyncio.sleep(_nap(looks))
