"""Kernels of the package as cubins: compiled by a process of their own, and kept on disk.

Numba compiles a kernel in the process that launches it. A large one takes most of a minute and a gigabyte, so a process
of its own compiles it once. The file lies where Numba keeps what it compiles for the host, or in the wheel.

    python -m gpunetio.jit.cubin MODULE KERNEL MAJOR MINOR FILE [OPTION…]      compile a kernel of a module to a file
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import DriverError
from ..kept import DamagedError, read_kept, turn_to_make, write_kept
from ..log import tell_who_waits
from . import prebuilt
from .cache import cache_of, owner_beside
from .frozen import stamp

logger: logging.Logger = logging.getLogger("gpunetio.compile")

SECONDS = 600  # after which a compiler that hangs is given up
_ENTRY = re.compile(r"\.entry ([\w$]+)")


def cubin(kernel: Callable[..., None], capability: tuple[int, int], options: Sequence[str] = ()) -> bytes:
    """Return a kernel, a plain function of a module of the package, as a cubin for GPUs of a compute capability.

    `options` are nvJitLink's. DriverError if it does not compile.
    """
    name, source = _name(kernel, capability, options), inspect.getfile(kernel)
    cache = cache_of(kernel, stamp(kernel))
    folder = Path(cache.cache_path) if cache else None
    for place in filter(None, (folder, prebuilt.folder_of(source))):
        if (found := _kept(place / name, source)) is not None:
            return found
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(turn_to_make(folder / name))
            if (found := _kept(folder / name, source)) is not None:  # another process has compiled it meanwhile
                return found
        target = "sm_" + "".join(map(str, capability))
        tell_who_waits(f"compiling {kernel.__name__} for {target}, which takes about a minute; once for this machine")
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpunetio-")), name)
        compile_to(file, kernel, capability, options)
        made = file.read_bytes()
        if folder:
            _keep(folder / name, made, source)
    return made


def _kept(file: Path, source: str) -> bytes | None:
    """Return the contents of a file that is there, trusted and whole."""
    try:
        return read_kept(file, owner_beside(source, file.parent))
    except FileNotFoundError:
        return None
    except (OSError, DamagedError) as error:
        logger.warning("%s is not used (%s): it is compiled again", file, error)
        return None


def compile_to(
    file: Path, kernel: Callable[..., None], capability: tuple[int, int], options: Sequence[str] = ()
) -> None:
    """Compile a kernel to a file, in another process."""
    command = [sys.executable, "-m", __name__, kernel.__module__, kernel.__name__, *map(str, capability), str(file)]
    try:
        ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DriverError(f"{kernel.__name__} was not compiled for CUDA within {SECONDS} s") from None
    if ran.returncode != 0:
        raise DriverError(f"{kernel.__name__} does not compile for CUDA: {ran.stderr.strip()[-1000:]}")


def _name(kernel: Callable[..., None], capability: tuple[int, int], options: Sequence[str]) -> str:
    """Return the name of the file, in which is whatever decides about its contents but the compiler for CUDA."""
    of = hashlib.sha256("\n".join([stamp(kernel), *options]).encode()).hexdigest()[:16]
    return f"{kernel.__name__}.sm_{capability[0]}{capability[1]}.{of}.cubin"


def _keep(file: Path, made: bytes, source: str) -> None:
    """Write a file if that is possible, and delete those that it replaces."""
    *described, _, _ = file.name.split(".")
    try:
        for old in file.parent.glob(f"{'.'.join(described)}.*.cubin"):
            old.unlink(missing_ok=True)
        write_kept(file, made, owner_beside(source, file.parent))
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): every process compiles it again", file, error.strerror or error
        )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Compile a kernel of integers, as the command line says."""
    from cuda.bindings import nvjitlink  # type: ignore[attr-defined]
    from numba import types
    from numba.cuda.compiler import compile as compile_cuda

    from .launch import offline

    module, name, major, minor, file, *options = arguments
    kernel = getattr(importlib.import_module(module), name)
    capability = int(major), int(minor)
    parameters = (types.int64,) * len(inspect.signature(kernel).parameters)
    with offline(capability):
        text, _ = compile_cuda(
            kernel, types.void(*parameters), device=False, cc=capability, output="ptx", abi="numba"
        )
    (mangled,) = _ENTRY.findall(text)
    text = text.replace(mangled, name)
    linker = nvjitlink.create(1 + len(options), [f"-arch=sm_{major}{minor}", *options])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text.encode(), len(text.encode()), name)
        nvjitlink.complete(linker)
        made = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, made)
    finally:
        nvjitlink.destroy(linker)
    Path(file).write_bytes(made)


if __name__ == "__main__":
    main(sys.argv[1:])
