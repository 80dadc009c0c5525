"""Progress engines, which poll contexts for completions and call the program's callbacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..arguments import deadline
from ..errors import BadStateError, TimedOutError

_EAGER = 256  # consecutive polls that find nothing before the first sleep
_LONGEST_NAP = 1e-3  # seconds


def _nap(looks: int) -> float:
    """Return how many seconds to sleep after `looks` consecutive polls that found nothing."""
    return min(max(0, looks - _EAGER) * 1e-6, _LONGEST_NAP)


class Connectable(Protocol):
    """What a progress engine can poll: a context."""

    def attach_engine(self, engine: ProgressEngine) -> None:
        """Record the engine. BadStateError if the context is started or already has an engine."""

    def progress(self) -> bool:
        """Process completions, and call callbacks. Return whether there were any."""
        ...


class ProgressEngine:
    """Polls the contexts connected to it for completions, and calls the program's callbacks (`doca_pe`).

    Callbacks run only inside `progress`. Only one thread at a time may use an engine and its contexts. A context that
    is started without an engine gets its own.
    """

    def __init__(self) -> None:
        self._contexts: list[Connectable] = []
        self._calling = False

    def connect(self, context: Connectable) -> None:
        """Connect a context that is not started (`doca_pe_connect_ctx`). BadStateError if it already has an engine."""
        context.attach_engine(self)
        self._contexts.append(context)

    def disconnect(self, context: Connectable) -> None:
        """Remove a context that is closed."""
        self._contexts.remove(context)

    @property
    def in_callback(self) -> bool:
        """Return whether one of the program's callbacks is running."""
        return self._calling

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Record, for the duration of the block, that a callback of the program is running."""
        outer, self._calling = self._calling, True
        try:
            yield
        finally:
            self._calling = outer

    def progress(self) -> bool:
        """Process completions, and call callbacks (`doca_pe_progress`). Return whether there were any.

        An exception in a callback ends the call; the next call runs the remaining callbacks. BadStateError if called
        from a callback.
        """
        if self._calling:
            raise BadStateError("progress() in a callback: return from the callback first")
        return sum(context.progress() for context in list(self._contexts)) > 0  # any() would stop at the first

    def progress_until(self, predicate: Callable[[], bool], timeout: float, what: str) -> None:
        """Make progress until `predicate()` is true.

        TimedOutError after `timeout` seconds; its message says that `what` did not come.
        """
        looks, end = 0, deadline(timeout)
        while not predicate():
            looks = 0 if self.progress() else looks + 1
            if looks:
                if time.monotonic() > end:
                    raise TimedOutError(f"{what} did not come within {timeout:g} s")
                time.sleep(_nap(looks))

    async def progress_until_async(self, predicate: Callable[[], bool]) -> None:
        """Make progress in asyncio's event loop until `predicate()` is true. Set a deadline with `asyncio.timeout`.

        Other coroutines run in the meantime, and may wait in the same way.
        """
        looks = 0
        while not predicate():
            looks = 0 if self.progress() else looks + 1
            await asyncio.sleep(_nap(looks))
