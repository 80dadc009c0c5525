"""Timers of communications."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

_SPARE = 64  # this many cancelled entries may stay in the heap


class Timers(Generic[Owner]):
    """At most one timer per owner. Setting and cancelling are cheap: most timers are cancelled before they are due."""

    def __init__(self) -> None:
        self._due: dict[Owner, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Owner]] = []  # also has timers that were cancelled or set again
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._due)

    def set(self, owner: Owner, due: float) -> None:
        """Start the owner's timer, replacing any other."""
        entry = due, next(self._number)
        self._due[owner] = entry
        heapq.heappush(self._heap, (*entry, owner))
        if len(self._heap) > 2 * len(self._due) + _SPARE:
            self._heap = [(*entry, owner) for owner, entry in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, owner: Owner) -> None:
        """Stop the owner's timer, if it has one."""
        self._due.pop(owner, None)

    def next(self) -> float | None:
        """Return when the next timer is due, or None."""
        while self._heap:
            due, number, owner = self._heap[0]
            if self._due.get(owner) == (due, number):
                return due
            heapq.heappop(self._heap)
        return None

    def expired(self, now: float) -> Iterator[Owner]:
        """Remove the owners whose timers are due, and return them in order."""
        while (due := self.next()) is not None and due <= now:
            owner = heapq.heappop(self._heap)[2]
            del self._due[owner]
            yield owner
