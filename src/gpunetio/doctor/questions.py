"""What the doctor asks this machine that is in no file. Answers are what JSON has; `host.Host.ask` tells of errors."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

_DEADLINE = 5.0  # seconds
# The engine of a software NIC, and kernels for threads, are compiled at their first use: 90 s on two busy cores.
_COMPILING = ("probe-open", "probe-loopback-gpu")


def environment(name: str) -> str:
    """A variable of the environment; "" when it is not set."""
    return os.environ.get(name, "")


def system() -> dict[str, str]:
    """`uname`, and which Python this is."""
    name = os.uname()
    return {
        "sysname": name.sysname, "release": name.release, "machine": name.machine, "nodename": name.nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
    }  # fmt: skip


def user() -> dict[str, int]:
    """Effective ids: 0 is root."""
    return {"uid": os.geteuid(), "gid": os.getegid()}


def limit(name: str) -> list[int]:
    """Soft and hard limit of this process, as MEMLOCK; −1 for unlimited."""
    return list(resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def opens(path: str) -> bool:
    """Whether this user may open a device node for reading and writing; raises what the system says."""
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    return True


def filesystem(path: str) -> dict[str, int]:
    """Bytes of the file system of a path."""
    found = os.statvfs(path)
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def package(name: str) -> str:
    """Version of an installed Python distribution."""
    return metadata.version(name)


def symbols(library: str, *names: str) -> list[str]:
    """Which of these symbols a shared library has."""
    loaded = ctypes.CDLL(library)
    return [name for name in names if hasattr(loaded, name)]


def cuda() -> Any:
    """What libcuda says of itself and its devices; from a process of its own, as a driver may hang."""
    program = Path(__file__).with_name("cuda_attributes.py")
    command = [sys.executable, "-I", str(program)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"libcuda did not answer within {_DEADLINE:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OSError(f"libcuda: exit status {done.returncode}: {said[-1]}")
    return json.loads(done.stdout)


def probe(device: str, gpu: str) -> dict[str, Any]:
    """What `probe_process` finds when it tries a device with a GPU: see `probe_watch.watch`."""
    from .probe_watch import watch

    package = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package.parent), environment("PYTHONPATH"))))
    command = [sys.executable, "-m", "gpunetio.doctor.probe_process", device, gpu]
    return watch(command, _seconds_to_probe, os.environ | {"PYTHONPATH": path})


def _seconds_to_probe(step: str) -> float:
    return 180.0 if step in _COMPILING else 30.0


QUESTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (environment, system, user, limit, processors, opens, filesystem, package, symbols, cuda, probe)
}
