"""Questions to the local machine that no file answers. Answers are JSON values; `host.Host.ask` reports errors."""

from __future__ import annotations

import ctypes
import grp
import itertools
import json
import os
import pwd
import resource
import stat
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from ...errors import NotPermittedError
from ...kept import DamagedError, unsealed
from ...trusted import check_trusted, load_library
from . import process
from .cuda_attributes import file_of

_DEADLINE = 30.0  # seconds for libcuda, which first initialises each GPU without persistence mode
_OPENS_WITHIN = 5.0  # seconds for a device node
_READ_WRITE = os.O_RDWR | os.O_CLOEXEC
# Prints errno, 0 for none.
_OPENING = """
import os, sys
try:
    os.open(sys.argv[1], int(sys.argv[2]))
except OSError as error:
    print(error.errno)
else:
    print(0)
"""
# The first use compiles the software NIC's engine and kernels for threads: 90 s on two busy cores.
_COMPILING = ("probe-open", "probe-loopback-gpu")
_FIRST_PROCESSOR = 40  # lines of /proc/cpuinfo


def environment(name: str) -> str:
    """Return an environment variable; "" if it is not set."""
    return os.environ.get(name, "")


def system() -> dict[str, str]:
    """Return `uname` and Python's version."""
    name = os.uname()
    return {
        "sysname": name.sysname, "release": name.release, "machine": name.machine, "nodename": name.nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def user() -> dict[str, int]:
    """Return the effective ids. 0 is root."""
    return {"uid": os.geteuid(), "gid": os.getegid()}


def limit(name: str) -> list[int]:
    """Return this process's soft and hard limit of a resource such as MEMLOCK; −1 is unlimited."""
    return list(resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def affinity() -> list[int]:
    """Return the processors that this process may use, by number."""
    return sorted(os.sched_getaffinity(0))


def shared_memory() -> bool:
    """Return True if this process may create a memfd and an eventfd for the software NIC; else raise OSError."""
    os.close(os.memfd_create("gpunetio", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.close(os.eventfd(0, os.EFD_CLOEXEC))
    return True


def compiler_cache() -> dict[str, int | str]:
    """Return the free bytes and the number of damaged files in the folder of gpunetio's compiled code.

    If the package came from a wheel with compiled code, `baseline` names the processors that this code is for, and
    `why_not` says why it is not used. Raises PermissionError if nothing can be kept in the folder. The answer leaves
    out the folder's path, which is private.
    """
    from ...jit import cache, prebuilt

    folder = cache.folder()
    if folder is None:
        raise PermissionError("this user has no home folder, and GPUNETIO_CACHE_DIR names no other")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())  # the rest is made when needed
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError("the folder of compiled code cannot be written to")
    try:
        check_trusted(there)
    except NotPermittedError:
        raise PermissionError("others can write to the folder of compiled code, or to one above it") from None
    baseline, why_not = prebuilt.report()
    compiled = (path for ending in ("o", "cubin", "ptx") for path in folder.glob(f"[!.]*.{ending}"))
    return {
        "free": filesystem(str(there))["free"], "damaged": sum(map(_damaged, compiled)),
        "baseline": baseline, "why_not": why_not,
    }


def _damaged(path: Path) -> bool:
    """Return whether a cache file is not as it was written."""
    try:
        unsealed(path.read_bytes())
    except DamagedError:
        return True
    return False


def hypervisor() -> bool | None:
    """Return whether the processor reports a hypervisor; None if it has no such flag (Arm).

    It reads only the first processor's lines, because the file is long.
    """
    with open("/proc/cpuinfo") as lines:
        flags = [line.split() for line in itertools.islice(lines, _FIRST_PROCESSOR) if line.startswith("flags")]
    return "hypervisor" in flags[0] if flags else None


def container() -> str:
    """Return the kind of container from the environment of process 1; "" if there is none.

    Only root may read this environment. The answer leaves out its other variables, which are private.
    """
    variables = Path("/proc/1/environ").read_bytes().split(b"\0")
    return next((one.decode(errors="replace")[10:] for one in variables if one.startswith(b"container=")), "")


def root_filesystem() -> str:
    """Return the type of the file system at "/", such as "ext4". The answer leaves out other mounts."""
    kind = ""
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount, _, source = line.partition(" - ")  # proc_pid_mountinfo(5): "36 35 98:0 / / rw … - ext4 /dev/sda1 rw"
        if mount.split()[4:5] == ["/"]:
            kind = source.split()[0]  # the last of several mounts is on top
    return kind


def opens(path: str) -> bool:
    """Return True if this user may open a device node for reading and writing; else raise OSError.

    A separate process tries it, because the driver of a dead device may never return.
    """
    os.stat(path)
    ended = process.run([sys.executable, "-I", "-S", "-c", _OPENING, path, str(_READ_WRITE)], _OPENS_WITHIN)
    if ended.status is None:
        raise TimeoutError(f"no answer within {_OPENS_WITHIN:g} s")
    if not ended.out.strip().isdigit():
        raise OSError(f"the process that tried it ended with status {ended.status}")
    if number := int(ended.out):
        raise OSError(number, os.strerror(number), path)
    return True


def filesystem(path: str) -> dict[str, int]:
    """Return the total and free bytes of a path's file system."""
    found = os.statvfs(path)
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def package(name: str) -> str:
    """Return the version of an installed Python distribution."""
    return metadata.version(name)


def symbols(library: str, *names: str) -> list[str]:
    """Return those of the symbols that a shared library has."""
    loaded = ctypes.CDLL(library)
    return [name for name in names if hasattr(loaded, name)]


def kernel_symbols(*names: str) -> list[str]:
    """Return those of the symbols that the kernel and its loaded modules have (proc_kallsyms(5))."""
    with open("/proc/kallsyms", errors="replace") as lines:
        there = {line.split(maxsplit=3)[2] for line in lines}
    return [name for name in names if name in there]


def permissions(path: str) -> dict[str, str]:
    """Return a file's owner, group and mode, such as "660"."""
    found = os.stat(path)
    try:
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid).gr_name
    except KeyError:  # ids without names, as in containers
        owner, group = str(found.st_uid), str(found.st_gid)
    return {"owner": owner, "group": group, "mode": f"{stat.S_IMODE(found.st_mode):03o}"}


def verbs_library(name: str) -> dict[str, object]:
    """Return the file of libibverbs or libmlx5, and the functions that gpunetio calls but the library lacks."""
    from ...providers.mlx5.libraries import IBVERBS, MLX5

    functions, soname, variable = {
        "libibverbs": (IBVERBS, "libibverbs.so.1", "GPUNETIO_LIBIBVERBS"),
        "libmlx5": (MLX5, "libmlx5.so.1", "GPUNETIO_LIBMLX5"),
    }[name]
    loaded = load_library(os.environ.get(variable) or soname)
    lacks = [function for function in functions if not hasattr(loaded, function)]
    with open("/proc/self/maps") as maps:
        file = file_of(name, maps)
    return {
        "file": file,
        "lacks": [function for function in lacks if not functions[function].optional],
        "lacks_optional": [function for function in lacks if functions[function].optional],
    }


def cuda() -> object:
    """Return libcuda's version and devices. A separate process asks libcuda, because a driver may hang."""
    program = Path(__file__).with_name("cuda_attributes.py")
    ended = process.run([sys.executable, "-I", str(program)], _DEADLINE)
    if ended.status is None:
        raise TimeoutError(f"libcuda did not answer within {_DEADLINE:g} s")
    if ended.status != 0:
        raise OSError(f"libcuda: exit status {ended.status}: {ended.last_words or 'no message'}")
    return json.loads(ended.out)


# -P: do not import from the current folder. The folder of this package is searched last.
_PROBE = "import sys; sys.path.append(sys.argv.pop(1)); from gpunetio.doctor.probes.process import main; main()"


def probe(device: str, gpu: str) -> dict[str, object]:
    """Probe a device with a GPU in a separate process, and return the answer of `probe_watch.watch`."""
    from ..probes.watch import watch

    return watch([sys.executable, "-P", "-c", _PROBE, str(Path(__file__).parents[3]), device, gpu], _seconds_to_probe)


def _seconds_to_probe(step: str) -> float:
    return 180.0 if step in _COMPILING else 30.0


_ASKED = (
    environment, system, user, limit, processors, affinity, shared_memory, compiler_cache, hypervisor,
    container, root_filesystem, opens, permissions, filesystem, package, symbols, kernel_symbols, verbs_library, cuda,
    probe,
)
QUESTIONS: dict[str, Callable[..., object]] = {one.__name__: one for one in _ASKED}
