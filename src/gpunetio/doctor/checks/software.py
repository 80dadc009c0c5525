"""Check the software: Python, packages, and the needs of the software NIC."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..finding import EVERY_USE, HARDWARE, Finding, Use, check, evidence, fail, ok, skip, warn
from ..machine.devices import Machine
from ..machine.host import Reading, Trouble

AREA = "Software"
PYPROJECT = "pyproject.toml"
_SOFTWARE = frozenset({Use.SOFTWARE})
_Version = tuple[int, int]

OLDEST_PYTHON = (3, 11)
# Lower and upper bounds, as in pyproject.toml.
NEEDED: dict[str, tuple[_Version, _Version | None]] = {
    "numpy": ((1, 26), None),
    "llvmlite": ((0, 45), None),
}
CUDA_STACK: dict[str, tuple[_Version, _Version | None]] = {
    "cuda-bindings": ((13, 0), (14, 0)),
}


def _version(text: str) -> _Version | None:
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(found[1]), int(found[2])) if found else None


def _fits(version: _Version, bounds: tuple[_Version, _Version | None]) -> bool:
    least, below = bounds
    return least <= version and (below is None or version < below)


def _range(bounds: tuple[_Version, _Version | None]) -> str:
    least, below = (one and ".".join(map(str, one)) for one in bounds)
    return f"≥ {least}" + (f", < {below}" if below else "")


@check(
    "python", "Python",
    why="gpunetio uses features of Python 3.11.",
    cure="install Python 3.11 or later, and create the environment with it: python3.11 -m venv .venv",
    source=f"{PYPROJECT}: requires-python", uses=EVERY_USE,
)
def python(machine: Machine) -> Iterator[Finding]:
    """Check Python's version."""
    reading = machine.host.ask("system")
    told = str(reading.value.get("python", "")) if isinstance(reading.value, dict) else ""
    version = _version(told)
    if version is None:
        yield skip("Python's version is unknown", reading)
    elif version >= OLDEST_PYTHON:
        yield ok(f"Python {told[:40]}", evidence(reading, told))
    else:
        yield fail(f"Python {told[:40]} is older than 3.11", evidence(reading, told))


@check(
    "packages", "Python packages",
    why="LLVM, which llvmlite brings, compiles kernels and the software NIC. NumPy lays out their data structures.",
    cure="pip install 'numpy>=1.26' 'llvmlite>=0.45'",
    source=f"{PYPROJECT}: dependencies", uses=EVERY_USE,
)
def packages(machine: Machine) -> Iterator[Finding]:
    """Check NumPy and llvmlite."""
    for name, bounds in NEEDED.items():
        reading = machine.host.ask("package", name)
        version = _version(reading.text)
        if version and _fits(version, bounds):
            yield ok(f"{name} {reading.text[:40]}", reading)
        elif version:
            yield warn(f"{name} {reading.text[:40]}: {_range(bounds)} is needed", reading)
        elif _missing(reading):
            yield fail(f"{name} is not installed", reading)
        else:
            yield skip(f"cannot find out whether {name} is installed", reading)


def _missing(reading: Reading) -> bool:
    """Return whether the package is certainly not installed."""
    return reading.trouble in (Trouble.ABSENT, Trouble.FAILED)


@check(
    "cuda-stack", "CUDA for Python",
    why="cuda-bindings loads kernels into a GPU and launches them. Without it, kernels run on the CPU.",
    cure="pip install 'gpunetio[cuda]'",
    source=f"{PYPROJECT}: optional-dependencies", uses=EVERY_USE,
)
def cuda_stack(machine: Machine) -> Iterator[Finding]:
    """Check cuda-bindings on a machine with a GPU."""
    if not machine.all_gpus:
        yield skip("no GPU: kernels run on the CPU")
        return
    readings = {name: machine.host.ask("package", name) for name in CUDA_STACK}
    missing = [name for name, reading in readings.items() if _missing(reading)]
    versions = {name: version for name, reading in readings.items() if (version := _version(reading.text))}
    wrong = [name for name, version in versions.items() if not _fits(version, CUDA_STACK[name])]
    if missing:
        lacks = f"not installed: {', '.join(missing)}"
        yield fail(f"{lacks}; kernels cannot reach a GPU", *readings.values(), uses=HARDWARE)
        yield warn(f"{lacks}; kernels run on the CPU", *readings.values(), uses=_SOFTWARE)
    elif wrong:
        needed = ", ".join(f"{name} {_range(CUDA_STACK[name])}" for name in wrong)
        yield warn(f"needed: {needed}", *readings.values())
    elif len(versions) < len(CUDA_STACK):
        yield skip("cannot find out what is installed", *readings.values())
    else:
        yield ok(", ".join(f"{name} {reading.text[:16]}" for name, reading in readings.items()), *readings.values())


_MIB = 1 << 20
_ROOM = 100 * _MIB  # the NIC and the kernels of all benchmarks take 2 MiB, and edits of programs some more


@check(
    "compiler-cache", "Cache of compiled code",
    why="Compiling the software NIC takes some seconds. With a cache, only the first program waits for it.",
    cure="free some space, or choose a folder on another disk: export GPUNETIO_CACHE_DIR=<folder>",
    source="docs/soft-nic.md: compiling", uses=EVERY_USE,
)
def compiler_cache(machine: Machine) -> Iterator[Finding]:
    """Check that the cache is writable, has space, holds no truncated files, and that the wheel's code is used."""
    reading = machine.host.ask("compiler_cache")
    found = reading.value if isinstance(reading.value, dict) else {}
    free, damaged = found.get("free"), found.get("damaged")
    if reading.trouble is Trouble.DENIED:
        cure = "choose a folder that you can write to: export GPUNETIO_CACHE_DIR=<folder>"
        yield warn("compiled code cannot be cached: every process compiles again", reading, cure=cure)
    elif not isinstance(free, int) or not isinstance(damaged, int):
        yield skip("cannot find out whether compiled code is cached", reading)
    elif free < _ROOM:
        yield warn(f"only {free // _MIB} MiB are free for compiled code", evidence(reading, f"{free} bytes free"))
    elif damaged:
        cure = 'delete them: find "${GPUNETIO_CACHE_DIR:-$HOME/.cache/gpunetio/code}" -type f -delete'
        read = evidence(reading, f"{damaged} files are truncated")
        yield warn(f"{damaged} files of compiled code are damaged and will be compiled again", read, cure=cure)
    elif why_not := found.get("why_not"):
        cure = "run gpunetio warm once, or install a wheel that was built for this machine and its packages"
        read = evidence(reading, f"{found.get('baseline')}: {why_not}")
        yield warn(f"the wheel's compiled code is not used: {why_not}", read, cure=cure)
    elif baseline := found.get("baseline"):
        read = evidence(reading, f"{free} bytes free")
        yield ok(f"compiled code is cached; the wheel has some for {baseline}", read)
    else:
        yield ok("compiled code is cached", evidence(reading, f"{free} bytes free"))


_MOST = 1 << 16  # processors; no machine has more


@check(
    "processors", "Processors",
    why="The software NIC's engine and the CPU proxy are threads that busy-wait while kernels run.",
    cure="allow two processors or more: taskset -c <list> <command>; in a container: docker run --cpus=2",
    source="sched_getaffinity(2)", uses=EVERY_USE,
)
def processors(machine: Machine) -> Iterator[Finding]:
    """Count the processors that this process may use."""
    reading = machine.host.ask("processors")
    if not isinstance(reading.value, int) or not 0 < reading.value < _MOST:
        yield skip("the number of processors is unknown", reading)
    elif reading.value >= 2:
        yield ok(f"{reading.value} processors", reading)
    else:
        yield warn("one processor, which all threads share", reading)


@check(
    "soft-nic", "Software NIC",
    why="Processes share the software NIC's tables and wires through memfds, and it signals events through eventfds.",
    cure="allow memfd_create(2) and eventfd(2): docker run --security-opt seccomp=unconfined, or a profile with both",
    source="docs/soft-nic.md: Other processes of the host; memfd_create(2), eventfd(2)", uses=_SOFTWARE, essential=True,
)
def soft_nic(machine: Machine) -> Iterator[Finding]:
    """Check that the system is Linux and allows memfd_create(2) and eventfd(2)."""
    system, shares = machine.host.ask("system"), machine.host.ask("shared_memory")
    name = system.value.get("sysname") if isinstance(system.value, dict) else None
    if isinstance(name, str) and name != "Linux":
        yield fail("the software NIC runs on Linux", evidence(system, name), cure="use Linux, or a Linux guest")
    elif shares.value is True:
        yield ok("processes can share memory and events", shares)
    elif shares.trouble in (Trouble.DENIED, Trouble.FAILED):
        yield fail("processes cannot share memory and events", shares)
    else:
        yield skip("cannot find out whether processes can share memory", shares)


_UP = 1  # IFF_UP, netdevice(7)


@check(
    "loopback", "Loopback interface",
    why="Software NICs have the addresses 127.0.0.1 to 127.0.0.8. Programs on one host connect over these.",
    cure="sudo ip link set lo up",
    source="docs/soft-nic.md: the port; netdevice(7)", uses=_SOFTWARE,
)
def loopback(machine: Machine) -> Iterator[Finding]:
    """Check that lo is up. In a new network namespace it is down."""
    reading = machine.host.read("/sys/class/net/lo/flags")
    flags = reading.number
    if flags is None:
        yield skip("cannot find out whether lo is up", reading)
    elif flags & _UP:
        yield ok("lo is up", reading)
    else:
        yield warn("lo is down: processes cannot connect to each other", reading)


CHECKS = (python, packages, cuda_stack, compiler_cache, processors, soft_nic, loopback)
