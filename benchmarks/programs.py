"""perftest on software NICs (`gpunetio run`), against our own benchmarks between two processes on the same wire."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

PORT = 18535
SECONDS = 60
GPUNETIO = (sys.executable, "-m", "gpunetio")
PERFTEST, OURS = "perftest", "gpunetio"


def pair(server: list[str], client: list[str]) -> str:
    """Run both ends. Return what the client prints."""
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            for _ in range(20):
                done = subprocess.run(client, capture_output=True, text=True, timeout=SECONDS, check=False)
                if done.returncode == 0:
                    waiting.wait(SECONDS)
                    return done.stdout
                if waiting.poll() is not None:
                    break
                time.sleep(0.5)  # the server may not listen yet
            sys.exit(f"{' '.join(client)}: {done.stdout}{done.stderr}{waiting.stderr.read() if waiting.stderr else ''}")
        finally:
            waiting.terminate()


def of_perftest(*command: str) -> list[float]:
    """Return the numbers in perftest's row of results."""
    whole = [*GPUNETIO, "run", "--", *command, "-F", "-p", str(PORT)]
    out = pair(whole, [*whole, "127.0.0.1"])
    rows = [line for line in out.splitlines() if re.fullmatch(r"\s*\d+\s+\d+(\s+[\d.]+)+\s*", line)]
    return [float(word) for word in rows[-1].split()]


def of_ours(*command: str) -> dict[str, float]:
    """Return the row of results of a benchmark of ours."""
    whole = [*GPUNETIO, *command, "--target", "cpu", "--port", str(PORT + 1), "--json"]
    document = json.loads(pair(whole, [*whole, "-c", "127.0.0.1"]))
    row: dict[str, float] = document["results"][0]
    return row


def lat_of_perftest() -> float:
    return of_perftest("ib_write_lat", "-n", "2000")[4]


def lat_of_ours() -> float:
    return of_ours("write_lat", "-s", "2", "-i", "2000")["lat_median_us"]


def bw_of_perftest() -> float:
    return of_perftest("ib_write_bw", "-s", "65536", "-n", "20000")[3] * 1.048576 / 1000  # MiB/s to GB/s


def bw_of_ours() -> float:
    return of_ours("write_bw", "-s", "65536", "-i", "20000")["bw_avg_gbps"] / 8


ROWS = (
    ("write latency, 2 B, µs, half a round trip", lat_of_perftest, lat_of_ours, "≤ 1.3"),
    ("write bandwidth, 64 KiB, GB/s", bw_of_perftest, bw_of_ours, "≥ 0.8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="perftest on software NICs against our own benchmarks.")
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn; medians count (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    results = []
    for what, theirs, ours, goal in ROWS:
        found = [(theirs(), ours()) for _ in range(args.rounds)]
        one, other = (statistics.median(each) for each in zip(*found, strict=True))
        results.append({"what": what, PERFTEST: one, OURS: other, "ratio": one / other, "goal": goal})
    if args.json:
        return print(json.dumps(results, indent=2, ensure_ascii=False))
    table = Table("", PERFTEST, OURS, "ratio", "goal")
    for row in results:
        table.add_row(row["what"], *(f"{row[name]:.2f}" for name in (PERFTEST, OURS, "ratio")), row["goal"])
    Console().print(table)


if __name__ == "__main__":
    main()
