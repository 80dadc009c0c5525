"""The benchmarks as commands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import click

from .failures import complain, guarded, writing
from .options import BenchmarkCommand, benchmark_options, make_options

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress

    from ..bench.options import Options
    from ..bench.results import Result
    from ..bench.run import Run

_HELP = {
    "put_bw": "Bandwidth of puts.",
    "write_bw": "Bandwidth of RDMA writes.",
    "get_bw": "Bandwidth of gets.",
    "put_signal_bw": "Bandwidth of puts with signals.",
    "put_counter_bw": "Bandwidth of puts that the NIC counts.",
    "twosided_bw": "Bandwidth of sends and receives.",
    "write_lat": "Latency of RDMA writes.",
    "put_signal_lat": "Latency of puts with signals.",
    "put_counter_lat": "Latency of puts that the NIC counts.",
}
_MORE = {
    "put_bw": "The threads of two blocks share the queues. Each posts its own messages (doca_gpu_dev_verbs_put).",
    "write_bw": "The threads of a block fill WQEs at computed indices. The last thread submits them together.",
    "get_bw": "The threads of two blocks share the queues. Each posts its own reads (doca_gpu_dev_verbs_get).",
    "put_signal_bw": "After each put, an atomic adds 1 to the thread's flag at the server. The old value comes "
    "back and tells the thread that the data have arrived (doca_gpu_dev_verbs_put_signal).",
    "put_counter_bw": "The queue's companion waits for each put's completion, then adds 1 to the thread's flag at the "
    "server (doca_gpu_dev_verbs_put_counter).",
    "twosided_bw": "The server posts receives and tells the client how many. The client sends "
    "(doca_gpu_dev_verbs_send, doca_gpu_dev_verbs_recv).",
    "write_lat": "Half a round trip between two kernel threads, each polling the last byte of what it receives.",
    "put_signal_lat": "Half a round trip between two kernel threads, each polling the flag that signals add to.",
    "put_counter_lat": "Half a round trip between two kernel threads, each polling the flag that the peer's "
    "companion adds to when the peer's put is complete.",
}


def benchmark_commands() -> list[click.Command]:
    """Return a command for each benchmark."""
    return [_command(name) for name in _HELP]


def _command(name: str) -> click.Command:
    @click.command(
        name, cls=BenchmarkCommand, short_help=_HELP[name], help=f"{_HELP[name]} {_MORE[name]}",
        context_settings={"max_content_width": 120},
    )
    @benchmark_options(latency=name.endswith("_lat"), two_sided=name == "twosided_bw")
    @guarded
    def command(**values: Any) -> None:
        from ..bench import plot, trace
        from ..bench.options import BENCHMARKS

        options = make_options(BENCHMARKS[name], values)
        if values["plot"]:
            plot.check(values["plot"])
        if values["trace_plot"]:
            plot.check(values["trace_plot"], "--trace-plot")
        if values["trace"]:
            trace.check(values["trace"])
        files = _Files(values["plot"], values["trace"], values["trace_plot"])
        output = _Output(values["as_json"], values.get("gbits") or False, files)
        if values["loopback"] or options.server:
            valid = _measure(options, values["loopback"], output)
        else:
            valid = _serve(options, output)
        if not valid:
            raise click.exceptions.Exit(1)

    return command


def _measure(options: Options, loopback: bool, output: _Output) -> bool:
    """Run both ends or the client. Return whether all data arrived correctly."""
    from ..bench.loopback import Loopback
    from ..bench.measure import measure
    from ..bench.remote import Client

    with (Loopback if loopback else Client)(options) as run:
        output.begin(run)
        with _Progress(len(run.options.sizes), shown=not output.as_json) as progress:
            for index, size in enumerate(run.options.sizes):
                result = measure(run, index, size, lambda share, done=index: progress.update(done + share))
                run.tell(result)
                with progress.hidden():
                    output.add(result)
        run.finish()
        return output.end(run)


def _serve(options: Options, output: _Output) -> bool:
    """Serve one client. Return whether all data arrived correctly at both ends."""
    from ..bench.remote import Server

    with Server(options, output.waiting) as run:
        output.begin(run)
        for result in run.results():
            output.add(result)
        return output.end(run)


class _Files(NamedTuple):
    """Files for pictures and traces."""

    plot: Path | None
    trace: Path | None
    trace_plot: Path | None

    def write(self, run: Run, results: list[Result], gbits: bool) -> None:
        """Write the files that were asked for."""
        from ..bench import plot, trace_plot

        title = f"{run.options.benchmark.title}, {run.role}"
        if self.plot:
            with writing("--plot", self.plot):
                plot.draw(self.plot, title, results, gbits)
        if run.trace and self.trace:
            with writing("--trace", self.trace):
                run.trace.write(self.trace, title)
        if run.trace and self.trace_plot:
            with writing("--trace-plot", self.trace_plot):
                trace_plot.draw(self.trace_plot, title, run.trace)


class _Output:
    """Prints the output of a run."""

    def __init__(self, as_json: bool, gbits: bool, files: _Files):
        self.as_json, self._gbits, self._files = as_json, gbits, files
        self._results: list[Result] = []

    def waiting(self, address: str, port: int) -> None:
        """Say that a client may connect."""
        click.echo(f"Waiting for a client on {address} port {port} …", err=self.as_json)

    def begin(self, run: Run) -> None:
        """Print the header when the run is ready."""
        from ..bench import report

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._table = report.Table(run.options, self._gbits, width)
        if not self.as_json:
            click.echo(report.preamble(run, width))
            click.echo(self._table.heading)

    def add(self, result: Result) -> None:
        """Add the result of a size."""
        self._results.append(result)
        if not self.as_json:
            click.echo(self._table.row(result))
        if result.check.problem is not None:
            complain(f"validation failed: {result.check.problem}")

    def end(self, run: Run) -> bool:
        """Print the end of the report. Return whether all data arrived correctly."""
        from ..bench import report

        results = self._results
        valid = all(result.check.problem is None for result in results)
        if self.as_json:
            click.echo(report.as_json(run, results))
        else:
            self._conclude(run, results, valid)
        self._files.write(run, results, self._gbits)  # last: a full disk must not cost the results
        return valid

    def _conclude(self, run: Run, results: list[Result], valid: bool) -> None:
        """Print the lines below the table."""
        from ..bench import report

        for line in report.flag_lines(results):
            click.echo(line)
        if (payload := run.payload_bytes) is not None:
            name = run.options.payload.name if run.options.payload else "the payload"
            for line in report.payload_lines(name, payload, results):
                click.echo(line)
        if valid:
            click.echo(f"Validation successful! {run.outcome}")


class _Progress:
    """A progress bar of the sizes measured, for a `with` statement. It is on stderr, if that is a terminal."""

    def __init__(self, total: int, shown: bool):
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            text = TextColumn("{task.completed:.0f} of {task.total:.0f} sizes")
            self._bar = Progress(
                BarColumn(), text, TimeElapsedColumn(), console=Console(stderr=True), transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: float) -> None:
        """Set the number of finished sizes."""
        if self._bar:
            self._bar.update(self._task, completed=done)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while something else is printed.

        Rich can print above a bar, but click writes to the terminal directly.
        """
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
