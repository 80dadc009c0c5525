"""Machines for tests of the doctor: recordings, and changes to them.

`READY` is a server with nothing wrong, put together from `data/doctor/ready`: GPU0, an A100 at ca:00.0, and a two-port
ConnectX-6 Dx at b5:00.0 (mlx5_0, ens6f0) and b5:00.1 (mlx5_1, ens6f1), all behind one PCIe switch of host bridge
pci0000:b0. These addresses and names are those of the outputs in the set-up guide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import repository
from gpunetio.doctor import Finding, ReplayHost, Report, Status, Trouble, Wanted, examine, load
from gpunetio.doctor.machine.host import Kind, Reading

DATA = repository.DATA / "doctor"
Change = Reading
_SAID = {Trouble.ABSENT: "No such file or directory", Trouble.DENIED: "Permission denied", Trouble.TIMEOUT: "no answer"}


def file(path: str, text: str | bytes) -> Change:
    """The file has these bytes."""
    return Reading(Kind.FILE, (path,), text.encode() if isinstance(text, str) else text)


def folder(path: str, *names: str) -> Change:
    """The folder has these names."""
    return Reading(Kind.FOLDER, (path,), sorted(names))


def link(path: str, target: str) -> Change:
    """Where the path leads."""
    return Reading(Kind.LINK, (path,), target)


def command(line: str, output: str, error: str = "") -> Change:
    """The command prints this; it fails if there is an `error`."""
    trouble = Trouble.FAILED if error else Trouble.NONE
    return Reading(Kind.COMMAND, tuple(line.split()), output.encode(), trouble, error)


def answer(question: str, *args: str, value: Any) -> Change:
    """The question's answer."""
    return Reading(Kind.QUESTION, (question, *args), value)


def without(kind: Kind, *key: str, trouble: Trouble = Trouble.ABSENT) -> Change:
    """It cannot be read."""
    return Reading(kind, key, None, trouble, _SAID.get(trouble, str(trouble)))


def changed(host: ReplayHost, *changes: Change) -> ReplayHost:
    """A machine that differs from another in these readings."""
    return ReplayHost(host.recorded | {(change.kind, change.key): change for change in changes})


def _put_together(folder: Path) -> ReplayHost:
    return changed(ReplayHost({}), *(r for part in sorted(folder.glob("*.json")) for r in load(part).recorded.values()))


READY = _put_together(DATA / "ready")


def report(*changes: Change, wanted: Wanted | None = None) -> Report:
    """What is found on the ready machine with these changes."""
    return examine(changed(READY, *changes), wanted)


def found(check: str, *changes: Change, wanted: Wanted | None = None) -> list[Finding]:
    """The same, of one check."""
    return [finding for finding in report(*changes, wanted=wanted).findings if finding.check.id == check]


def statuses(check: str, *changes: Change, wanted: Wanted | None = None) -> list[Status]:
    """How it ended for each subject."""
    return [finding.status for finding in found(check, *changes, wanted=wanted)]


def data(name: str) -> str:
    """A file of `data/doctor`: seed/… are outputs of the set-up guide, word for word."""
    return (DATA / name).read_text()


def of_cause(changes: list[Change], check: str, status: Status, summary: str, cure: str) -> list[Finding]:
    """What a check finds for a named cause, the first as expected, by its status and words."""
    first, *others = found(check, *changes)
    assert first.status is status, first
    assert summary in first.summary
    assert cure in first.cure
    assert all(len(finding.summary) < 80 for finding in (first, *others))
    return [first, *others]
