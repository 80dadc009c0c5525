"""`gpunetio show`: the contents of running software NICs' tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..nic.observe.kinds import KINDS
from .click_types import Number
from .failures import guarded
from .running import console, find, print_table, selection, wide_option

if TYPE_CHECKING:
    import numpy as np

    from ..nic.observe.running import Observed


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("wanted", type=Number(), metavar="[N]", required=False)
@selection
@wide_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with all fields.")
@guarded
def show(
    kind: str, wanted: int | None, device: str | None, pid: int | None, wide: bool, as_json: bool
) -> None:
    """List the objects of one kind in all running software NICs, or all fields of object N (decimal, or 0x…)."""
    from ..nic.observe.words import details, document, number_of

    nics = find(device, pid)
    found = [
        (nic, row)
        for nic in nics
        for row in nic.tables[KINDS[kind]]
        if wanted in (None, number_of(nic, kind, row))
    ]
    if wanted is not None and not found:
        _unknown(kind, wanted, nics)
    if as_json:
        click.echo(json.dumps([document(kind, nic, row) for nic, row in found], indent=2))
    elif wanted is None:
        _list(kind, nics, found, wide)
    else:
        click.echo("\n".join(details(kind, nic, row) for nic, row in found), nl=False)


def _unknown(kind: str, wanted: int, nics: list[Observed]) -> None:
    from ..errors import NotFoundError
    from ..nic.observe.words import number_of

    as_text: Callable[[int], str] = str if kind == "gid" else hex
    known = "; ".join(
        f"{nic.name} in process {nic.pid} has "
        + (", ".join(as_text(number_of(nic, kind, row)) for row in nic.tables[KINDS[kind]][:16]) or "none")
        for nic in nics
    )
    raise NotFoundError(f"there is no {kind} {as_text(wanted)}: {known}")


def _list(kind: str, nics: list[Observed], found: list[tuple[Observed, np.void]], wide: bool) -> None:
    from ..nic.observe.words import DEFAULT_COLUMNS, cells, columns, is_right_aligned

    fields = columns(kind, nics[0])[: None if wide else DEFAULT_COLUMNS]
    rows = [(nic.name, str(nic.pid), *cells(kind, nic, row, fields)) for nic, row in found]
    headings = [("device", False), ("pid", True)] + [(heading, is_right_aligned(heading)) for heading, _ in fields]
    print_table(console(), headings, rows)
