"""Timestamps of single operations, which kernels take on request (KERNEL_DEBUG_TIMES of the original).

Each thread that takes timestamps has a part of its own: how many operations it may note, how many it has noted, how
many of those it has seen complete, and a row for each. An operation counts as complete when the thread notices it. The
thread checks after each post, and waits for the rest when it has posted everything. With `part` 0 no timestamps are
taken, which costs one comparison per operation.
"""

from __future__ import annotations

import numpy as np

from .. import device as dev
from ..jit.compile import device_function

LIMIT, NOTED, SEEN, HEADER = 0, 8, 16, 24
MESSAGE, BEGIN, POSTED, DONE, TICKET, ROW = 0, 8, 16, 24, 32, 40


def part_bytes(limit: int) -> int:
    """Return the bytes of a part for `limit` operations."""
    return HEADER + ROW * limit


def prepared(threads: int, limit: int) -> np.ndarray:
    """Return empty parts for this many threads."""
    parts = np.zeros((threads, part_bytes(limit) // 8), np.int64)
    parts[:, LIMIT // 8] = limit
    return parts


def noted(parts: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each thread: message, when its post began, when it ended, when it was complete; in ns."""
    rows = parts[:, HEADER // 8 :].reshape(len(parts), -1, ROW // 8)
    return [thread[:count, :4] for thread, count in zip(rows, parts[:, SEEN // 8])]


@device_function
def part_of(trace: int, thread: int) -> int:
    """Return a thread's part, or 0."""
    if trace == 0:
        return 0
    return trace + thread * (HEADER + ROW * dev.ld64(trace + LIMIT))


@device_function
def now(part: int) -> int:
    """Return the time in ns, or 0 when no timestamps are taken."""
    return dev.clock_ns() if part != 0 else 0


@device_function
def note(part: int, message: int, begin: int, ticket: int) -> None:
    """Note that a post that began at `begin` has ended."""
    if part == 0:
        return
    count = dev.ld64(part + NOTED)
    if count < dev.ld64(part + LIMIT):
        row = part + HEADER + ROW * count
        dev.st64(row + MESSAGE, message)
        dev.st64(row + BEGIN, begin)
        dev.st64(row + POSTED, dev.clock_ns())
        dev.st64(row + TICKET, ticket)
        dev.st64(part + NOTED, count + 1)


@device_function
def complete(part: int, message: int) -> None:
    """Note that the next noted operation is complete, and that it was this message."""
    if part == 0:
        return
    count = dev.ld64(part + SEEN)
    if count < dev.ld64(part + NOTED):
        row = part + HEADER + ROW * count
        dev.st64(row + MESSAGE, message)
        dev.st64(row + DONE, dev.clock_ns())
        dev.st64(part + SEEN, count + 1)


@device_function
def _see(waiting: int, part: int, qp: dev.VerbsQp, sharing: int) -> None:
    if part == 0:
        return
    count = dev.ld64(part + SEEN)
    noted_ones = dev.ld64(part + NOTED)
    while count < noted_ones:
        row = part + HEADER + ROW * count
        ticket = dev.ld64(row + TICKET)
        if (dev.poll_at(qp, ticket, sharing) if waiting else dev.poll_one(qp, ticket, sharing)) != dev.OK:
            break
        dev.st64(row + DONE, dev.clock_ns())
        count += 1
    dev.st64(part + SEEN, count)


@device_function
def look(part: int, qp: dev.VerbsQp, sharing: int) -> None:
    """Note which of the noted operations are complete by now."""
    _see(False, part, qp, sharing)


@device_function
def finish(part: int, qp: dev.VerbsQp, sharing: int) -> None:
    """Wait for all noted operations."""
    _see(True, part, qp, sharing)
