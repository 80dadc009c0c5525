"""`gpunetio packet_processing`: DOCA's application that processes packets on the GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .eth_samples import ends
from .failures import Failure, guarded
from .ports import nic_port
from .prometheus import exporter
from .running import console, table
from .samples import common, messages
from .seconds import Seconds

if TYPE_CHECKING:
    from rich.live import Live

    from ..packet_processing.statistics import Report

_LIVE_SECONDS = 1.0  # between two updates of the dashboard on a terminal


@click.command("packet_processing", context_settings={"max_content_width": 120})
@ends
@click.option(
    "-q", "--queue", "queues", type=click.IntRange(1, 4), required=True,
    help="Receive queues of UDP, and of TCP.",
)
@click.option("--dashboard", is_flag=True, help="Show a table of all queues and their rates instead of the statistics.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end, and nothing else.")
@click.option(
    "--prometheus", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write all counts to FILE every 5 s, in Prometheus' text format.",
)
@click.option(
    "--seconds", type=Seconds(0, min_open=True), metavar="SECONDS", help="Stop after this time.  [default: at Ctrl+C]"
)
@click.option(
    "--replay", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Take packets from a capture file, as fast as the kernels receive them, and stop at its end.",
)
@click.option("-s", "--httpserver", "http", is_flag=True, help="Serve HTTP from the GPU.")
@click.option(
    "--pages", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
    help="With -s, serve the files of a folder.  [default: three pages]",
)
@common
@guarded
def packet_processing(**values: Any) -> None:
    """Receive UDP, TCP and ICMP in kernels, count the packets, and answer pings, until Ctrl+C.

    Read the program in gpunetio/packet_processing.
    """
    from ..packet_processing.app import run
    from ..packet_processing.options import Options
    from ..packet_processing.statistics import PRINT_SECONDS

    if values["as_json"] and values["dashboard"]:
        raise click.UsageError("--json and --dashboard exclude each other")
    if values["pages"] is not None and not values["http"]:
        raise click.UsageError("--pages needs -s, which serves them")
    options = Options(
        gpu=values["gpu"], device=values["device"], queues=values["queues"], nic_port=nic_port(values),
        seconds=values["seconds"], replay=values["replay"], http=values["http"], pages=values["pages"],
    )
    with ExitStack() as stack:
        watchers = []
        if values["dashboard"]:
            watchers.append(_dashboard(stack))
        elif not values["as_json"]:
            watchers.append((PRINT_SECONDS, _print))
        if values["prometheus"]:
            watchers.append((PRINT_SECONDS, exporter(values["prometheus"])))
        if values["as_json"]:
            values["log_level"] = "10"
        stack.enter_context(messages(values, "packet_processing"))
        report = run(options, watchers)
    if values["as_json"]:
        click.echo(json.dumps(report.document()))
    if report.failures:
        raise Failure("; ".join(f"{name} has failed: {why}" for name, why in report.failures.items()))


def _print(report: Report) -> None:
    from ..packet_processing.statistics import lines

    for line in lines(report):
        click.echo(line)


def _dashboard(stack: ExitStack) -> tuple[float, Callable[[Report], None]]:
    """Return the interval and a function that shows a report as a table.

    On a terminal, the table is updated in place every second; otherwise, tables are printed one after another.
    """
    from ..packet_processing.dashboard import COLUMNS, rows
    from ..packet_processing.statistics import PRINT_SECONDS

    before: list[Report] = []
    screen: list[Live] = []
    out = console()

    def show(report: Report) -> None:
        title = f"{report.seconds:.0f} s"
        picture = table(COLUMNS, list(rows(report, before[0] if before else None)), title)
        before[:] = [report]
        if not out.is_terminal:
            out.print(picture)
            return
        if not screen:
            from rich.live import Live

            screen.append(stack.enter_context(Live(console=out, auto_refresh=False)))
        screen[0].update(picture, refresh=True)

    return (_LIVE_SECONDS if sys.stdout.isatty() else PRINT_SECONDS), show
