"""Describe the state of a software NIC after a failure: counters, injected faults, refusals and queue pairs.

For NICs of other processes, `gpunetio stat` and `gpunetio show qp` show the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .nic import SoftNic
from .observe.kinds import KINDS
from .observe.words import cells, columns, is_right_aligned

_QP = "qp"


def diagnose(nic: SoftNic) -> str:
    """Return the diagnosis of an open NIC as text of several lines."""
    with nic.observed() as seen:
        fields = columns(_QP, seen)
        queue_pairs = [cells(_QP, seen, row, fields) for row in seen.tables[KINDS[_QP]]]
        counters = {name: value for name, value in seen.counters.items() if value}
    sections = (
        ("injected faults", _counts(nic.injected() if nic.port.config.faults else {})),
        ("counters that are not 0", _counts(counters)),
        ("refused", [report.message for report in nic.reports]),
        ("queue pairs", _table(fields, queue_pairs)),
    )
    lines = [f"{nic.name} at {', '.join(map(str, nic.port.addresses))}, faults: {nic.port.config.faults or 'none'}"]
    for title, section in sections:
        lines += [f"  {title}:", *(f"    {line}" for line in section or ["none"])]
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, int]) -> list[str]:
    width = max(map(len, counts), default=0)
    return [f"{name:<{width}}  {value}" for name, value in counts.items()]


def _table(fields: Iterable[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as aligned columns under their headings. Return no lines if there are no rows."""
    if not rows:
        return []
    headings = [heading for heading, _ in fields]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if is_right_aligned(heading) else '<'}{width}}"
            for heading, cell, width in zip(headings, line, widths, strict=True)
        ).rstrip()
        for line in (headings, *rows)
    ]
