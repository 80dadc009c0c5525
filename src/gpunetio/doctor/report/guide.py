"""Generate the list of checks in docs/setup.md: `python -m gpunetio.doctor.report.guide docs/setup.md` updates it."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

from ..checks.catalog import all_checks
from ..finding import EVERY_USE, USE_NAMES, Check, says_reboot
from ..probes.trying import PROBES

BEGIN, END = "<!-- checks: made by `make docs` -->", "<!-- end of checks -->"


def checks_as_markdown() -> str:
    """Return all checks as Markdown: why each matters, its cure, and its source."""
    parts = [BEGIN]
    for area, checks in groupby((*all_checks(), *PROBES), lambda one: one.area):
        parts += [f"### {area}", *map(_check, checks)]
    return "\n\n".join((*parts, END))


def _check(check: Check) -> str:
    uses = "all uses" if check.uses == EVERY_USE else ", ".join(USE_NAMES[u] for u in USE_NAMES if u in check.uses)
    reboot = " Then reboot." if check.reboot and not says_reboot(check.cure) else ""
    return (
        f"**{_plain(check.title)}** (`{check.id}`; {uses})  \n{_plain(check.why)}  \n"
        f"*Cure:* {_plain(check.cure)}{'' if check.cure.endswith('.') else '.'}{reboot}  \n"
        f"*Source:* {_plain(check.source)}."
    )


def _plain(text: str) -> str:
    """Escape what Markdown would take for markup, such as <GPU> and *."""
    return re.sub(r"([<*`\\\[])", r"\\\1", text)


def renewed(text: str) -> str:
    """Return the guide's text with an updated list of checks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + checks_as_markdown() + after


if __name__ == "__main__":
    for _path in map(Path, sys.argv[1:]):
        _path.write_text(renewed(_path.read_text(encoding="utf-8")), encoding="utf-8")
