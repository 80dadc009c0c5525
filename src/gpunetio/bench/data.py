"""The data of a benchmark, and the check of what arrived: a pattern that differs by size and slot, or a file.

`lay_out(first, count)` prepares both ends for a launch of messages first … first + count − 1: the receive buffers hold
the complement of the expected bytes, so that a byte that was not written is noticed. `collect` reads the buffers after
the launch, outside of the measured time, and `check` returns the verdict. `total` is the number of bytes of all
messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Protocol

import numpy as np

from ..errors import InvalidValueError, OperatingSystemError
from ..memory import BytesLike
from .results import Check


class Buffer(Protocol):
    """Bytes that can be copied in and out, for example `GpuMemory`."""

    def read(self, offset: int = 0, nbytes: int | None = None) -> np.ndarray: ...

    def write(self, data: BytesLike, offset: int = 0) -> None: ...


@dataclass(frozen=True)
class Ends:
    """The buffers of the ends that are in this process.

    `marks` gets the last byte of each message of a file; a latency test waits for that byte. `order` exists when sinks
    are filled in any order: it holds the message of a launch in each slot, counted from the launch's first slot.
    """

    source: Buffer | None
    sinks: Sequence[Buffer]
    marks: np.ndarray
    order: np.ndarray | None = None

    def arrived(self, sink: Buffer, size: int, nbytes: int) -> np.ndarray:
        """Return the first `nbytes` of a sink's messages, in order, after a launch that started with slot 0."""
        if self.order is None:
            return sink.read(0, nbytes)
        count = -(-nbytes // size)
        slots = sink.read(0, count * size).reshape(count, size)
        return slots[np.argsort(self.order[:count], kind="stable")].reshape(-1)[:nbytes]


class Data(Protocol):
    """The data of a launch."""

    size: int
    messages: int
    total: int
    slots: int

    def lay_out(self, first: int, count: int) -> None: ...

    def collect(self, first: int, count: int) -> None: ...

    def check(self) -> Check: ...

    def digest(self) -> str | None:
        """Return the SHA-256 of what was sent so far, if this process has the file."""
        ...


def _problem(sink: np.ndarray, wanted: np.ndarray, offset: int, size: int) -> str | None:
    """Describe the first difference between the receiver's bytes and the sender's.

    `offset` is that of the first byte sent.
    """
    if np.array_equal(sink, wanted):
        return None
    at = int(np.argmax(sink != wanted))
    return (
        f"message size {size}: the byte at offset {offset + at} of the receiver is {sink[at]:#04x} instead of "
        f"{wanted[at]:#04x} ({np.count_nonzero(sink != wanted)} of {len(wanted)} bytes are wrong)"
    )


_HEAD = 8  # bytes of a message that encode its slot (fewer in a shorter message)


class Pattern:
    """Every byte is `value`, except that the number of a message's slot is XORed into its first eight bytes.

    So a message in a wrong slot is noticed. With `counting`, the last byte of the only slot is the message's number,
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
        """Prepare both ends. The source serves all launches."""
        if self._ends.source is not None and first == 0:
            self._ends.source.write(self._sent.reshape(-1))
        empty = ~self._sent
        if self._counting:
            empty[-1, -1] = first & 0xFF
        for sink in self._ends.sinks:
            sink.write(empty.reshape(-1))

    def collect(self, first: int, count: int) -> None:
        """Read the buffers. Slots that the launch does not use must be unchanged."""
        if self._ends.sinks:
            wanted = self._wanted(first, min(count, self.slots))
            if self._counting:
                wanted[-1, -1] = (first + count) & 0xFF
            for sink in self._ends.sinks:
                found = sink.read(0, wanted.size)
                self._problem = self._problem or _problem(found, wanted.reshape(-1), 0, self.size)

    def _wanted(self, first: int, used: int) -> np.ndarray:
        """Return the expected contents of all slots after a launch that uses `used` of them."""
        order = self._ends.order
        if order is None and used == self.slots:
            return self._sent
        slots = first + np.arange(used)
        wanted = ~self._sent
        wanted[slots % self.slots] = self._sent[(slots if order is None else first + order[:used]) % self.slots]
        return wanted

    def check(self) -> Check:
        return Check(self._problem)

    def digest(self) -> str | None:
        return None


class Payload:
    """The first `total` bytes of a file. A launch uses each slot once, starting with the first."""

    messages: int
    slots: int
    total: int
    size: int

    def __init__(self, ends: Ends, size: int, messages: int, slots: int, file: BufferedReader, total: int):
        self.messages, self.slots, self.total = messages, slots, total
        if ends.source is None:
            raise InvalidValueError("only the process that has the file can send it")
        self._ends, self._source, self._sinks, self._marks = ends, ends.source, ends.sinks, ends.marks
        self.size, self._file = size, file
        self._sent, self._received = hashlib.sha256(), hashlib.sha256()
        self._problem: str | None = None
        self._part = np.zeros(0, np.uint8)  # the bytes that this launch sends

    def _window(self, first: int, count: int) -> int:
        return min(count * self.size, self.total - first * self.size)

    def lay_out(self, first: int, count: int) -> None:
        nbytes = self._window(first, count)
        self._file.seek(first * self.size)
        self._part = np.frombuffer(self._file.read(nbytes), np.uint8)
        if len(self._part) != nbytes:
            raise OperatingSystemError(f"{self._file.name} was truncated while it was sent")
        self._source.write(self._part)
        for sink in self._sinks:
            sink.write(~self._part)
        ends = np.minimum(np.arange(1, count + 1) * self.size, nbytes)
        self._marks[:count] = self._part[ends - 1]

    def collect(self, first: int, count: int) -> None:
        self._sent.update(self._part.data)
        for index, sink in enumerate(self._sinks):
            received = self._ends.arrived(sink, self.size, len(self._part))
            if index == 0:
                self._received.update(received.data)
            self._problem = self._problem or _problem(received, self._part, first * self.size, self.size)

    def check(self) -> Check:
        problem = self._problem
        if not self._sinks:
            return Check()
        if problem is None and self._sent.digest() != self._received.digest():
            problem = f"message size {self.size}: SHA-256 differs, {self._received.hexdigest()} was received"
        return Check(problem, self.total, self._received.hexdigest())

    def digest(self) -> str | None:
        return self._sent.hexdigest()


class Arrival:
    """The first `total` bytes of a file that only the other end has. The other end sends its SHA-256 after each launch.

    Every byte of the sink is inverted before a launch, so that a byte that was not written differs from the last
    launch.
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
        """Prepare the sink. `marks` must hold the last byte of each message, if a latency test waits for those."""
        nbytes = min(count * self.size, self.total - first * self.size)
        sink = ~self._sink.read(0, nbytes)
        if len(self._marks):
            sink[np.minimum(np.arange(1, count + 1) * self.size, nbytes) - 1] = ~self._marks[:count]
        self._sink.write(sink)

    def collect(self, first: int, count: int) -> None:
        self._from = first * self.size
        self._to = min(self._from + count * self.size, self.total)
        self._received.update(self._ends.arrived(self._sink, self.size, self._to - self._from).data)

    def compare(self, digest: str | None) -> None:
        """Compare the SHA-256 of all bytes sent so far with that of the received bytes."""
        if self._problem is None and digest != self._received.hexdigest():
            self._problem = (
                f"message size {self.size}: SHA-256 differs, {self._received.hexdigest()} was received: a byte at "
                f"offset {self._from} … {self._to - 1} is wrong"
            )

    def check(self) -> Check:
        return Check(self._problem, self.total, self._received.hexdigest())

    def digest(self) -> str | None:
        return None
