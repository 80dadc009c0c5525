"""The benchmarks as commands: put_bw, write_bw, get_bw, write_lat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from .compiling import compiling
from .failures import complain, guarded
from .options import BenchmarkCommand, benchmark_options, make_options

if TYPE_CHECKING:
    from ..bench.options import Options

_HELP = {
    "put_bw": "Bandwidth of puts.",
    "write_bw": "Bandwidth of RDMA writes.",
    "get_bw": "Bandwidth of gets.",
    "write_lat": "Latency of RDMA writes.",
}
_MORE = {
    "put_bw": "The threads of two blocks share the queues, and each posts its own messages (doca_gpu_dev_verbs_put).",
    "write_bw": "The threads of a block fill WQEs at computed indices, and the last one submits them together.",
    "get_bw": "The threads of two blocks share the queues, and each posts its own reads (doca_gpu_dev_verbs_get).",
    "write_lat": "Half a round trip between two kernel threads, each polling the last byte of what it receives.",
}


def benchmark_commands() -> list[click.Command]:
    """A command for each benchmark."""
    return [_command(name) for name in _HELP]


def _command(name: str) -> click.Command:
    @click.command(
        name, cls=BenchmarkCommand, short_help=_HELP[name], help=f"{_HELP[name]} {_MORE[name]}",
        context_settings={"max_content_width": 120},
    )  # fmt: skip
    @benchmark_options(latency=name.endswith("_lat"))
    @guarded
    def command(**values: Any) -> None:
        from ..bench.options import BENCHMARKS

        options = make_options(BENCHMARKS[name], values)
        if not _run(options, values["as_json"], values.get("gbits", False)):
            raise click.exceptions.Exit(1)

    return command


def _run(options: Options, as_json: bool, gbits: bool) -> bool:
    """Measure and print: whether all that arrived was right."""
    with compiling("the NIC and the kernels"):
        from ..bench import report
        from ..bench.loopback import Loopback
        from ..bench.measure import measure

        table = report.Table(options, gbits)
        results = []
        with Loopback(options) as run, _progress(len(options.sizes), shown=not as_json) as progress:
            if not as_json:
                click.echo(report.preamble(run))
                click.echo(table.heading)
            for index, size in enumerate(options.sizes):
                result = measure(run, index, size, lambda share, done=index: progress(done + share))
                results.append(result)
                if not as_json:
                    click.echo(table.row(result))
                if result.check.problem is not None:
                    complain(f"validation failed: {result.check.problem}")
        if as_json:
            click.echo(report.as_json(run, results))
        elif options.payload is not None:
            for line in report.payload_lines(options.payload.name, run.payload_bytes, results):
                click.echo(line)
    valid = all(result.check.problem is None for result in results)
    if valid and not as_json:
        click.echo("Validation successful! Data received correctly.")
    return valid


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, if that is a terminal. Call what it yields with the number of sizes done."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} sizes"), TimeElapsedColumn())
    # Rows are printed above the bar when both are on the terminal; a file or pipe gets them untouched.
    on_terminal = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=on_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
