"""`gpunetio doctor`: is this machine ready, and what cures it if not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InvalidValueError
from .failures import UsageFailure, explained, guarded

if TYPE_CHECKING:
    from ..doctor import Host, Report, Status, Use

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOR = ("verbs", "ethernet", "dma", "software")


def machine_options(command):
    """Options that say which machine, and which GPU and NIC of it."""
    for option in (
        click.option("--replay", metavar="FILE", type=_FILE, help="A machine that --record has recorded."),
        click.option("--root", metavar="DIR", default="/", show_default=True,
                     help="Where the machine's file system is, as inside a container. Commands are not run then."),
        click.option("--nic", default="", help="An RDMA device, a network interface, or a PCI address."),
        click.option("--gpu", default="", help="A number as nvidia-smi has it, or a PCI address."),
    ):  # fmt: skip
        command = option(command)
    return command


def host_of(root: str, replay: Path | None) -> Host:
    """The machine that these options name."""
    from ..doctor import LiveHost, load

    return load(replay) if replay else LiveHost(root)


@click.command()
@click.option("--for", "use", type=click.Choice(_FOR), help="The use that decides the exit status. "
              "[default: verbs where there is an RDMA card, else software]")
@click.option("--bar1-mib", metavar="N", default=0, type=click.IntRange(0), help="MiB of GPU memory to map to the NIC.")
@click.option("--probe", "probing", is_flag=True, help="Also try it: registrations, and messages in a loop.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("-v", "--verbose", is_flag=True, help="Tell of what is right as much as of what is wrong.")
@click.option("--record", metavar="FILE", type=_FILE, help="Pack what was read into FILE.")
@click.option("--redact", is_flag=True, help="… with substitutes for addresses, names and serial numbers.")
@machine_options
@guarded
def doctor(
    use: str | None, bar1_mib: int, probing: bool, as_json: bool, verbose: bool, record: Path | None, redact: bool,
    gpu: str, nic: str, root: str, replay: Path | None,
) -> None:  # fmt: skip
    """Check whether this machine is ready for GPU networking, and say what to type if it is not.

    Nothing is changed. Exit status: 0 ready, 1 not ready, 2 could not be found out. docs/setup.md explains all checks.
    """
    from .. import doctor as library

    if redact and not record:
        raise UsageFailure("--redact is about the file of --record, which is missing")
    wanted = library.Wanted(gpu, nic, bar1_mib)
    try:
        host = host_of(root, replay)
        report = library.examine(host, wanted, probing)
        if record:
            library.record(host, wanted, record, redact)
    except (InvalidValueError, OSError) as error:
        raise UsageFailure(explained(error)) from error
    if as_json:
        click.echo(json.dumps(library.as_json(report), indent=1))
    else:
        for line in library.lines_of(report, verbose, _painted):
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
