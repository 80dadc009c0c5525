"""How long one waits for the compiler and the imports: with an empty cache, and with a full one.

Wall clock and CPU seconds, children included. They differ where two processes compile, and on a busy machine.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.util
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
GPUNETIO = [sys.executable, "-u", "-m", "gpunetio"]
PUT_BW = [*GPUNETIO, "put_bw", "--loopback"]
ROW = re.compile(r"^[^A-Za-z]*\d")  # a line of numbers: no header, no rule, no title
README = re.search(r"```python\n(import gpunetio.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
OWN_KERNEL = """
import gpunetio as gn
from gpunetio import device as dev

@gn.kernel
def own(qp, raddr, rkey, laddr, lkey, nbytes):
    dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, nbytes))
"""
FOR_THE_HOST = OWN_KERNEL + "own.compile_for_the_host()\n"
FOR_A_GPU = f"""{OWN_KERNEL}
from gpunetio.jit.cubin import ptx_of
from gpunetio.jit.kinds import INT

ptx_of(own, (INT,) * 6, (9, 0))
"""
CUDA_KERNELS = ROOT / "tests" / "rigs" / "cuda_kernels.py"


@dataclass(frozen=True)
class Start:
    """Something that is started: with a cache that is empty, or filled by `before`."""

    name: str
    goal: float  # seconds
    run: Callable[[str], None]
    before: Callable[[str], None] | None = None


def environment(cache: str) -> dict[str, str]:
    """The environment of a process whose cache is in a folder."""
    return os.environ | {"PYTHONUNBUFFERED": "1", "GPUNETIO_QUIET": "1", "GPUNETIO_CACHE_DIR": cache}


def whole(command: list[str], **more: str) -> Callable[[str], None]:
    """A command that runs to its end."""

    def run(cache: str) -> None:
        subprocess.run(command, env=environment(cache) | more, check=True, stdout=subprocess.DEVNULL)

    return run


def first_row(command: list[str]) -> Callable[[str], None]:
    """A command that is stopped at its first row."""

    def run(cache: str) -> None:
        with subprocess.Popen(
            command, env=environment(cache), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            lines = []
            for line in child.stdout or ():
                lines.append(line)
                if ROW.match(line):
                    child.terminate()
                    return
            error = child.stderr.read() if child.stderr else ""
        raise SystemExit(f"{' '.join(command)} ended without a row:\n{''.join(lines)}{error}")

    return run


def program(text: str, **more: str) -> Callable[[str], None]:
    """A program from a file, as functions from elsewhere are not cached."""

    def run(cache: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "program.py")
            file.write_text(text)
            whole([sys.executable, str(file)], **more)(cache)

    return run


@functools.cache
def wheel_with_compiled_code() -> str:
    """The folder into which such a wheel is installed, beside what is installed anyway."""
    built = tempfile.mkdtemp(prefix="gpunetio-wheel-")
    atexit.register(shutil.rmtree, built)
    folder = str(Path(built, "installed"))
    with_code = os.environ | {"GPUNETIO_PREBUILT": "1", "GPUNETIO_QUIET": "1"}
    commands = (
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", built],
        [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", folder, "--find-links", built,
         "gpunetio"],
    )
    for command in commands:
        subprocess.run(command, env=with_code, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def from_wheel(text: str) -> Callable[[str], None]:
    """A program that uses the package of that wheel."""
    return lambda cache: program(text, PYTHONPATH=wheel_with_compiled_code())(cache)


def import_alone(cache: str) -> None:
    """Import what each command needs, without us: the floor of a warm start."""
    whole([sys.executable, "-c", "import numpy, llvmlite.binding, click, rich.table"])(cache)


OPEN = program("from gpunetio import verbs\nverbs.open('soft0').close()\n")
DEVINFO = whole([*GPUNETIO, "run", "--", "ibv_devinfo"])

if README is None:
    raise SystemExit("README.md has no first kernel")
STARTS = (
    Start("the imports alone", 0.5, import_alone),
    Start("import gpunetio", 0.7, whole([sys.executable, "-c", "import gpunetio"])),
    Start("a NIC opens and closes, warm", 1, OPEN, before=OPEN),
    Start("put_bw --loopback to its first row, warm", 1.5, first_row(PUT_BW), before=first_row(PUT_BW)),
    Start("put_bw --loopback to its first row, cold", 30, first_row(PUT_BW)),
    Start("gpunetio warm, cold", 40, whole([*GPUNETIO, "warm"])),
    Start("README's first kernel and its NIC, cold", 30, program(README[1])),
    Start(
        "README's first kernel and its NIC, wheel with compiled code", 3, from_wheel(README[1]),
        before=lambda cache: wheel_with_compiled_code() and None,
    ),
    Start("a kernel of one's own, cold", 4, program(FOR_THE_HOST)),
    Start("a kernel of one's own, device library compiled", 1, program(FOR_THE_HOST), before=program(FOR_THE_HOST)),
)
# Programs of libibverbs, where the system has one.
PROGRAMS = (
    Start("gpunetio run -- ibv_devinfo, warm", 1.5, DEVINFO, before=DEVINFO),
) if shutil.which("ibv_devinfo") else ()
CUDA_STARTS = (Start("a kernel of one's own for a GPU, to PTX", 4, program(FOR_A_GPU)),)


@dataclass(frozen=True)
class Engine:
    """The software NIC's engine as a kernel for a GPU, which need not be there. The goals are for ptxas."""

    name: str
    kernel: str
    goal: float  # CPU seconds
    goal_gb: float


ENGINES = (
    Engine("the NIC's engine for sm_90, without wires", "engine_inside", 18, 0.7),
    Engine("the NIC's engine for sm_90, with wires", "engine", 90, 3),
)


def compiled(engine: Engine) -> dict[str, object]:
    """Compile and assemble it in a process of its own, which says what that took: CPU seconds, memory, registers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(CUDA_KERNELS), folder, "9", "0", engine.kernel]
        took = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"start": engine.name, **took, "goal_ptxas_s": engine.goal, "goal_gb": engine.goal_gb}


def measured(start: Start, rounds: int) -> dict[str, object]:
    """Start it `rounds` times, each with a cache of its own."""
    walls, cpus = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            if start.before:
                start.before(cache)
            wall, cpu = time.perf_counter(), cpu_of_children()
            start.run(cache)
            walls.append(time.perf_counter() - wall)
            cpus.append(cpu_of_children() - cpu)
    return {
        "start": start.name, "median_s": statistics.median(walls), "best_s": min(walls),
        "cpu_s": statistics.median(cpus), "goal_s": start.goal, "rounds": rounds,
    }


def cpu_of_children() -> float:
    """CPU seconds of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="starts of each kind")
    parser.add_argument("--match", default="", help="only those whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    has_cuda = importlib.util.find_spec("cuda") is not None
    starts = STARTS + PROGRAMS + CUDA_STARTS * has_cuda
    results = [measured(start, args.rounds) for start in starts if args.match in start.name]
    engines = [compiled(engine) for engine in ENGINES * has_cuda if args.match in engine.name]
    if args.json:
        print(json.dumps(results + engines, indent=2))
        return
    if results:
        table = Table("start", "median", "best", "CPU", "goal")
        for r in results:
            table.add_row(str(r["start"]), *(f"{r[key]:.2f} s" for key in ("median_s", "best_s", "cpu_s", "goal_s")))
        Console().print(table)
    if engines:
        table = Table("for a GPU, CPU time", "compiler", "ptxas", "goal", "peak", "goal", "registers", "stack")
        for r in engines:
            seconds = (f"{r[key]:.1f} s" for key in ("compiler_s", "ptxas_s", "goal_ptxas_s"))
            memory = (f"{r[key]:.2f} GB" for key in ("peak_gb", "goal_gb"))
            table.add_row(str(r["start"]), *seconds, *memory, str(r["registers"]), f"{r['stack']} B")
        Console().print(table)
    if not has_cuda:
        print("Nothing was compiled for a GPU: gpunetio[cuda] is not installed.")


if __name__ == "__main__":
    main()
