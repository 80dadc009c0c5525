"""A report for people, at most 100 columns wide, and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from .finding import USE_NAMES, Finding, Readiness, Report, Status, Use

WIDTH = 100
_LEFT = 8  # columns before what is told of a finding
_LABEL = 8
_YES_OR_NO = {Readiness.READY: "yes", Readiness.NOT_READY: "no", Readiness.UNKNOWN: "unknown"}

# How a status is painted: its own text when the output is no terminal.
Paint = Callable[[str, Status], str]


def lines_of(report: Report, verbose: bool = False, paint: Paint = lambda text, _: text) -> Iterator[str]:
    """What is wrong with all that is known of it, what is right in a line each (`verbose`: all as well)."""
    ids = max((len(finding.check.id) for finding in report.findings), default=0)
    for area, findings in groupby(report.findings, lambda finding: finding.check.area):
        yield area
        for why, some in groupby(findings, lambda finding: finding.summary if finding.status is Status.SKIP else ""):
            if why and not verbose:
                yield from _skipped(why, some, paint)
            else:
                for finding in some:
                    yield from _finding(finding, ids, verbose, paint)
        yield ""
    yield "Ready for"
    for use, name in USE_NAMES.items():
        verdict = report.ready(use)
        yield from hanging(f"  {name:<14}{_YES_OR_NO[verdict.readiness]:<9}", verdict.why)


def _finding(finding: Finding, ids: int, verbose: bool, paint: Paint) -> Iterator[str]:
    said = f"{finding.subject}: {finding.summary}" if finding.subject else finding.summary
    first, *more = hanging(f"  {finding.status:<{_LEFT - 3}} {finding.check.id:<{ids}}  ", said)
    yield first.replace(f"  {finding.status}", f"  {paint(finding.status, finding.status)}", 1)
    yield from more
    wrong = finding.status in (Status.WARN, Status.FAIL)
    if not wrong and not verbose:
        return
    for one in finding.read:
        yield from _told("read", f"{one.source}: {one.value}")
    yield from _told("why", finding.check.why)
    if wrong:
        yield from _told("cure", finding.cure + (" (then reboot)" if finding.reboot else ""))
    yield from _told("source", finding.check.source)


def _skipped(why: str, findings: Iterable[Finding], paint: Paint) -> Iterator[str]:
    """Checks one after the other that were not made for the same reason."""
    names = dict.fromkeys(finding.check.id for finding in findings)
    first, *more = hanging(f"  {Status.SKIP:<{_LEFT - 3}} ", f"{', '.join(names)}: {why}")
    yield first.replace(Status.SKIP, paint(Status.SKIP, Status.SKIP), 1)
    yield from more


def _told(label: str, text: str) -> Iterator[str]:
    return hanging(" " * _LEFT + f"{label:<{_LABEL}}", text)


def hanging(start: str, text: str) -> Iterator[str]:
    """`start` and the text, whose further lines stand below its first. Words that are too long are cut in lines.

    Files may have anything in them; what a terminal would act upon is shown as "?".
    """
    lines = [
        line
        for paragraph in "".join(c if c.isprintable() or c == "\n" else "?" for c in text).split("\n")
        for line in textwrap.wrap(paragraph, WIDTH - len(start), break_on_hyphens=False) or [""]
    ]
    yield (start + (lines[0] if lines else "")).rstrip()
    for line in lines[1:]:
        yield (" " * len(start) + line).rstrip()


def as_json(report: Report) -> dict[str, Any]:
    """The report as what JSON has: see docs/setup.md."""
    return {
        "ready": {
            use: {"answer": _YES_OR_NO[verdict.readiness], "why": verdict.why}
            for use in Use
            for verdict in [report.ready(use)]
        },
        "pairs": [list(pair) for pair in report.pairs],
        "findings": [_as_json(finding) for finding in report.findings],
    }


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.check.id,
        "area": finding.check.area,
        "title": finding.check.title,
        "status": finding.status,
        "gpu": finding.gpu,
        "nic": finding.nic,
        "summary": finding.summary,
        "read": [{"source": one.source, "value": one.value} for one in finding.read],
        "why": finding.check.why,
        "cure": finding.cure,
        "reboot": finding.reboot,
        "uses": sorted(finding.uses or ()),
        "source": finding.check.source,
    }
