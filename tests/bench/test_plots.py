"""What pictures of results say: their units, and axes whose labels are apart."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpunetio.bench import plot
from gpunetio.bench.results import BwResult, Check


def labels_of(low: float, high: float) -> tuple[str, list]:
    """The scale of an axis as narrow as a trace's, and the boxes of its labels."""
    figure = Figure(figsize=(2.5, 2), layout="constrained", dpi=150)
    axes = figure.subplots()
    bins = plot.time_bins(axes, low, high, 40)
    axes.hist(np.linspace(low, high, 100), bins=bins)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ticks = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    boxes = [tick.get_window_extent() for tick in ticks if tick.get_text()]
    return axes.get_xscale(), sorted(boxes, key=lambda box: box.x0)


@pytest.mark.parametrize(
    ("low", "high", "scale"),
    [(1.0, 1.0, "linear"), (2.1, 2.9, "linear"), (103.0, 990.0, "linear"), (0.001, 0.005, "linear"), (1, 10, "log"),
     (0.5, 20_000, "log")],
)
def test_labels_of_times_do_not_overlap(low, high, scale):
    used, boxes = labels_of(low, high)
    assert used == scale
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize(("gbits", "unit", "value"), [(False, "MiB/sec", 1000.0), (True, "Gb/sec", 8.388608)])
def test_bandwidths_have_the_unit_of_the_table(gbits, unit, value, monkeypatch, tmp_path):
    """1000 MiB are 1,048,576,000 bytes, which are 8.388608 Gb."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: drawn.append(figure))
    rate = float(1000 << 20)
    result = BwResult(size=64, iterations=1, peak=rate, average=rate, rate=1.0, kernel=1.0, check=Check())
    plot.draw(tmp_path / "x.png", "x", [result], gbits)
    (axes,) = drawn[0].axes
    assert axes.get_ylabel() == f"bandwidth [{unit}]"
    assert axes.lines[0].get_ydata()[0] == pytest.approx(value)
