"""How long `gpunetio put_bw --loopback` takes from its start to its first row, with a warm and with a cold cache."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

COMMAND = [sys.executable, "-u", "-m", "gpunetio", "put_bw", "--loopback"]
ROW = re.compile(r"^[^A-Za-z]*\d")  # a line of numbers: no header, no rule, no title
GOALS = {"warm": 1.5, "cold": 30.0}


def first_row(cache: str | None, command: list[str]) -> float:
    """Seconds from the start of the process to its first row; the process is stopped then."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"NUMBA_CACHE_DIR": cache} if cache else {})
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        lines = []
        for line in child.stdout or ():
            lines.append(line)
            if ROW.match(line):
                seconds = time.perf_counter() - start
                child.terminate()
                return seconds
        error = child.stderr.read() if child.stderr else ""
    raise SystemExit(f"{' '.join(command)} ended without a row:\n{''.join(lines)}{error}")


def interpreter() -> float:
    """Seconds that Python and the imports take without us: the floor of a warm start."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, numba, click, rich.table"], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="warm starts")
    parser.add_argument("--cold-rounds", type=int, default=1, help="cold starts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("command", nargs="*", help="another command to start, after --")
    args = parser.parse_args()
    command = args.command or COMMAND
    cold = []
    for _ in range(args.cold_rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_row(cache, command))
    first_row(None, command)  # fills the cache
    floor, warm = [], []
    for _ in range(args.rounds):
        floor.append(interpreter())
        warm.append(first_row(None, command))
    samples = {"warm": warm, "cold": cold}
    results = [
        {"start": name, "median_s": statistics.median(values), "best_s": min(values), "goal_s": GOALS[name],
         "imports_alone_s": statistics.median(floor), "rounds": len(values)}
        for name, values in samples.items() if values
    ]  # fmt: skip
    if args.json:
        print(json.dumps(results, indent=2))
        return
    table = Table("start", "median", "best", "goal", "imports alone", title=" ".join(command[1:]))
    for r in results:
        seconds = [f"{r[key]:.2f} s" for key in ("median_s", "best_s", "goal_s", "imports_alone_s")]
        table.add_row(str(r["start"]), *seconds)
    Console().print(table)


if __name__ == "__main__":
    main()
