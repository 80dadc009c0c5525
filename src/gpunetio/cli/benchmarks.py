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
    from pathlib import Path

    from ..bench.options import Options
    from ..bench.results import Result
    from ..bench.run import Run

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
        from ..bench import plot
        from ..bench.options import BENCHMARKS

        options = make_options(BENCHMARKS[name], values)
        if values["plot"]:
            plot.check(values["plot"])
        output = _Output(values["as_json"], values.get("gbits") or False, values["plot"])
        with compiling("the NIC and the kernels"):
            if values["loopback"] or options.server:
                valid = _measure(options, values["loopback"], output)
            else:
                valid = _serve(options, output)
        if not valid:
            raise click.exceptions.Exit(1)

    return command


def _measure(options: Options, loopback: bool, output: _Output) -> bool:
    """Run both ends, or the client: whether all that arrived was right."""
    from ..bench.loopback import Loopback
    from ..bench.measure import measure
    from ..bench.remote import Client

    with (Loopback if loopback else Client)(options) as run:
        output.begin(run)
        with _progress(len(run.options.sizes), shown=not output.as_json) as progress:
            for index, size in enumerate(run.options.sizes):
                result = measure(run, index, size, lambda share, done=index: progress(done + share))
                run.tell(result)
                output.add(result)
        run.finish()
        return output.end(run)


def _serve(options: Options, output: _Output) -> bool:
    """Be the server of one client: whether all that arrived, here or there, was right."""
    from ..bench.remote import Server

    with Server(options, output.waiting) as run:
        output.begin(run)
        for result in run.results():
            output.add(result)
        return output.end(run)


class _Output:
    """What a run prints."""

    def __init__(self, as_json: bool, gbits: bool, plot: Path | None):
        self.as_json, self._gbits, self._plot = as_json, gbits, plot
        self._results: list[Result] = []

    def waiting(self, address: str, port: int) -> None:
        """A server can be called."""
        click.echo(f"Waiting for a client on {address} port {port} …", err=self.as_json)

    def begin(self, run: Run) -> None:
        """All is ready."""
        from ..bench import report

        self._table = report.Table(run.options, self._gbits)
        if not self.as_json:
            click.echo(report.preamble(run))
            click.echo(self._table.heading)

    def add(self, result: Result) -> None:
        """A size was measured."""
        self._results.append(result)
        if not self.as_json:
            click.echo(self._table.row(result))
        if result.check.problem is not None:
            complain(f"validation failed: {result.check.problem}")

    def end(self, run: Run) -> bool:
        """All sizes were: whether all that arrived was right."""
        from ..bench import plot, report

        results, payload = self._results, run.payload_bytes
        valid = all(result.check.problem is None for result in results)
        if self._plot:
            plot.draw(self._plot, f"{run.options.benchmark.title}, {run.role}", results)
        if self.as_json:
            click.echo(report.as_json(run, results))
            return valid
        if payload is not None:
            name = run.options.payload.name if run.options.payload else "the payload"
            for line in report.payload_lines(name, payload, results):
                click.echo(line)
        if valid:
            click.echo(f"Validation successful! {run.outcome}")
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
