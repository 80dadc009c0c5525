"""Plot results: bandwidth over message size, or the distribution of latencies."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidValueError, NotFoundError, NotSupportedError
from .report import BW_UNITS
from .results import BwResult, LatResult, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
_BINS = 60
_SHOWN = 99.9  # percent of the latencies that the histogram spans
_PERCENTILES = (50, 99, 99.9)
_LABELS = 4  # at most, of a linear axis of times: the narrowest has room for these


def check(path: Path, option: str = "--plot") -> None:
    """Raise an error if the picture cannot be written there. Call this before measuring."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidValueError(f"{option} {path}: the suffix names the format, one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise NotFoundError(f"{option} {path}: there is no directory {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise NotSupportedError(f"{option} needs matplotlib, in the extra 'plot': pip install 'gpunetio[plot]'")


def draw(path: Path, title: str, results: Sequence[Result], gbits: bool) -> None:
    """Draw the picture in the format that the suffix names. Bandwidths have the unit of the table (`report.Table`)."""
    from matplotlib.figure import Figure  # without pyplot, no window opens and no display is needed

    bandwidths = [result for result in results if isinstance(result, BwResult)]
    latencies = [result for result in results if isinstance(result, LatResult) and result.times is not None]
    figure = Figure(figsize=(8, 4.5 if bandwidths else max(4.5, 2.2 * len(latencies))), layout="constrained")
    figure.suptitle(title)
    if bandwidths:
        _bandwidth(figure.subplots(), bandwidths, *BW_UNITS[gbits])
    elif latencies:
        for axes, result in zip(np.ravel(figure.subplots(len(latencies), squeeze=False)), latencies):
            _distribution(axes, result)
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=150)


def time_bins(axes: Axes, low: float, high: float, count: int) -> list[float]:
    """Set the scale of an axis of times from `low` to `high`, in µs, and return the edges of a histogram's bins.

    Most times are close together and a few are far away, so the axis is logarithmic. Within less than a decade, the
    labels of a logarithmic axis overlap, so a linear axis is used there.
    """
    high = max(high, low * 1.01)
    if high >= 10 * low:
        axes.set_xscale("log")
        return np.geomspace(low, high, count).tolist()
    axes.locator_params(axis="x", nbins=_LABELS)
    return np.linspace(low, high, count).tolist()


def _bandwidth(axes: Axes, results: list[BwResult], unit: str, size: float) -> None:
    ordered = sorted(results, key=lambda result: result.size)
    sizes = [result.size for result in ordered]
    axes.plot(sizes, [result.average / size for result in ordered], "o-", label="average")
    axes.plot(sizes, [result.peak / size for result in ordered], "^--", label="peak", alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("message size [bytes]")
    axes.set_ylabel(f"bandwidth [{unit}]")
    axes.grid(True, alpha=0.3)
    axes.legend()


def _distribution(axes: Axes, result: LatResult) -> None:
    times = np.zeros(0) if result.times is None else result.times
    axes.set_title(f"{result.size} bytes, {result.iterations} round trips", fontsize="medium")
    axes.set_xlabel("latency [µs]")
    axes.set_ylabel("messages")
    if len(times):
        low, high = float(times.min()), float(np.percentile(times, _SHOWN))
        axes.hist(times, bins=time_bins(axes, low, high, _BINS), alpha=0.7)
        axes.set_yscale("log")
        for percent, value, style in zip(_PERCENTILES, np.percentile(times, _PERCENTILES), ("-", "--", ":")):
            axes.axvline(value, color="black", linestyle=style, label=f"{percent:g}%: {value:.2f} µs")
        axes.legend(fontsize="small")
