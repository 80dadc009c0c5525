"""What a benchmark sends, and whether it arrived: a pattern that differs by size and slot, or the bytes of a file.

`lay_out(first, count)` prepares both ends for a launch of messages first … first + count − 1: the receiving buffers
hold the complement of what is to arrive, so that a byte which nobody wrote is seen. `collect` looks after it, outside
of the time that is measured, and `check` says how it all went. `total` is the number of bytes of all messages.
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

    `marks` gets the last byte of each message of a file's, by which a latency test awaits it. `order` is there when
    sinks are filled in any order: it has the message of a launch in each slot, counted from the launch's first slot.
    """

    source: Buffer | None
    sinks: Sequence[Buffer]
    marks: np.ndarray
    order: np.ndarray | None = None

    def arrived(self, sink: Buffer, size: int, nbytes: int) -> np.ndarray:
        """The first `nbytes` of a sink's messages, in their order, after a launch that started with slot 0."""
        if self.order is None:
            return sink.read(0, nbytes)
        count = -(-nbytes // size)
        slots = sink.read(0, count * size).reshape(count, size)
        return slots[np.argsort(self.order[:count], kind="stable")].reshape(-1)[:nbytes]


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


_HEAD = 8  # bytes of a message that tell its slot, or as many as it has


class Pattern:
    """Every byte is `value`, but the first eight of a message have the number of its slot XORed into them.

    So a message in another one's slot is seen. With `counting`, the last byte of the only slot is the message's number,
    from 1.
    """

    messages: int
    slots: int
    total: int
    size: int

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, value: int, counting: bool):
        self.messages, self.slots, self.total = messages, slots, messages * size
        self._ends, self.size, self._counting = ends, size, counting
        head = min(size, _HEAD)
        numbers = np.arange(slots, dtype="<i8").view(np.uint8).reshape(slots, 8)
        self._sent = np.full((slots, size), value, np.uint8)
        self._sent[:, :head] ^= numbers[:, :head]
        self._problem: str | None = None

    def lay_out(self, first: int, count: int) -> None:
        """See the module. The source serves all launches."""
        if self._ends.source is not None and first == 0:
            self._ends.source.write(self._sent.reshape(-1))
        empty = ~self._sent
        if self._counting:
            empty[-1, -1] = first & 0xFF
        for sink in self._ends.sinks:
            sink.write(empty.reshape(-1))

    def collect(self, first: int, count: int) -> None:
        """See the module. Slots that the launch does not use must be as they were."""
        if self._ends.sinks:
            wanted = self._wanted(first, min(count, self.slots))
            if self._counting:
                wanted[-1, -1] = (first + count) & 0xFF
            for sink in self._ends.sinks:
                found = sink.read(0, wanted.size)
                self._problem = self._problem or _problem(found, wanted.reshape(-1), 0, self.size)

    def _wanted(self, first: int, used: int) -> np.ndarray:
        """What a launch that uses so many slots leaves in all of them."""
        order = self._ends.order
        if order is None and used == self.slots:
            return self._sent
        slots = first + np.arange(used)
        wanted = ~self._sent
        wanted[slots % self.slots] = self._sent[(slots if order is None else first + order[:used]) % self.slots]
        return wanted

    def check(self) -> Check:
        """See the module."""
        return Check(self._problem)

    def digest(self) -> str | None:
        """See `Data`."""
        return None


class Payload:
    """The first `total` bytes of a file. A launch uses no slot twice, and starts with the first."""

    messages: int
    slots: int
    total: int
    size: int

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, file: BinaryIO, total: int):
        self.messages, self.slots, self.total = messages, slots, total
        if ends.source is None:
            raise InvalidValueError("a file is sent from the process that has it")
        self._ends, self._source, self._sinks, self._marks = ends, ends.source, ends.sinks, ends.marks
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
            received = self._ends.arrived(sink, self.size, len(self._part))
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

    messages: int
    slots: int
    total: int
    size: int

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, total: int):
        self.messages, self.slots, self.total = messages, slots, total
        self._ends, self._sink, self._marks, self.size = ends, ends.sinks[0], ends.marks, size
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
        self._received.update(self._ends.arrived(self._sink, self.size, self._to - self._from).data)

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
