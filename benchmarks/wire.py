"""Two processes of gpunetio, over UDP and over shared memory, against C that does the bare transfer in the same run."""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpunetio.device.waiting import HOST_SPINS
from gpunetio.nic.host.engine import yield_every

LIMITS = Path(__file__).with_name("wire_limits.c")
FLAGS = ["-Wall", "-O3", "-march=native", "-pthread"]
LIMIT_SECONDS = 20  # of one run of a limit
REPEAT = 3  # runs of a limit in its turn, after one that warms up
OURS_SECONDS = 60  # of one run of ours, with what it takes to start
PORT = 18515  # where the server waits for its client


@dataclass(frozen=True)
class Ours:
    """A run of ours: `both` ends' command line, what the `server` and the `client` have besides, and the figure."""

    both: str
    figure: str  # in the client's JSON, of its only result
    scale: float = 1.0  # of the figure to the job's unit
    server: str = ""
    client: str = "-c 127.0.0.1"


@dataclass(frozen=True)
class Goal:
    """What is to be reached: by the ratio to the limit, or by the figure itself."""

    what: str  # "ratio" or "ours"
    relation: str  # "≥" or "≤"
    value: float

    def met(self, ours: float, limit: float | None) -> bool:
        """Whether it is."""
        figure = ours if self.what == "ours" or limit is None else ours / limit
        compare = operator.ge if self.relation == "≥" else operator.le
        return bool(compare(figure, self.value))


@dataclass(frozen=True)
class Job:
    """What is measured, and against what: a limit's command line, or a run of ours under better conditions."""

    title: str
    unit: str
    goal: Goal
    ours: Ours
    limit: str | Ours


# --- what is run -----------------------------------------------------------------------------------------------------

UDP = "--wire udp --target cpu --json"
SHM = "--wire auto --target cpu --json"
UDP_64K = Ours(f"write_bw {UDP} -s 65536 -i 16384", "bw_avg_gbps", 1 / 8)
LOSSY = "-c 127.0.0.1 --faults loss=0.01"
JOBS = {
    "udp-64k": Job(
        "UDP, writes of 64 KiB, MTU 4096", "GB/s", Goal("ratio", "≥", 0.5), UDP_64K, "udp-stream"
    ),
    "udp-64": Job(
        "UDP, writes of 64 B", "M/s", Goal("ours", "≥", 1.0),
        Ours(f"write_bw {UDP} -s 64 -i 1000000", "msg_rate_mpps"), "udp-messages",
    ),
    "udp-latency": Job(
        "UDP, ping-pong of 8 B writes", "µs", Goal("ratio", "≤", 1.5),
        Ours(f"write_lat {UDP} -s 8 -i 10000", "lat_median_us"), "udp-pingpong",
    ),
    "shm-64k": Job(
        "shared memory, writes of 64 KiB", "GB/s", Goal("ratio", "≥", 0.8),
        Ours(f"write_bw {SHM} -s 65536 -i 32768", "bw_avg_gbps", 1 / 8), "shm-stream",
    ),
    "shm-64": Job(
        "shared memory, writes of 64 B", "M/s", Goal("ours", "≥", 10.0),
        Ours(f"write_bw {SHM} -s 64 -i 4000000", "msg_rate_mpps"), "shm-messages",
    ),
    "shm-latency": Job(
        "shared memory, ping-pong of 8 B writes", "µs", Goal("ratio", "≤", 1.3),
        Ours(f"write_lat {SHM} -s 8 -i 20000", "lat_median_us"), "shm-pingpong",
    ),
    "udp-loss": Job(
        "UDP, writes of 64 KiB, 1 % lost", "GB/s", Goal("ratio", "≥", 0.4),
        Ours(UDP_64K.both, UDP_64K.figure, UDP_64K.scale, client=LOSSY), UDP_64K,
    ),
}
# Measured in every round beside the jobs. The second is what a cache line takes from one core to the other: where the
# hypervisor has put them, and whether somebody else uses them.
CONDITIONS = {
    "memcpy_gb_per_s": "memcpy",
    "core_to_core_us": "shm-pingpong --threads 1 --cores 2 --yield_every 65536",
}


class RunError(Exception):
    """A run ended without a figure."""


# --- the limits ------------------------------------------------------------------------------------------------------


def build_limits(folder: str) -> str:
    """The limits' program, compiled for this machine."""
    program = str(Path(folder, "wire_limits"))
    subprocess.run(["gcc", *FLAGS, str(LIMITS), "-o", program], check=True)
    return program


def run_limit(program: str, command: str, options: list[str]) -> float:
    """The median of a few runs of a limit; the first, which finds the cores asleep, is left out."""
    fixed = ["--deadline", str(LIMIT_SECONDS), "--repeat", str(REPEAT + 1)]
    argv = [program, *command.split(), *options, *fixed]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=(REPEAT + 2) * LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(f"{command}: not done in time") from None
    if done.returncode != 0:
        raise RunError(f"{command}: {done.stderr.strip()}")
    return statistics.median(json.loads(line)["value"] for line in done.stdout.splitlines()[1:])


# --- ours ------------------------------------------------------------------------------------------------------------


def listening(port: int) -> bool:
    """Whether a TCP socket of this host waits at `port`; it is not disturbed (proc(5), /proc/net/tcp)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                return True
    return False


def start(command: str, extra: str) -> subprocess.Popen[str]:
    """A process of ours."""
    argv = [sys.executable, "-m", "gpunetio", *command.split(), *extra.split()]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def problem(process: subprocess.Popen[str]) -> str:
    """What a process that failed has said."""
    out, err = process.communicate()
    words = (err.strip() or out.strip() or "nothing said").splitlines()
    return f"{' '.join(process.args[2:])}: exit status {process.returncode}: {words[-1]}"  # type: ignore[index]


def run_ours(ours: Ours) -> float:
    """One figure of ours: a server, its client, and what the client has measured."""
    end = time.monotonic() + OURS_SECONDS
    if listening(PORT):
        raise RunError(f"port {PORT} is taken: another server runs")
    processes = [start(ours.both, ours.server)]
    try:
        while not listening(PORT):
            if processes[0].poll() is not None:
                raise RunError(problem(processes[0]))
            if time.monotonic() > end:
                raise RunError(f"the server did not listen within {OURS_SECONDS} s")
            time.sleep(0.02)
        processes.append(start(ours.both, ours.client))
        server, client = processes
        out, err = client.communicate(timeout=max(end - time.monotonic(), 0.1))
        if client.returncode != 0:
            words = (err.strip() or "nothing said").splitlines()
            raise RunError(f"the client ended with {client.returncode}: {words[-1]}")
        server.communicate(timeout=max(end - time.monotonic(), 0.1))
        if server.returncode != 0:
            raise RunError(f"the server ended with {server.returncode}")
        (result,) = json.loads(out)["results"]
        if not result.get("validated", True):
            raise RunError("what arrived is not what was sent")
        return float(result[ours.figure]) * ours.scale
    except subprocess.TimeoutExpired:
        raise RunError(f"not done within {OURS_SECONDS} s") from None
    except (ValueError, KeyError) as error:
        raise RunError(f"the client's JSON has no {ours.figure}: {error}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Samples of one job by both sides, which took turns, or why one of them has none."""

    name: str
    job: Job
    ours: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    problem: str | None = None

    def sample(self, into: list[float], run: Callable[[], float]) -> None:
        """One more, unless this job has failed before."""
        if self.problem is None:
            try:
                into.append(run())
            except RunError as error:
                self.problem = str(error)

    def summary(self) -> dict[str, Any]:
        """Everything worth keeping, as plain values."""
        best = min if self.job.unit == "µs" else max
        values: dict[str, Any] = {"name": self.name, "title": self.job.title, "unit": self.job.unit}
        for side, samples in (("ours", self.ours), ("limit", self.limit)):
            values[f"{side}_median"] = statistics.median(samples) if samples else None
            values[f"{side}_best"] = best(samples) if samples else None
            values[f"{side}_samples"] = samples
        for which in ("median", "best"):
            ours, limit = values[f"ours_{which}"], values[f"limit_{which}"]
            values[f"ratio_{which}"] = ours / limit if ours is not None and limit else None
        ours, limit = values["ours_median"], values["limit_median"]
        known = ours is not None and (limit is not None or self.job.goal.what == "ours")
        values["goal"] = asdict(self.job.goal)
        values["met"] = self.job.goal.met(ours, limit) if known else None
        values["problem"] = self.problem
        return values


Conditions = dict[str, list[float]]


def measure(
    program: str, names: list[str], rounds: int, limits_only: bool, options: list[str]
) -> tuple[list[Result], Conditions]:
    """All jobs in turns: ours, its limit, the next job; and so on for `rounds`. And what the machine was like."""
    results = [Result(name, JOBS[name]) for name in names]
    conditions: Conditions = {name: [] for name in CONDITIONS}
    for _ in range(rounds):
        for name, command in CONDITIONS.items():
            conditions[name].append(run_limit(program, command, []))
        for result in results:
            if not limits_only:
                result.sample(result.ours, lambda ours=result.job.ours: run_ours(ours))
            match result.job.limit:
                case Ours() as better:
                    if not limits_only:
                        result.sample(result.limit, lambda ours=better: run_ours(ours))
                case command:
                    result.sample(result.limit, lambda command=command: run_limit(program, command, options))
    return results, conditions


def cell(value: float | None, unit: str = "") -> str:
    """A figure of the table."""
    return "–" if value is None else f"{value:.2f} {unit}".strip()


def show(results: list[Result], conditions: Conditions) -> None:
    """The table."""
    table = Table(title="medians over the rounds", box=box.SIMPLE)
    for name in ("job", "ours", "limit", "ratio", "of bests", "goal", "met"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("job", "goal", "met") else "right")
    for result in results:
        s, goal, unit = result.summary(), result.job.goal, result.job.unit
        against = result.job.limit if isinstance(result.job.limit, str) else "ours, no loss"
        reach = f"{goal.what} {goal.relation} {goal.value:g}" + ("" if goal.what == "ratio" else f" {unit}")
        met = {True: "yes", False: "no", None: "–"}[s["met"]]
        figures = cell(s["ours_median"], unit), f"{against} {cell(s['limit_median'], unit)}"
        table.add_row(result.job.title, *figures, cell(s["ratio_median"]), cell(s["ratio_best"]), reach, met)
    console = Console()
    console.width = max(console.width, 130)
    console.print(table)
    for name, samples in conditions.items():
        median, least, most = statistics.median(samples), min(samples), max(samples)
        console.print(f"{name}: {median:.3g} ({least:.3g} to {most:.3g})", highlight=False)
    for result in results:
        if result.problem is not None:
            console.print(f"{result.name}: [red]{escape(result.problem)}[/red]")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--only", metavar="NAME", choices=JOBS, action="append", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--limits-only", action="store_true", help="leave our side out")
    parser.add_argument("--cores", type=int, default=0, help="placement of the limits, as in wire_limits.c")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    options = f"--cores {args.cores} --spins {HOST_SPINS} --yield_every {yield_every()}".split()
    with tempfile.TemporaryDirectory() as folder:
        program = build_limits(folder)
        results, conditions = measure(program, args.only or list(JOBS), args.rounds, args.limits_only, options)
    if args.json:
        document = {"conditions": conditions, "results": [result.summary() for result in results]}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        show(results, conditions)
    if any(result.problem is not None for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
