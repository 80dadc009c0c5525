"""Programs that nobody here wrote on software NICs (`gpunetio run`), beside our own benchmarks and other transports.

Two processes on this host write to each other's memory: 2 or 8 bytes back and forth, and 64 KiB at a time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

PORT = 18535
SECONDS = 60
GPUNETIO = (sys.executable, "-m", "gpunetio")
UNDER = (*GPUNETIO, "run", "--")
INTEROP = Path(__file__).resolve().parents[1] / "tests" / "interop"
MIB, MB = 1.048576 / 1000, 1 / 1000  # in GB
LATENCY_GOAL, BANDWIDTH_GOAL = "≤ 1.3", "≥ 0.8"


class Numbers(NamedTuple):
    """Half a round trip in µs, the median, and bandwidth in GB/s."""

    latency: float
    bandwidth: float


def pair(server: Sequence[str], client: Sequence[str], **environment: str) -> str:
    """Run both ends. Return what the client prints."""
    env = {**os.environ, **environment}
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as waiting:
        try:
            for _ in range(20):
                done = subprocess.run(client, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
                if done.returncode == 0:
                    waiting.wait(SECONDS)
                    return done.stdout
                if waiting.poll() is not None:
                    break
                time.sleep(0.5)  # the server may not listen yet
            sys.exit(f"{' '.join(client)}: {done.stdout}{done.stderr}{waiting.stderr.read() if waiting.stderr else ''}")
        finally:
            waiting.terminate()


def last_row(out: str) -> list[float]:
    """Return the numbers in the last line that has nothing else."""
    rows = [line for line in out.splitlines() if re.fullmatch(r"\s*\d+(\s+[\d.]+)+\s*", line)]
    return [float(word) for word in rows[-1].split()]


# --- the ways --------------------------------------------------------------------------------------------------------

PERFTEST_LAT, PERFTEST_BW = ("ib_write_lat", "-n", "2000"), ("ib_write_bw", "-s", "65536", "-n", "20000")


def of_ours() -> Numbers:
    def row(*command: str) -> dict[str, float]:
        whole = [*GPUNETIO, *command, "--target", "cpu", "--port", str(PORT + 1), "--json"]
        found: dict[str, float] = json.loads(pair(whole, [*whole, "-c", "127.0.0.1"]))["results"][0]
        return found

    latency = row("write_lat", "-s", "2", "-i", "2000")["lat_median_us"]
    return Numbers(latency, row("write_bw", "-s", "65536", "-i", "20000")["bw_avg_gbps"] / 8)


def of_perftest() -> Numbers:
    def row(*command: str) -> list[float]:
        whole = [*UNDER, *command, "-F", "-p", str(PORT)]
        return last_row(pair(whole, [*whole, "127.0.0.1"]))

    return Numbers(row(*PERFTEST_LAT)[4], row(*PERFTEST_BW)[3] * MIB)


def _of_ucx(under: Sequence[str], **environment: str) -> Numbers:
    def row(*test: str) -> list[float]:
        whole = [*under, "ucx_perftest", "-f", "-p", str(PORT + 2), "-t", *test]
        quiet = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "error"}
        return last_row(pair(whole, [*whole, "127.0.0.1"], **quiet, **environment))

    latency = row("ucp_put_lat", "-s", "8", "-n", "2000")[1]
    return Numbers(latency, row("ucp_put_bw", "-s", "65536", "-n", "5000")[5] * MIB)


def of_ucx() -> Numbers:
    return _of_ucx(UNDER, UCX_TLS="rc_x", UCX_NET_DEVICES="soft0:1")


def of_tcp() -> Numbers:
    return _of_ucx((), UCX_TLS="tcp", UCX_NET_DEVICES="lo")


def of_rxe() -> Numbers:
    """The kernel's Soft-RoCE, both ends in the guest of tests/interop."""
    with _guest() as guest:
        device = ("-d", "rxe0", "-x", "1", "-m", "1024", "-F", "-p", str(PORT))

        def row(*command: str) -> list[float]:
            server = guest.session("a")
            server.begin_run(*command, *device, timeout=SECONDS)
            assert guest.session("b").call("listening", port=PORT, timeout=10)
            found = last_row(guest.session("b").run(*command, *device, guest.ADDRESS, timeout=SECONDS))
            server.finish_run()
            return found

        return Numbers(row(*PERFTEST_LAT)[4], row(*PERFTEST_BW)[3] * MIB)


@contextmanager
def _guest() -> Iterator[Any]:
    sys.path.insert(0, str(INTEROP))
    machine = importlib.import_module("guest")
    machine.build()
    guest = machine.Guest(1024)
    try:
        yield guest
    finally:
        guest.stop()


class Way(NamedTuple):
    """`needs`: a program without which it is left out."""

    name: str
    measure: Callable[[], Numbers]
    needs: str
    has_goals: bool = False


OURS = Way("gpunetio write_lat, write_bw", of_ours, "")
WAYS = (
    OURS,
    Way("perftest on soft0", of_perftest, "ib_write_lat", has_goals=True),
    Way("UCX put on soft0 (rc_x)", of_ucx, "ucx_perftest"),
    Way("UCX put over TCP", of_tcp, "ucx_perftest"),
)
IN_A_GUEST = Way("perftest on rxe, in a guest", of_rxe, "qemu-system-x86_64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn; medians count (default %(default)s)")
    parser.add_argument("--guest", action="store_true", help="also Soft-RoCE, in the tests' guest (root, QEMU)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    ways = [way for way in (*WAYS, *((IN_A_GUEST,) if args.guest else ())) if not way.needs or shutil.which(way.needs)]
    rounds = [[way.measure() for way in ways] for _ in range(args.rounds)]
    medians = [Numbers(*map(statistics.median, zip(*found))) for found in zip(*rounds)]
    limit = medians[ways.index(OURS)]
    results = [
        {
            "what": way.name, "latency_us": each.latency, "bandwidth_gbytes": each.bandwidth,
            "latency_ratio": each.latency / limit.latency, "bandwidth_ratio": each.bandwidth / limit.bandwidth,
            "goals": [LATENCY_GOAL, BANDWIDTH_GOAL] if way.has_goals else [],
        }
        for way, each in zip(ways, medians)
    ]
    if args.json:
        return print(json.dumps(results, indent=2, ensure_ascii=False))
    table = Table("", "µs", "of ours", "64 KiB, GB/s", "of ours", "goals")
    for row in results:
        numbers = (row[name] for name in ("latency_us", "latency_ratio", "bandwidth_gbytes", "bandwidth_ratio"))
        table.add_row(str(row["what"]), *(f"{number:.2f}" for number in numbers), " ".join(map(str, row["goals"])))
    Console().print(table)


if __name__ == "__main__":
    main()
