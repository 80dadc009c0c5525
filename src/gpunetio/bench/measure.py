"""The measurement of one message size: a warm-up, the launches, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from .data import Data
from .results import BwResult, LatResult, Result
from .run import Run

PARTS = 8  # launches of one size, if each has at least MIN_PART messages; the best one is the peak
MIN_PART = 256
MIN_PER_THREAD = 4
WARM_UP = 64  # messages
DURATION_STEP = 0.05  # seconds of one launch, with a duration

Tick = Callable[[float], None]  # called with the finished share of a size


def measure(run: Run, index: int, size: int, tick: Tick = lambda share: None) -> Result:
    """Measure messages of `size` bytes. `index`, the size's position in the list, chooses the pattern to send."""
    data = run.data(size, (index + 1) & 0xFF)
    parts, round_trips = [], []
    if data.messages:
        warm_up = min(WARM_UP, data.messages, data.slots)
        run.lay_out(data, 0, warm_up)
        run.send(data, 0, warm_up)
    for first, count, share in _plan(run, data):
        run.lay_out(data, first, count)
        records = run.send(data, first, count)
        run.collect(data, first, count)
        seconds = max(1, int(records[:, 1].max() - records[:, 0].min())) / 1e9  # from the first begin to the last end
        parts.append((count, min(count * size, data.total - first * size), seconds))
        if run.options.benchmark.latency:
            round_trips.append(run.notes.array.view(np.int64)[:count].copy())
        tick(share)
    if run.options.benchmark.latency:
        times = np.concatenate(round_trips) if round_trips else np.zeros(0)
        return LatResult.of(size, times, sum(seconds for *_, seconds in parts), run.check(data))
    return BwResult.of(size, parts, run.check(data))


def _plan(run: Run, data: Data) -> Iterator[tuple[int, int, float]]:
    """Yield (first message, messages, share that is then finished) of each launch."""
    most = run.most(data)
    if run.options.duration is not None:
        yield from _timed_plan(run.options.duration, most)
        return
    if run.payload_bytes is not None:
        step = most
    else:
        parts = min(PARTS, data.messages // max(MIN_PART, MIN_PER_THREAD * run.threads))
        step = min(most, -(-data.messages // max(1, parts)))
    for first in range(0, data.messages, step):
        count = min(step, data.messages - first)
        yield first, count, (first + count) / data.messages


def _timed_plan(duration: float, most: int) -> Iterator[tuple[int, int, float]]:
    begin = before = time.monotonic()
    first, count = 0, min(MIN_PART, most)
    while before < begin + duration:
        # The share is that of the time, which is known only afterwards: it lags by one launch.
        yield first, count, (before - begin) / duration
        first += count
        now = time.monotonic()
        left = max(0.0, min(DURATION_STEP, begin + duration - now))
        count = min(most, 2 * count, max(1, int(count * left / (now - before))))
        before = now
