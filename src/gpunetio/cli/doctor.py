"""`gpunetio doctor`: check whether this machine is ready, and say what to do if it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .failures import UsageFailure, guarded, writing
from .machine import FILE, machine_options, opened, options_at_fault, terminal_width

if TYPE_CHECKING:
    from ..doctor import Report, Status, Use

_FOR = ("verbs", "ethernet", "dma", "software")


@click.command()
@click.option("--for", "use", type=click.Choice(_FOR), help="Check this use only, and let it decide the exit status. "
              "[default: verbs where there is an RDMA card, else software]")
@click.option("--bar1-mib", metavar="N", default=0, type=click.IntRange(0), help="MiB of GPU memory to map to the NIC.")
@click.option("--probe", "probing", is_flag=True, help="Also try it: register memory, and send messages in a loop.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("-v", "--verbose", is_flag=True, help="Also explain the checks that passed.")
@click.option("--record", metavar="FILE", type=FILE, help="Pack everything that was read into FILE.")
@click.option("--redact", is_flag=True, help="Replace addresses, names and serial numbers in the file of --record.")
@machine_options
@guarded
def doctor(
    use: str | None, bar1_mib: int, probing: bool, as_json: bool, verbose: bool, record: Path | None, redact: bool,
    gpu: str, nic: str, replay: Path | None, root: str | None,
) -> None:
    """Check whether this machine is ready for GPU networking, and say what to type if it is not.

    Nothing is changed. Exit status: 0 ready, 1 not ready, 2 cannot tell. docs/setup.md explains all checks.
    """
    from .. import doctor as library

    if redact and not record:
        raise UsageFailure("--redact changes the file of --record: give --record FILE, too")
    machine = opened(replay, root, library.Wanted(gpu, nic, bar1_mib))
    with options_at_fault():
        report = library.examine(machine.host, machine.wanted, probing)
        if record:
            with writing("--record", record, UsageFailure):  # status 1 means that the machine is not ready
                library.record(machine.host, machine.wanted, record, redact)
    if as_json:
        click.echo(json.dumps(library.as_json(report), indent=1))
    else:
        for line in library.lines_of(report, verbose, library.Use(use) if use else None, _painted, terminal_width()):
            click.echo(line)
    raise click.exceptions.Exit(int(report.ready(_deciding(report, use)).readiness))


def _deciding(report: Report, use: str | None) -> Use:
    from ..doctor import Use

    if use:
        return Use(use)
    return Use.VERBS if report.cards else Use.SOFTWARE


def _painted(text: str, status: Status) -> str:
    colours = {"OK": "green", "WARN": "yellow", "FAIL": "red", "SKIP": "bright_black"}
    return click.style(text, fg=colours[status])
