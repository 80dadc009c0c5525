"""What a benchmark sends, and whether it arrived: a pattern that differs by size, or the bytes of a file.

`lay_out(first, count)` prepares both ends for a launch of messages first … first + count − 1: the receiving buffers
hold the complement of what is to arrive, so that a byte which nobody wrote is seen. `collect` looks after it,
and `check` says how it all went. `total` is the number of bytes of all messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from ..errors import InvalidValueError, OperatingSystemError
from .results import Check


class Buffer(Protocol):
    """Bytes somewhere, which are copied in and out: `GpuMemory`, for one."""

    def read(self, offset: int = 0, nbytes: int | None = None) -> np.ndarray: ...

    def write(self, data: Any, offset: int = 0) -> None: ...


@dataclass(frozen=True)
class Ends:
    """Where data lie, as far as they lie in this process.

    `marks` gets the last byte of each message of a file's, by which a latency test awaits it.
    """

    source: Buffer | None
    sinks: Sequence[Buffer]
    marks: np.ndarray


class Received:
    """A buffer whose slots were filled in any order: `order` has the message in each slot, once they have come."""

    def __init__(self, buffer: Buffer, size: int, order: np.ndarray):
        self._buffer, self._size, self._order = buffer, size, order

    def write(self, data: Any, offset: int = 0) -> None:
        """See `Buffer`."""
        self._buffer.write(data, offset)

    def read(self, offset: int = 0, nbytes: int | None = None) -> np.ndarray:
        """Of the first messages, one behind the other; `offset` must be 0."""
        assert offset == 0
        assert nbytes is not None
        count = -(-nbytes // self._size)
        slots = self._buffer.read(0, count * self._size).reshape(count, self._size)
        return slots[np.argsort(self._order[:count], kind="stable")].reshape(-1)[:nbytes]


class Data(Protocol):
    """What a launch needs to know."""

    size: int
    messages: int
    total: int
    slots: int

    def lay_out(self, first: int, count: int) -> None: ...

    def collect(self, first: int, count: int) -> None: ...

    def check(self) -> Check: ...

    def digest(self) -> str | None:
        """SHA-256 of what was sent so far, if this process knows a file's bytes."""
        ...


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
        self._source, self._sinks, self.size = ends.source, ends.sinks, size
        self._value, self._counting = value, counting
        self._sent = 0

    def lay_out(self, first: int, count: int) -> None:
        """See the module. What is there already serves the messages after the first."""
        if first > 0:
            return
        used = self.slots * self.size
        if self._source is not None:
            self._source.write(np.full(used, self._value, np.uint8))
        empty = np.full(used, ~self._value & 0xFF, np.uint8)
        if self._counting:
            empty[-1] = 0
        for sink in self._sinks:
            sink.write(empty)

    def collect(self, first: int, count: int) -> None:
        """See the module."""
        self._sent = first + count

    def check(self) -> Check:
        """See the module."""
        wanted = np.full(min(self._sent, self.slots) * self.size, self._value, np.uint8)
        if self._counting:
            wanted[-1:] = self._sent & 0xFF
        problems = [_problem(sink.read(0, len(wanted)), wanted, 0, self.size) for sink in self._sinks]
        return Check(next(filter(None, problems), None))

    def digest(self) -> str | None:
        """See `Data`."""
        return None


class Payload:
    """The first `total` bytes of a file. A launch uses no slot twice, and starts with the first."""

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, file: BinaryIO, total: int):
        self.messages, self.slots, self.total = messages, slots, total
        if ends.source is None:
            raise InvalidValueError("a file is sent from the process that has it")
        self._source, self._sinks, self._marks = ends.source, ends.sinks, ends.marks
        self.size, self._file = size, file
        self._sent, self._received = hashlib.sha256(), hashlib.sha256()
        self._problem: str | None = None
        self._part = np.zeros(0, np.uint8)  # what this launch sends

    def _window(self, first: int, count: int) -> int:
        return min(count * self.size, self.total - first * self.size)

    def lay_out(self, first: int, count: int) -> None:
        """See the module."""
        nbytes = self._window(first, count)
        self._file.seek(first * self.size)
        self._part = np.frombuffer(self._file.read(nbytes), np.uint8)
        if len(self._part) != nbytes:
            raise OperatingSystemError(f"{self._file.name} became shorter while it was sent")
        self._source.write(self._part)
        for sink in self._sinks:
            sink.write(~self._part)
        ends = np.minimum(np.arange(1, count + 1) * self.size, nbytes)
        self._marks[:count] = self._part[ends - 1]

    def collect(self, first: int, count: int) -> None:
        """See the module."""
        self._sent.update(self._part.data)
        for index, sink in enumerate(self._sinks):
            received = sink.read(0, len(self._part))
            if index == 0:
                self._received.update(received.data)
            self._problem = self._problem or _problem(received, self._part, first * self.size, self.size)

    def check(self) -> Check:
        """See the module."""
        problem = self._problem
        if not self._sinks:
            return Check()
        if problem is None and self._sent.digest() != self._received.digest():
            problem = f"message size {self.size}: SHA-256 differs, {self._received.hexdigest()} was received"
        return Check(problem, self.total, self._received.hexdigest())

    def digest(self) -> str | None:
        """See `Data`."""
        return self._sent.hexdigest()


class Arrival:
    """The first `total` bytes of a file that only the other end has, which tells SHA-256 after each launch.

    Every byte of the sink is inverted before a launch: one that nobody wrote is not what the launch before left.
    """

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, total: int):
        self.messages, self.slots, self.total = messages, slots, total
        self._sink, self._marks, self.size = ends.sinks[0], ends.marks, size
        self._received = hashlib.sha256()
        self._from = self._to = 0
        self._problem: str | None = None

    def lay_out(self, first: int, count: int) -> None:
        """See the module. Before it `marks` holds the last byte of each message, if a latency test awaits those."""
        nbytes = min(count * self.size, self.total - first * self.size)
        sink = ~self._sink.read(0, nbytes)
        if len(self._marks):
            sink[np.minimum(np.arange(1, count + 1) * self.size, nbytes) - 1] = ~self._marks[:count]
        self._sink.write(sink)

    def collect(self, first: int, count: int) -> None:
        """See the module."""
        self._from = first * self.size
        self._to = min(self._from + count * self.size, self.total)
        self._received.update(self._sink.read(0, self._to - self._from).data)

    def compare(self, digest: str | None) -> None:
        """What was sent up to now has this SHA-256."""
        if self._problem is None and digest != self._received.hexdigest():
            self._problem = (
                f"message size {self.size}: SHA-256 differs, {self._received.hexdigest()} was received: a byte at "
                f"offset {self._from} … {self._to - 1} is wrong"
            )

    def check(self) -> Check:
        """See the module."""
        return Check(self._problem, self.total, self._received.hexdigest())

    def digest(self) -> str | None:
        """See `Data`."""
        return None
