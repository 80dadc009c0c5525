"""The dashboard: the counts of each queue, and its rates since the last report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .queues import Protocol
from .statistics import KernelReport, QueueReport, Report

# Headings, and whether the cells are right-aligned.
COLUMNS = (
    ("queue", False), ("packets", True), ("per second", True), ("Gbit/s", True), ("dropped", True), ("busy", True),
    ("of which", False),
)
_TOTALS = {"total", "total_bytes"}


def rows(report: Report, before: Report | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each queue, and for each kernel that serves HTTP.

    Without a previous report, rates are means since the beginning. `busy` is the share of the time in which the kernel
    had packets to work on.
    """
    passed = report.seconds - (before.seconds if before else 0)
    past = {(queue.protocol, queue.number): queue for queue in before.queues} if before else {}
    for queue in report.queues:
        yield _row(queue, past.get((queue.protocol, queue.number)), passed)
    kernels = {kernel.name: kernel for kernel in before.kernels} if before else {}
    for kernel in report.kernels:
        yield _kernel_row(kernel, kernels.get(kernel.name), passed)
    if report.http is not None:
        yield _http_row(report.http, before.http if before else None, passed)
    for name, why in report.failures.items():
        yield f"{name} has failed", *[""] * (len(COLUMNS) - 2), why


def _row(queue: QueueReport, before: QueueReport | None, passed: float) -> tuple[str, ...]:
    was = before.counts if before else dict.fromkeys(queue.counts, 0)
    bits = ""
    if queue.protocol is Protocol.UDP:  # only this kernel counts bytes
        bits = f"{_rate(queue.counts['total_bytes'], was['total_bytes'], passed) * 8 / 1e9:.3f}"
    kinds = (name for name in queue.counts if name not in _TOTALS and not name.endswith("_bytes"))
    return (
        f"{queue.protocol.name} {queue.number}", str(queue.counts["total"]),
        f"{_rate(queue.counts['total'], was['total'], passed):.0f}", bits, _dropped(queue.dropped),
        _busy(queue, before, passed),
        ", ".join(f"{name} {queue.counts[name]}" for name in kinds if queue.counts[name]),
    )


def _kernel_row(kernel: KernelReport, before: KernelReport | None, passed: float) -> tuple[str, ...]:
    rate = _rate(kernel.packets, before.packets if before else 0, passed)
    busy = _busy(kernel, before, passed)
    return kernel.name, str(kernel.packets), f"{rate:.0f}", "", _dropped(kernel.dropped), busy, ""


def _http_row(http: Mapping[str, int], before: Mapping[str, int] | None, passed: float) -> tuple[str, ...]:
    """Return the row of the HTTP server's answers. Its packets are requests."""
    rate = _rate(http["requests"], before["requests"] if before else 0, passed)
    others = (f"{name} {count}" for name, count in http.items() if count and name not in ("requests", "dropped"))
    return "HTTP requests", str(http["requests"]), f"{rate:.0f}", "", "", "", ", ".join(others)


def _rate(value: float, old: float, passed: float) -> float:
    return (value - old) / passed if passed > 0 else 0.0


def _busy(now: QueueReport | KernelReport, before: QueueReport | KernelReport | None, passed: float) -> str:
    return f"{min(1.0, _rate(now.busy_seconds, before.busy_seconds if before else 0.0, passed)):.0%}"


def _dropped(count: int | None) -> str:
    return "" if count is None else str(count)
