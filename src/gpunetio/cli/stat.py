"""`gpunetio stat`: the counters of all running software NICs, and their rates."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from .failures import guarded
from .prometheus import exposition
from .running import console, find, nobody, selection, table
from .seconds import Seconds

if TYPE_CHECKING:
    from rich.table import Table

    from ..nic.observe.running import Observed

_COLUMNS = (("device", False), ("pid", True), ("counter", False), ("value", True), ("per second", True))


@click.command()
@selection
@click.option(
    "--interval", type=Seconds(0.05), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two samples.",
)
@click.option(
    "--count", type=click.IntRange(1), help="Stop after this number of samples.  [default: never; 1 without a terminal]"
)
@click.option("--once", is_flag=True, help="The same as --count 1.")
@click.option("-a", "--all", "all_counters", is_flag=True, help="Also show counters that are 0.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per sample, on one line.")
@click.option("--prometheus", is_flag=True, help="Print all counters once in Prometheus' text format.")
@guarded
def stat(
    device: str | None, pid: int | None, interval: float, count: int | None, once: bool, all_counters: bool,
    as_json: bool, prometheus: bool,
) -> None:
    """Show the counters of running software NICs: all NICs of this user in this network namespace."""
    from ..nic.observe.running import running

    if prometheus and as_json:
        raise click.UsageError("--json and --prometheus exclude each other")
    if once and count:
        raise click.UsageError("--once and --count exclude each other")
    if prometheus:
        click.echo(exposition(running(device, pid)), nl=False)
        return
    live = sys.stdout.isatty() and not as_json
    looks = 1 if once or (count is None and not live) else count
    watch = _Watch(device, pid, all_counters)
    if as_json:
        _repeat(lambda: click.echo(json.dumps(watch.look().documents())), looks, interval)
    elif not live or looks == 1:
        find(device, pid)
        out = console()
        _repeat(lambda: out.print(watch.look().table()), looks, interval)
    else:
        from rich.live import Live

        with Live(watch.look().table(), console=console(), auto_refresh=False) as screen:
            if looks is not None:
                looks -= 1
            if looks != 0:
                time.sleep(interval)
                _repeat(lambda: screen.update(watch.look().table(), refresh=True), looks, interval)


def _repeat(action: Callable[[], object], times: int | None, interval: float) -> None:
    """Repeat `action` a number of times, or forever."""
    done = 0
    while True:
        action()
        done += 1
        if done == times:
            return
        time.sleep(interval)


@dataclass
class _Sample:
    """One NIC at one moment. `rates` are per second since the last sample, None in the first."""

    device: str
    pid: int
    addresses: list[str]
    at: float
    counters: dict[str, int]
    rates: dict[str, float] | None
    queues: dict[tuple[str, int], dict[str, int]]  # kind and number → counts
    queue_rates: dict[tuple[str, int], dict[str, float] | None]

    @classmethod
    def of(cls, nic: Observed, before: _Sample | None) -> _Sample:
        at, counters, queues = time.monotonic(), nic.counters, nic.queues
        passed = 0.0 if before is None else at - before.at
        rates = _rates(counters, before.counters, passed) if before else None
        queue_rates = {
            queue: _rates(counts, before.queues[queue], passed) if before and queue in before.queues else None
            for queue, counts in queues.items()
        }
        return cls(nic.name, nic.pid, nic.addresses, at, counters, rates, queues, queue_rates)

    def rows(self, all_counters: bool) -> Iterator[tuple[str, str, str]]:
        """Yield name, value and rate of each counter that is not 0, or of all, and of each queue's."""
        for prefix, counts, rates in (
            ("", self.counters, self.rates),
            *((f"{kind} {number:#x} ", counts, self.queue_rates[kind, number])
              for (kind, number), counts in self.queues.items()),
        ):
            for name, value in counts.items():
                if value or all_counters:
                    yield prefix + name, str(value), "" if rates is None else f"{rates[name]:.0f}"


def _rates(counters: dict[str, int], past: dict[str, int], passed: float) -> dict[str, float] | None:
    """Return how much each counter has grown per second."""
    return {name: (value - past.get(name, 0)) / passed for name, value in counters.items()} if passed > 0 else None


class _Watch:
    """Samples the selected NICs repeatedly."""

    def __init__(self, device: str | None, pid: int | None, all_counters: bool):
        self._device, self._pid, self._all = device, pid, all_counters
        self._samples: dict[tuple[str, int], _Sample] = {}

    def look(self) -> _Watch:
        """Read all counters."""
        from ..nic.observe.running import running

        before, self._samples = self._samples, {}
        for nic in running(self._device, self._pid):
            with nic:
                key = nic.name, nic.pid
                self._samples[key] = _Sample.of(nic, before.get(key))
        return self

    def documents(self) -> list[dict]:
        """Return the documents that --json prints."""
        return [
            {
                "device": sample.device, "pid": sample.pid, "addresses": sample.addresses, "counters": sample.counters,
                "rates": sample.rates,
                "queues": [
                    {"kind": kind, "number": number, "counters": counts, "rates": sample.queue_rates[kind, number]}
                    for (kind, number), counts in sample.queues.items()
                ],
            }
            for sample in self._samples.values()
        ]

    def table(self) -> Table:
        """Return the sample as a table."""
        rows = []
        for sample in self._samples.values():
            counted = [*sample.rows(self._all)] or [("(all are 0)", "", "")]
            names = [(sample.device, str(sample.pid)), *[("", "")] * (len(counted) - 1)]
            rows += [(*name, *cells) for name, cells in zip(names, counted)]
        return table(_COLUMNS, rows, None if rows else nobody(self._device, self._pid))
