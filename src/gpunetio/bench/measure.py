"""The measurement of one message size: a warm-up, the launches, and what they tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from . import kernels
from .data import Data
from .loopback import PART_MESSAGES, Loopback
from .results import BwResult, LatResult, Result

PARTS = 8  # launches of one size, as long as each has MIN_PART messages: the best of them is the peak
MIN_PART = 256
MIN_PER_THREAD = 4
PART_BYTES = 1 << 30
WARM_UP = 64  # messages
DURATION_STEP = 0.05  # seconds of one launch, when a duration is asked for

Tick = Callable[[float], None]  # called with the share of a size that is done


def measure(run: Loopback, index: int, size: int, tick: Tick = lambda share: None) -> Result:
    """Measure messages of `size` bytes; `index`, the size's place among all, chooses the pattern that is sent."""
    data = run.data(size, (index + 1) & 0xFF)
    parts, round_trips = [], []
    if data.messages:
        warm_up = min(WARM_UP, data.messages, data.slots)
        data.lay_out(0, warm_up)
        _launch(run, data, size, 0, warm_up)
    for first, count, share in _plan(run, data, size):
        data.lay_out(first, count)
        seconds = _launch(run, data, size, first, count)
        data.collect(first, count)
        nbytes = min(count * size, data.total - first * size) if run.options.payload else count * size
        parts.append((count, nbytes, seconds))
        if run.options.benchmark.latency:
            round_trips.append(run.times.array.view(np.int64)[:count].copy())
        tick(share)
    if run.options.benchmark.latency:
        return LatResult.of(size, np.concatenate(round_trips) if round_trips else np.zeros(0), data.check())
    return BwResult.of(size, parts, data.check())


def _plan(run: Loopback, data: Data, size: int) -> Iterator[tuple[int, int, float]]:
    """(first message, messages, share that is then done) of each launch."""
    most = max(1, min(PART_MESSAGES, PART_BYTES // size))
    if run.options.duration is not None:
        yield from _timed_plan(run.options.duration, most)
        return
    if run.options.payload:
        step = data.slots
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
        # The share is that of the time, so it is known only afterwards: it lags by one launch.
        yield first, count, (before - begin) / duration
        first += count
        now = time.monotonic()
        left = max(0.0, min(DURATION_STEP, begin + duration - now))
        count = min(most, 2 * count, max(1, int(count * left / (now - before))))
        before = now


def _launch(run: Loopback, data: Data, size: int, first: int, count: int) -> float:
    """Launch the kernel for `count` messages: seconds from the first begin of a thread to the last end."""
    options = run.options
    near, far, back = run.near, run.far, run.back
    job = (size, data.total, data.slots, first, count)
    if options.benchmark.latency:
        records = run.launch(
            kernels.write_lat, 2, 1, run.clients[0], run.servers[0], near, run.near_mr.lkey, back, run.back_mr.rkey,
            far, run.far_mr.lkey, run.far_mr.rkey, *job, run.marks if options.payload else 0, run.times,
        )  # fmt: skip
    else:
        grid = options.qps if options.benchmark.name == "write_bw" else _blocks(run.threads)
        kernel = getattr(kernels, options.benchmark.name)
        keys = (far, run.far_mr.rkey, near, run.near_mr.lkey)
        records = run.launch(kernel, grid, run.threads // grid, run.qp_list, options.qps, *keys, *job)
    return max(1, int(records[:, 1].max() - records[:, 0].min())) / 1e9


def _blocks(threads: int) -> int:
    """Two blocks, so that queues are shared across blocks, unless the threads cannot be halved."""
    return 2 if threads % 2 == 0 else 1
