"""The mutants of compiled code: one patch each, whose first line says what it breaks and who is expected to notice."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
_NOTICED = " Noticed by: "


@dataclass(frozen=True)
class Patch:
    """A unified diff of one file, after a line `what it breaks. Noticed by: arguments of pytest`."""

    name: str
    breaks: str
    tests: tuple[str, ...]
    path: str
    hunks: tuple[tuple[str, str], ...]

    def applied(self, text: str) -> str:
        """Return the mutated text. Line numbers are not looked at: ValueError unless each hunk fits at one place."""
        for old, new in self.hunks:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: this is {text.count(old)} times in {self.path}, not once:\n{old}")
            text = text.replace(old, new)
        return text


def read(file: Path) -> Patch:
    """Read one patch."""
    head, *lines = file.read_text().splitlines(keepends=True)
    breaks, noticed, tests = head.strip().partition(_NOTICED)
    if not noticed:
        raise ValueError(f"{file.name}: the first line does not end with '{_NOTICED.strip()} …': {head.strip()}")
    path, hunks = "", []
    for line in lines:
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/").strip()
        elif line.startswith("@@"):
            hunks.append(["", ""])
        elif hunks:
            hunks[-1][0] += line[1:] * (line[0] != "+")
            hunks[-1][1] += line[1:] * (line[0] != "-")
    return Patch(file.stem, breaks, tuple(shlex.split(tests)), path, tuple((old, new) for old, new in hunks))


def read_all() -> list[Patch]:
    """Read the patches of this folder."""
    return [read(file) for file in sorted(FOLDER.glob("*.patch"))]
