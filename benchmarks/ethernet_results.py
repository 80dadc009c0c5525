"""What benchmarks of Ethernet frames have measured: samples of a job and of its limit, and their table."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_BEGIN = time.monotonic()


def progress(text: str) -> None:
    """Say what is being done, and after how many seconds."""
    print(f"{time.monotonic() - _BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


@dataclass
class Result:
    """Samples of one job, and of its limit; the two took turns. `unit` is ns (per frame), µs or Mpps."""

    name: str
    unit: str
    limit: str
    goal: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    note: str = ""

    def summary(self) -> dict[str, Any]:
        """Everything worth keeping, as plain values."""
        best = max if self.unit == "Mpps" else min
        row: dict[str, Any] = {"name": self.name, "unit": self.unit, "limit": self.limit, "goal": self.goal}
        row |= {"ours": statistics.median(self.ours), "ours_best": best(self.ours), "note": self.note}
        if self.unit == "ns":
            row["mpps"] = 1e3 / row["ours"]
        if self.theirs:
            row |= {"theirs": statistics.median(self.theirs), "theirs_best": best(self.theirs)}
            row |= {"ratio": row["ours"] / row["theirs"], "ratio_of_bests": row["ours_best"] / row["theirs_best"]}
        return row


def show(results: Sequence[Result]) -> None:
    """Print a table."""
    table = Table(box=box.SIMPLE)
    for column in ("job", "ours", "best", "Mpps", "limit", "goal", "limit is", "ratio", "of bests"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("job", "limit", "goal") else "right")
    for row in (result.summary() for result in results):
        figures = [f"{row[key]:.2f}" if key in row else "–" for key in ("theirs", "ratio", "ratio_of_bests")]
        rate = row["ours"] if row["unit"] == "Mpps" else row.get("mpps")
        table.add_row(
            row["name"], f"{row['ours']:.2f} {row['unit']}", f"{row['ours_best']:.2f}",
            "–" if rate is None else f"{rate:.2f}", row["limit"], row["goal"], *figures,
        )
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)
    for result in results:
        if result.note:
            console.print(f"{result.name}: {result.note}", highlight=False)
