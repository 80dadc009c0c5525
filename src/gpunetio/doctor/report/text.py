"""Print a report as text, or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ..finding import (
    EVERY_USE,
    HARDWARE,
    USE_NAMES,
    Finding,
    Readiness,
    Report,
    Status,
    Use,
    says_reboot,
)
from ..machine.nvidia_smi import STYLE

WIDTH = 100  # columns, where the output is not a terminal
_NARROW = 20  # columns that text has at least, also in a terminal that is too narrow
_LEFT = 8  # columns before the details of a finding
_LABEL = 8
_READ = 4  # pieces of evidence shown, unless verbose
_YES_OR_NO = {Readiness.READY: "yes", Readiness.NOT_READY: "no", Readiness.UNKNOWN: "unknown"}

# Colours a status; returns the text unchanged if the output is not a terminal.
Paint = Callable[[str, Status], str]


def lines_of(
    report: Report, verbose: bool = False, use: Use | None = None, paint: Paint = lambda text, _: text,
    width: int = WIDTH,
) -> Iterator[str]:
    """Yield the lines of a report: problems with all details, everything else in one line (`verbose`: with details).

    `use` limits the report to one use. Lines wrap at `width` columns.
    """
    shown = [finding for finding in report.findings if use is None or use in (finding.uses or ())]
    ids = max((len(finding.check.id) for finding in shown), default=0)
    how = _Layout(ids, width, paint, verbose, brief=use is None and not verbose)
    for area, findings in groupby(shown, lambda finding: finding.check.area):
        yield area
        ordered = [one for _, of in groupby(findings, lambda one: one.check.id) for one in sorted(of, key=how.last)]
        for _, alike in groupby(ordered, how.alike):
            yield from _told_of(list(alike), how)
        yield ""
    hidden = dict.fromkeys(finding.check.id for finding in shown if finding.needs_root)
    if hidden:
        yield from (*hanging("Root would know more: ", ", ".join(hidden), width), "")
    yield "Ready for"
    for each, name in USE_NAMES.items():
        verdict = report.ready(each)
        yield from hanging(f"  {name:<14}{_YES_OR_NO[verdict.readiness]:<9}", verdict.why, width)


@dataclass(frozen=True)
class _Layout:
    """How findings are printed."""

    ids: int  # columns for the names of checks
    width: int
    paint: Paint
    verbose: bool
    brief: bool  # whether brief findings take one line

    def in_brief(self, finding: Finding) -> bool:
        return self.brief and finding.brief

    def last(self, finding: Finding) -> bool:
        """Return a sort key that puts the brief findings of a check together, before the others."""
        return not self.in_brief(finding)

    def alike(self, finding: Finding) -> tuple[str, ...]:
        """Return the key by which consecutive findings are grouped into one."""
        if finding.status is Status.SKIP and not self.verbose:
            return finding.status, finding.summary
        return finding.status, finding.check.id, finding.summary, "" if self.in_brief(finding) else finding.cure


def _told_of(alike: list[Finding], how: _Layout) -> Iterator[str]:
    one, verbose, ids, paint = alike[0], how.verbose, how.ids, how.paint
    wrong = one.status in (Status.WARN, Status.FAIL)
    read = list(dict.fromkeys(evidence for finding in alike for evidence in finding.read))
    if one.status is Status.SKIP and not verbose:
        ids_there = dict.fromkeys(finding.check.id for finding in alike)
        subjects = {id: _subjects(finding for finding in alike if finding.check.id == id) for id in ids_there}
        names = ", ".join(f"{id} ({subject})" if subject else id for id, subject in subjects.items())
        first, *more = hanging(f"  {one.status:<{_LEFT - 3}} ", f"{names}: {one.summary}", how.width)
    else:
        subject = _subjects(alike)
        said = f"{subject}: {one.summary}" if subject else one.summary
        first, *more = hanging(f"  {one.status:<{_LEFT - 3}} {one.check.id:<{ids}}  ", said, how.width)
    yield first.replace(f"  {one.status}", f"  {paint(one.status, one.status)}", 1)
    yield from more
    if (one.status is Status.OK and not verbose) or how.in_brief(one):
        return
    for evidence in read if verbose else read[:_READ]:
        yield from _told("read", f"{evidence.source}: {evidence.value}", how.width)
    if len(read) > _READ and not verbose:
        yield from _told("", f"… and {len(read) - _READ} more", how.width)
    if one.status is Status.SKIP and not verbose:
        return
    yield from _told("why", one.check.why, how.width)
    if one.cure:  # also a finding that is OK may have one, for an optional feature
        then = " (then reboot)" if one.reboot and not says_reboot(one.cure) else ""
        yield from _told("cure", one.cure + then, how.width)
        if wrong and one.uses not in (HARDWARE, EVERY_USE):
            names = ", ".join(name for use, name in USE_NAMES.items() if use in (one.uses or ()))
            yield from _told("for", names, how.width)
    yield from _told("source", one.check.source, how.width)


def _subjects(findings: Iterable[Finding]) -> str:
    return ", ".join(filter(None, dict.fromkeys(finding.subject for finding in findings)))


def _told(label: str, text: str, width: int) -> Iterator[str]:
    return hanging(" " * _LEFT + f"{label:<{_LABEL}}", text, width)


def hanging(start: str, text: str, width: int = WIDTH) -> Iterator[str]:
    """Wrap text after `start` at `width` columns, with a hanging indent. Words that are too long are broken.

    Files may contain any bytes. Styles are removed, and other control characters are shown as "?".
    """
    text = STYLE.sub("", text).expandtabs(1)
    lines = [
        line
        for paragraph in "".join(c if c.isprintable() or c == "\n" else "?" for c in text).split("\n")
        for line in textwrap.wrap(paragraph, max(width - len(start), _NARROW), break_on_hyphens=False) or [""]
    ]
    yield (start + (lines[0] if lines else "")).rstrip()
    for line in lines[1:]:
        yield (" " * len(start) + line).rstrip()


def as_json(report: Report) -> dict[str, object]:
    """Return the report as a JSON object, see docs/setup.md."""
    return {
        "ready": {
            use: {"answer": _YES_OR_NO[verdict.readiness], "why": verdict.why}
            for use in Use
            for verdict in [report.ready(use)]
        },
        "pairs": [list(pair) for pair in report.pairs],
        "findings": [_as_json(finding) for finding in report.findings],
    }


def _as_json(finding: Finding) -> dict[str, object]:
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
        "needs_root": finding.needs_root,
        "uses": sorted(finding.uses or ()),
        "source": finding.check.source,
    }
