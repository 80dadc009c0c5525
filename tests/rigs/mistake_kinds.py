"""Print each kind of mistake that a run with foreign bytes or calls has found, once."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable


def print_kinds(errors: Iterable[BaseException], tried: str) -> None:
    """Print the first error that comes from each place in the package, and then how many there were."""
    seen: Counter[str] = Counter()
    for error in errors:
        where = traceback.extract_tb(error.__traceback__)
        frame = next((f for f in reversed(where) if "gpunetio" in f.filename), where[-1])
        place = f"{frame.filename}:{frame.lineno}"
        if not seen[place]:
            print(f"{type(error).__name__} in {place}: {str(error)[:100]}", flush=True)
        seen[place] += 1
    print(f"{tried}, {sum(seen.values())} mistakes of {len(seen)} kinds")
