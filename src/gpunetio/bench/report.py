"""Print results: perftest's columns, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from .. import __version__
from ..enums import ExecScope
from .options import Options
from .results import BwResult, Result
from .run import Run

_WIDEST = 101  # width of a bandwidth table in perftest's form, in columns
BW_UNITS = {False: ("MiB/sec", 1 << 20), True: ("Gb/sec", 1e9 / 8)}  # and their bytes, by `gbits`


class _Layout(NamedTuple):
    """Headings with minimum column widths, and the number of spaces between columns."""

    columns: tuple[tuple[str, int], ...]
    gap: int

    @property
    def width(self) -> int:
        """Return the width of a line in terminal columns."""
        return 1 + sum(width for _, width in self.columns) + self.gap * (len(self.columns) - 1)

    def line(self, cells: Sequence[str]) -> str:
        """Return a line of the table."""
        padded = (cell.ljust(width) for cell, (_, width) in zip(cells, self.columns))
        return " " + (" " * self.gap).join(padded).rstrip()


def _perftest(*headings: str) -> _Layout:
    return _Layout(tuple((heading, max(len(heading), 10)) for heading in headings), 4)


# perftest's layout, and one for a terminal of 80 columns.
_LAT_LAYOUTS = (
    _perftest(
        "#bytes", "#iterations", "t_min[usec]", "t_max[usec]", "t_typical[usec]", "t_avg[usec]", "t_stdev[usec]",
        "99% percentile[usec]", "99.9% percentile[usec]", "Kernel[usec]",
    ),
    _Layout(
        (
            ("#bytes", 7), ("#iters", 6), ("min[us]", 7), ("max[us]", 7), ("typical", 7), ("average", 7),
            ("stdev", 7), ("99%", 7), ("99.9%", 7), ("Kernel", 8),
        ),
        1,
    ),
)


def _bw_layouts(unit: str) -> tuple[_Layout, _Layout]:
    return (
        _perftest(
            "#bytes", "#iterations", f"BW peak[{unit}]", f"BW average[{unit}]", "MsgRate[Mpps]", "Kernel[ms]",
        ),
        _Layout(
            (
                ("#bytes", 9), ("#iters", 10), (f"peak[{unit}]", 13), (f"avg[{unit}]", 12), ("MsgRate[Mpps]", 13),
                ("Kernel[ms]", 12),
            ),
            2,
        ),
    )


class Table:
    """perftest's table of a bandwidth or latency test, plus the time in kernels: `heading`, and a `row` per result.

    `gbits`: bandwidth in Gb/sec, not MiB/sec. `width`: columns of the terminal that shows the table; headings become
    shorter where perftest's do not fit. None for a file or pipe.
    """

    def __init__(self, options: Options, gbits: bool = False, width: int | None = None):
        unit, self._unit = BW_UNITS[gbits]
        full, short = _LAT_LAYOUTS if options.benchmark.latency else _bw_layouts(unit)
        self._layout = full if width is None or full.width <= width else short

    @property
    def heading(self) -> str:
        """Return the line above the rows."""
        return self._layout.line([heading for heading, _ in self._layout.columns])

    def row(self, result: Result) -> str:
        """Return the line of one size."""
        if isinstance(result, BwResult):
            bandwidths = [f"{value / self._unit:.2f}" for value in (result.peak, result.average)]
            numbers = [*bandwidths, f"{result.rate / 1e6:.6f}", f"{result.kernel * 1e3:.6f}"]
        else:
            times = (result.least, result.most, result.median, result.average, result.stdev, result.p99, result.p999)
            widths = [width for _, width in self._layout.columns[2:]]
            numbers = [_fitting(time, width) for time, width in zip((*times, result.kernel * 1e6), widths)]
        return self._layout.line((str(result.size), str(result.iterations), *numbers))


def _fitting(value: float, width: int) -> str:
    """Return a number with two decimals, or without decimals if they do not fit."""
    text = f"{value:.2f}"
    return text if len(text) <= width else f"{value:.0f}"


def preamble(run: Run, width: int | None = None) -> str:
    """Describe the measurement and its ends in two columns or, on a narrow terminal, in one."""
    options = run.options
    queue = run.queue
    together = "" if options.scope == ExecScope.THREAD else f", {options.scope.name.lower()} scope"
    left = {
        "Device": f"{run.ctx.name}, GID index {options.gid_index}",
        "Kernels": f"{run.gpu.name} ({run.gpu.target}), {run.threads} thread(s){together}",
        "Doorbell": f"{queue.nic_handler.name}, {queue.send_dbr_mode.name}",
        "Rings": queue.ring_memory.text,
    }
    right = {
        "Queue pairs": str(options.qps),
        "Send queue": f"{queue.qp.sq_entries} slots",
        "MTU": f"{run.mtu} bytes",
        "Data": f"{options.payload_memory.name} memory",
    }
    wide = min(width or _WIDEST, _WIDEST)
    lines = [f" {a:<8}: {left[a]:<36} {b:<12}: {right[b]}" for a, b in zip(left, right)]
    if max(map(len, lines)) > wide:
        lines = [f" {name:<11}: {value}" for name, value in (left | right).items()]
    rule = "-" * wide
    return "\n".join([rule, f"{options.benchmark.title}, {run.role}".center(wide).rstrip(), *lines, rule])


def flag_lines(results: Sequence[Result]) -> list[str]:
    """Return the counts of the server's flags, worded as in the original."""
    return [
        f"Flag value for message size {result.size} is {result.check.flag}"
        for result in results
        if result.check.flag is not None
    ]


def payload_lines(name: str, file_bytes: int, results: Sequence[Result]) -> list[str]:
    """Describe what has arrived of a payload file. Sizes with the same bytes share a line."""
    groups: dict[tuple[int, str], list[int]] = {}
    for result in results:
        check = result.check
        if check.problem is None and check.payload_bytes is not None:
            groups.setdefault((check.payload_bytes, check.sha256 or ""), []).append(result.size)
    return [
        f"{name}: {_share(nbytes, file_bytes)} arrived with message size {_span(sizes)}, SHA-256 {digest}"
        for (nbytes, digest), sizes in groups.items()
    ]


def _share(nbytes: int, file_bytes: int) -> str:
    return f"all {file_bytes} bytes" if nbytes == file_bytes else f"the first {nbytes} of {file_bytes} bytes"


def _span(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) < 4 else f"{sizes[0]} … {sizes[-1]}"


def _settings(run: Run) -> dict[str, object]:
    """Return the settings of the run: those that were chosen, and the values of defaults."""
    options, queue, port = run.options, run.queue, run.options.nic_port
    return {
        "sizes": list(options.sizes),
        "iterations": options.iterations,
        "duration_s": options.duration,
        "scope": options.scope.name,
        "nic_handler": queue.nic_handler.name,
        "send_dbr_mode": queue.send_dbr_mode.name,
        "ring_memory": queue.ring_memory.name,
        "payload_memory": options.payload_memory.name,
        "send_queue_slots": queue.qp.sq_entries,
        "inline": options.inline,
        "gid_index": options.gid_index,
        "link_layer": run.ctx.query_device().link_layer.name,
        "mtu": run.mtu,
        "port": port and {
            **asdict(port),
            "link_layer": port.link_layer.name,
            "capture": port.capture and str(port.capture),
        },
    }


def as_json(run: Run, results: Sequence[Result]) -> str:
    """Return the whole run as JSON. Rates are in 10⁹ bits and 10⁶ messages per second."""
    options = run.options
    document: dict[str, object] = {
        "version": __version__,
        "test": options.benchmark.name,
        "role": run.role,
        "nic": run.ctx.name,
        "target": run.gpu.target,
        "gpu": run.gpu.name,
        "qps": options.qps,
        "threads": run.threads,
        "settings": _settings(run),
        "results": [result.as_json() for result in results],
    }
    if run.payload_bytes is not None:
        document["payload"] = {"file": str(options.payload) if options.payload else None, "bytes": run.payload_bytes}
    return json.dumps(document, indent=2)
