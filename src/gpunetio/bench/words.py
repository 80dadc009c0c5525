"""Words that count or name messages, and the check that each holds its exact value."""

from __future__ import annotations

import numpy as np


class Words:
    """64-bit words at one end: `before` prior to the first launch of a size, or to every launch, plus one per message.

    Message n of a launch counts in word n % `counters`. `what` names a word in an error. `told`: their sum is printed.
    """

    def __init__(self, what: str, array: np.ndarray, before: int, every_launch: bool = False, told: bool = False):
        self.what, self.array, self.before, self._every_launch = what, array, before, every_launch
        self.told = told
        self._expected = np.zeros(len(array), np.int64)
        self.lay_out(0)

    def lay_out(self, first: int) -> None:
        """Prepare for a launch that starts with message `first`."""
        if first == 0 or self._every_launch:
            self.array[:] = self.before
            self._expected[:] = self.before

    def collect(self, count: int, counters: int) -> None:
        """Count `count` messages that were sent."""
        self._expected[:counters] += (count - np.arange(counters) + counters - 1) // counters

    @property
    def total(self) -> int:
        """Return the sum of all words."""
        return int((self.array - self.before).sum())

    def problem(self) -> str | None:
        """Describe a wrong word, if there is one."""
        wrong = np.flatnonzero(self.array != self._expected)
        if len(wrong) == 0:
            return None
        at = int(wrong[0])
        return (
            f"{self.what} {at} is {self.array[at]} instead of {self._expected[at]} "
            f"({len(wrong)} of {len(self.array)} are wrong)"
        )


class Order:
    """The message of each receive of a launch: each message exactly once."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self._problem: str | None = None

    def lay_out(self, first: int) -> None:
        """Prepare for a launch that starts with message `first`."""
        self.array[:] = -1
        if first == 0:
            self._problem = None

    def collect(self, count: int, counters: int) -> None:
        """Count `count` messages that were sent."""
        missing = np.setdiff1d(np.arange(count), self.array[:count])
        if len(missing):
            self._problem = self._problem or f"{len(missing)} messages of a launch did not come, the first {missing[0]}"

    def problem(self) -> str | None:
        """Describe a missing message, if there is one."""
        return self._problem
