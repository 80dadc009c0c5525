"""What a benchmark sends, and whether it arrived: a pattern that differs by size, or the bytes of a file.

`lay_out(first, count)` prepares both ends for a launch of messages first … first + count − 1: the receiving buffers
hold the complement of what is to arrive, so that a byte which nobody wrote is seen. `collect` looks after it,
and `check` says how it all went. `total` is the number of bytes of all messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from ..errors import OperatingSystemError
from .results import Check


@dataclass(frozen=True)
class Ends:
    """Where data lie. `marks` gets the last byte of each message of a file's, by which a latency test awaits it."""

    source: np.ndarray
    sinks: Sequence[np.ndarray]
    marks: np.ndarray


class Data(Protocol):
    """What a launch needs to know."""

    messages: int
    total: int
    slots: int

    def lay_out(self, first: int, count: int) -> None: ...

    def collect(self, first: int, count: int) -> None: ...

    def check(self) -> Check: ...


def _problem(sink: np.ndarray, wanted: np.ndarray, offset: int, size: int) -> str | None:
    """Where the receiver's bytes are not the sender's; `offset` is that of the first byte in what was sent."""
    if np.array_equal(sink, wanted):
        return None
    at = int(np.argmax(sink != wanted))
    return (
        f"message size {size}: the byte at offset {offset + at} of the receiver is {sink[at]:#04x} instead of "
        f"{wanted[at]:#04x} ({np.count_nonzero(sink != wanted)} of {len(wanted)} bytes are wrong)"
    )


class Pattern:
    """Every byte is `value`; with `counting`, the last one of the only slot is the message's number, from 1."""

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, value: int, counting: bool):
        self.messages, self.slots, self.total = messages, slots, messages * size
        self._source, self._sinks, self._size = ends.source, ends.sinks, size
        self._value, self._counting = value, counting
        self._sent = 0

    def lay_out(self, first: int, count: int) -> None:
        """See the module. What is there already serves the messages after the first."""
        if first > 0:
            return
        used = self.slots * self._size
        self._source[:used] = self._value
        for sink in self._sinks:
            sink[:used] = ~self._value & 0xFF
            if self._counting:
                sink[used - 1] = 0

    def collect(self, first: int, count: int) -> None:
        """See the module."""
        self._sent = first + count

    def check(self) -> Check:
        """See the module."""
        wanted = np.full(min(self._sent, self.slots) * self._size, self._value, np.uint8)
        if self._counting:
            wanted[-1:] = self._sent & 0xFF
        problems = [_problem(sink[: len(wanted)], wanted, 0, self._size) for sink in self._sinks]
        return Check(next(filter(None, problems), None))


class Payload:
    """The first `total` bytes of a file. A launch uses no slot twice, and starts with the first."""

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, file: BinaryIO, total: int):
        self.messages, self.slots, self.total = messages, slots, total
        self._source, self._sinks, self._marks = ends.source, ends.sinks, ends.marks
        self._size, self._file = size, file
        self._sent, self._received = hashlib.sha256(), hashlib.sha256()
        self._problem: str | None = None

    def _window(self, first: int, count: int) -> int:
        return min(count * self._size, self.total - first * self._size)

    def lay_out(self, first: int, count: int) -> None:
        """See the module."""
        nbytes = self._window(first, count)
        part = self._source[:nbytes]
        self._file.seek(first * self._size)
        if self._file.readinto(part.data) != nbytes:  # type: ignore[attr-defined]
            raise OperatingSystemError(f"{self._file.name} became shorter while it was sent")
        for sink in self._sinks:
            np.invert(part, out=sink[:nbytes])
        ends = np.minimum(np.arange(1, count + 1) * self._size, nbytes)
        self._marks[:count] = part[ends - 1]

    def collect(self, first: int, count: int) -> None:
        """See the module."""
        nbytes = self._window(first, count)
        self._sent.update(self._source[:nbytes].data)
        self._received.update(self._sinks[0][:nbytes].data)
        for sink in self._sinks:
            problem = _problem(sink[:nbytes], self._source[:nbytes], first * self._size, self._size)
            self._problem = self._problem or problem

    def check(self) -> Check:
        """See the module."""
        problem = self._problem
        if problem is None and self._sent.digest() != self._received.digest():
            problem = f"message size {self._size}: SHA-256 differs, {self._received.hexdigest()} was received"
        return Check(problem, self.total, self._received.hexdigest())
