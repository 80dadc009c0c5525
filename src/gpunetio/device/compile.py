"""`@device_function`: nopython, GIL-free, inlined, cached, and compiled again for CUDA by whatever kernel calls it."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit
from numba.core.dispatcher import Dispatcher

_PACKAGE = Path(__file__).parents[1]
_COMPILED_PARTS = ("formats", "device", "nic", "fabric")  # the folders that hold nopython code


@functools.cache
def package_stamp() -> str:
    """A hash of everything that compiled code may contain.

    Numba's cache looks only at the file of the function itself, so that editing a callee would leave stale code
    running; this stamp covers the callees.
    """
    digest = hashlib.sha256(f"numba {numba.__version__}, llvmlite {llvmlite.__version__}".encode())
    for part in _COMPILED_PARTS:
        for path in sorted((_PACKAGE / part).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _stamp(fn: Callable[..., Any]) -> str:
    """The package's stamp, the function's own file, and the stamps of the device functions that it names."""
    digest = hashlib.sha256(package_stamp().encode())
    file = inspect.getfile(fn)
    if Path(file).is_file():
        digest.update(Path(file).read_bytes())
    for name in fn.__code__.co_names:
        callee = fn.__globals__.get(name)
        if isinstance(callee, Dispatcher) and hasattr(callee, "stamp"):
            digest.update(callee.stamp.encode())
    return digest.hexdigest()


def device_function(fn: Callable[..., Any]) -> Any:
    """Make `fn` callable from kernels and from the software NIC, on CPU and GPU (`__device__ __forceinline__`).

    Arguments and results are int64. Mode arguments with defaults fold away when they are constants.
    """
    compiled: Any = njit(nogil=True, error_model="numpy", forceinline=True, cache=_cacheable(fn))(fn)
    compiled.stamp = _stamp(fn)
    if _cacheable(fn):
        compiled._cache._cache_file._source_stamp = compiled.stamp
    return compiled


def engine_function(fn: Callable[..., Any]) -> Any:
    """Like `device_function`, but left to LLVM to inline or not: for big functions called from several places."""
    compiled: Any = njit(nogil=True, error_model="numpy", cache=_cacheable(fn))(fn)
    compiled.stamp = _stamp(fn)
    if _cacheable(fn):
        compiled._cache._cache_file._source_stamp = compiled.stamp
    return compiled


def _cacheable(fn: Callable[..., Any]) -> bool:
    """Functions typed at a prompt or made by `exec` have no file to cache beside."""
    return Path(inspect.getfile(fn)).is_file()
