"""How results read: perftest's columns, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..enums import ExecScope
from .options import Options
from .results import BwResult, Result
from .run import Run

_LINE = "-" * 101
_BW_UNITS = {False: ("MiB/sec", 1 << 20), True: ("Gb/sec", 1e9 / 8)}
_LAT_HEADINGS = (
    "t_min[usec]", "t_max[usec]", "t_typical[usec]", "t_avg[usec]", "t_stdev[usec]", "99% percentile[usec]",
    "99.9% percentile[usec]", "Kernel[usec]",
)  # fmt: skip


class Table:
    """perftest's table of a bandwidth or latency test, and the time in kernels: `heading`, and a `row` for each result.

    `gbits`: bandwidth in Gb/sec, not MiB/sec.
    """

    def __init__(self, options: Options, gbits: bool = False):
        self._latency = options.benchmark.latency
        unit, self._unit = _BW_UNITS[gbits]
        bandwidth = (f"BW peak[{unit}]", f"BW average[{unit}]", "MsgRate[Mpps]", "Kernel[ms]")
        self._headings = ("#bytes", "#iterations", *(_LAT_HEADINGS if self._latency else bandwidth))

    @property
    def heading(self) -> str:
        """The line above the rows."""
        return self._line(self._headings)

    def row(self, result: Result) -> str:
        """One size's line."""
        if isinstance(result, BwResult):
            bandwidths = [f"{value / self._unit:.2f}" for value in (result.peak, result.average)]
            numbers = [*bandwidths, f"{result.rate / 1e6:.6f}", f"{result.kernel * 1e3:.6f}"]
        else:
            times = (result.least, result.most, result.median, result.average, result.stdev, result.p99, result.p999)
            numbers = [f"{time:.2f}" for time in (*times, result.kernel * 1e6)]
        return self._line((str(result.size), str(result.iterations), *numbers))

    def _line(self, cells: Sequence[str]) -> str:
        widths = [max(len(heading), 10) for heading in self._headings]
        return " " + "    ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()


def preamble(run: Run) -> str:
    """What is measured, between which ends."""
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
    lines = [f" {a:<8}: {left[a]:<36} {b:<12}: {right[b]}" for a, b in zip(left, right)]
    return "\n".join([_LINE, f"{options.benchmark.title}, {run.role}".center(len(_LINE)).rstrip(), *lines, _LINE])


def flag_lines(results: Sequence[Result]) -> list[str]:
    """What the server's flags have counted, as the original words it."""
    return [
        f"Flag value for message size {result.size} is {result.check.flag}"
        for result in results
        if result.check.flag is not None
    ]


def payload_lines(name: str, file_bytes: int, results: Sequence[Result]) -> list[str]:
    """What became of a payload file: sizes at which the same bytes arrived share a line."""
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


def as_json(run: Run, results: Sequence[Result]) -> str:
    """The whole run for programs. Rates are in 10⁹ bits and 10⁶ messages a second."""
    options = run.options
    document: dict[str, Any] = {
        "test": options.benchmark.name,
        "role": run.role,
        "nic": run.ctx.name,
        "target": run.gpu.target,
        "gpu": run.gpu.name,
        "qps": options.qps,
        "threads": run.threads,
        "results": [result.as_json() for result in results],
    }
    if run.payload_bytes is not None:
        document["payload"] = {"file": str(options.payload) if options.payload else None, "bytes": run.payload_bytes}
    return json.dumps(document, indent=2)
