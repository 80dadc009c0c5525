"""The common parts of `stat`, `show` and `flow`: selecting NICs, and printing tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..nic.observe.running import Observed

PIPE_WIDTH = 1000  # wide enough that nothing is cut off without a terminal


def selection(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options that select NICs: arguments `device` and `pid` of the command."""
    device = click.option("-d", "--device", "--ib-dev", "device", metavar="NIC", help="Only NICs of this name.")
    pid = click.option("--pid", type=click.IntRange(1), help="Only NICs of this process.")
    return device(pid(command))


def nobody(device: str | None, pid: int | None) -> str:
    """Return why there is nothing to show."""
    from ..nic.observe.running import running

    here = ", ".join(f"{nic.name} in process {nic.pid}" for nic in running())
    what = f"no software NIC{f' {device}' if device else ''} runs{f' in process {pid}' if pid else ''}"
    return f"{what}; there are: {here}" if here else f"{what}: a process of this user must open one first"


def find(device: str | None, pid: int | None) -> list[Observed]:
    """Return the selected NICs; NotFoundError if there are none."""
    from ..errors import NotFoundError
    from ..nic.observe.running import running

    if nics := running(device, pid):
        return nics
    raise NotFoundError(nobody(device, pid))


_GAP = 2  # characters between two columns
_FOLDED = {"match": 18, "to": 14, "rights": 16}  # columns with long texts, and their minimum widths

wide_option = click.option("--wide", is_flag=True, help="Show all columns. Lines may be longer than the terminal.")


def console() -> Console:
    """Return a console that prints to the current stdout."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def table(columns: Iterable[tuple[str, bool]], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Return a table. A column is its heading, and whether its cells are right-aligned."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, title=title and Text(title), title_justify="left", title_style="")
    for heading, right in columns:
        made.add_column(
            heading, justify="right" if right else "left", no_wrap=heading not in _FOLDED, overflow="fold",
            header_style="",
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def print_table(out: Console, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Long texts are folded to fit the console. Nothing is ever cut off: lines become longer instead."""
    widths = [max(map(len, cells)) for cells in zip([heading for heading, _ in columns], *rows)]
    least = sum(
        min(width, _FOLDED.get(heading, width)) + _GAP for width, (heading, _) in zip(widths, columns, strict=True)
    )
    width = out.width
    out.width = max(width, least)  # the terminal wraps lines that are too long for it
    out.print(table(columns, rows))
    out.width = width
