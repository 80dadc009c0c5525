"""`gpunetio conformance`: check a NIC against the contract of DOCA Verbs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from .failures import guarded

if TYPE_CHECKING:
    from ..testing import Report


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("-d", "--device", "--ib-dev", metavar="NIC", default="soft0", show_default=True, help="The NIC to check.")
@click.option("--peer", metavar="NIC", help="The NIC at the other end.  [default: the same]")
@click.option("-l", "--list", "only_list", is_flag=True, help="Only list the checks, with what each one covers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@guarded
def conformance(names: tuple[str, ...], device: str, peer: str | None, only_list: bool, as_json: bool) -> None:
    """Check that a NIC does what DOCA Verbs promises: objects, states, operations, errors, events.

    NAME is a check or an area; without it, all checks run. The exit status is 1 if a check fails. A feature that the
    NIC reports as unsupported is not a failure.
    """
    from ..testing import checks, run
    from ..verbs import open as open_device

    chosen = checks(names or None)
    width = max(len(one.name) for one in chosen)
    if only_list and as_json:
        listed = [{"name": one.name, "area": one.area, "summary": one.summary} for one in chosen]
        click.echo(json.dumps(listed, indent=2))
        return
    if only_list:
        for one in chosen:
            click.echo(f"{one.area:<12}{one.name:<{width}}  {one.summary}")
        return
    open_device(device).close()
    with _quietly():
        report = run(
            lambda: open_device(device), lambda: open_device(peer or device), names or None,
            tell=lambda result: None if as_json else click.echo(result.line(width)),
        )
    click.echo(json.dumps(_document(report, device, peer or device), indent=2) if as_json else report.summary)
    if not report.passed:
        raise click.exceptions.Exit(1)


def _document(report: Report, device: str, peer: str) -> dict[str, object]:
    results = [
        {
            "name": result.check.name, "area": result.check.area, "outcome": result.outcome.name,
            "message": result.message, "seconds": result.seconds,
        }
        for result in report.results
    ]
    return {"device": device, "peer": peer, "passed": report.passed, "results": results}


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the NIC's explanations of errors that checks provoke."""
    from .. import log

    before = log.logger.level
    log.logger.setLevel(log.DOCA_LEVELS[20])
    try:
        yield
    finally:
        log.logger.setLevel(before)
