"""Plot a trace: for each size, the activity of threads over time, and the duration of operations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .plot import time_bins
from .trace import Trace, TracedThread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZES = 4  # shown at most: the first ones
_THREADS = 12
_OPERATIONS = 32  # per thread in the timeline, so that single operations are visible
_BINS = 40
_PERCENTILES = ((50, "-"), (99, "--"))
_POST, _FLIGHT = "tab:blue", "tab:orange"


def draw(path: Path, title: str, trace: Trace) -> None:
    """Draw the picture in the format that the suffix names."""
    from matplotlib.figure import Figure  # without pyplot, no window opens and no display is needed

    shown = [(size, threads) for size, threads in trace.sizes.items() if threads][:_SIZES]
    heights = [1.6 + 0.7 * min(len(threads), _THREADS) for _, threads in shown] or [2.0]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    figure.suptitle(title)
    if shown:
        grid = figure.subplots(len(shown), 2, squeeze=False, width_ratios=(3, 1), height_ratios=heights)
        for (left, right), (size, threads) in zip(grid, shown):
            _timeline(left, size, threads)
            _distribution(right, threads)
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=150)


def _timeline(axes: Axes, size: int, threads: list[TracedThread]) -> None:
    """Draw a lane per thread, with a line per operation, the first one on top."""
    drawn = [(thread, thread.rows[:_OPERATIONS]) for thread in threads[:_THREADS]]
    zero = min(rows[0, 1] for _, rows in drawn)
    for lane, (_, rows) in enumerate(drawn):
        heights = lane + 0.85 * np.arange(len(rows)) / len(rows)
        begin, posted, done = (rows[:, 1:].T - zero) / 1000
        axes.hlines(heights, posted, np.maximum(posted, done), colors=_FLIGHT, linewidth=1)
        axes.hlines(heights, begin, posted, colors=_POST, linewidth=1)
    labels = [f"{thread.name}\n{thread.operation}" for thread, _ in drawn]
    axes.set_yticks(np.arange(len(labels)) + 0.4, labels, fontsize="small")
    axes.set_ylim(len(labels), -0.15)
    axes.set_xlabel("µs: posting (blue), until complete (orange)")
    most = max(len(rows) for _, rows in drawn)
    axes.set_title(f"{size} bytes, the first {most} operations", fontsize="medium")
    axes.grid(True, axis="x", alpha=0.3)


def _distribution(axes: Axes, threads: list[TracedThread]) -> None:
    """Draw the distribution of the times from the begin of a post to its completion."""
    times = np.concatenate([thread.rows[:, 3] - thread.rows[:, 1] for thread in threads]) / 1000
    low, high = max(float(times.min()), 1e-3), float(times.max())
    axes.hist(times, bins=time_bins(axes, low, high, _BINS), color=_FLIGHT, alpha=0.7)
    for percent, style in _PERCENTILES:
        value = float(np.percentile(times, percent))
        axes.axvline(value, color="black", linestyle=style, label=f"{percent}%: {value:.2f} µs")
    axes.set_xlabel("begin to completion [µs]")
    axes.set_ylabel("operations")
    axes.legend(fontsize="small")
