"""libdevice: CUDA's library of mathematical functions, as LLVM bitcode. It comes with CUDA's compilers."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm

from .values import CompileError

PLACE = "GPUNETIO_LIBDEVICE"  # the path of libdevice.10.bc, if it is not found otherwise
_CURE = f"pip install 'gpunetio[cuda-compilers]', or name libdevice.10.bc in {PLACE}"


def libdevice() -> Any:
    """Return libdevice as an LLVM module. CompileError if it is not installed."""
    return llvm.parse_bitcode(bitcode())


def bitcode() -> bytes:
    """Return the bitcode of libdevice. CompileError if it is not installed."""
    if given := os.environ.get(PLACE):
        path: str | None = given
    else:
        path = _found()
    if path is None or not Path(path).is_file():
        raise CompileError(f"functions of math need libdevice on CUDA, which is not here: {_CURE}")
    return Path(path).read_bytes()


def _found() -> str | None:
    """Return the path of libdevice: in a wheel, or in a CUDA toolkit."""
    with contextlib.suppress(Exception):  # no such package, or its own class of exception if there is no libdevice
        from cuda.pathfinder import find_bitcode_lib  # type: ignore[attr-defined]

        return find_bitcode_lib("device")
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and str(Path(nvcc).parents[1])]
    paths = [Path(toolkit, "nvvm/libdevice/libdevice.10.bc") for toolkit in (*toolkits, "/usr/local/cuda") if toolkit]
    return next((str(path) for path in paths if path.is_file()), None)
