"""`@device_function`: nopython, GIL-free, inlined, cached, and compiled again for CUDA by whatever kernel calls it."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types
from numba.core.dispatcher import Dispatcher

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def _imported_by(path: Path) -> tuple[Path, ...]:
    """The package's modules that a module names in relative imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            candidates = [base.with_suffix(".py"), base / "__init__.py", *(base / f"{a.name}.py" for a in node.names)]
            found += [candidate for candidate in candidates if candidate.is_file()]
    return tuple(found)


@functools.cache
def sources_of(path: Path) -> tuple[Path, ...]:
    """A module and all modules of the package that it imports, and those import, …: all that its code may contain."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += _imported_by(module)
    return tuple(sorted(seen))


@functools.cache
def stamp_of(path: Path) -> str:
    """A hash of everything that the compiled functions of a module may contain.

    Numba's cache looks only at the file of the function itself, so that editing a callee would leave stale code
    running; this stamp covers the callees.
    """
    digest = hashlib.sha256(f"numba {numba.__version__}, llvmlite {llvmlite.__version__}".encode())
    for source in (Path(__file__), *sources_of(path)):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _stamp(fn: Callable[..., Any]) -> str:
    """The stamp of the function's module, of the device library, which programs import whole, and of its callees."""
    file = Path(inspect.getfile(fn))
    if _PACKAGE in file.parents:
        return stamp_of(file)
    digest = hashlib.sha256(stamp_of(_PACKAGE / "device" / "__init__.py").encode())
    if file.is_file():
        digest.update(file.read_bytes())
    for name in fn.__code__.co_names:
        callee = fn.__globals__.get(name)
        if isinstance(callee, Dispatcher):
            digest.update(getattr(callee, "stamp", "").encode())
    return digest.hexdigest()


def device_function(fn: Callable[..., Any]) -> Any:
    """Make `fn` callable from kernels and from the software NIC, on CPU and GPU (`__device__ __forceinline__`).

    Arguments and results are int64. Mode arguments with defaults fold away when they are constants.
    """
    return _compiled(fn, forceinline=True)


def engine_function(fn: Callable[..., Any]) -> Any:
    """Like `device_function`, but left to LLVM to inline or not: for big functions called from several places."""
    return _compiled(fn, forceinline=False)


def _compiled(fn: Callable[..., Any], forceinline: bool) -> Any:
    # Functions typed at a prompt or made by `exec` have no file to cache beside.
    cacheable = Path(inspect.getfile(fn)).is_file()
    compiled: Any = njit(
        nogil=True, error_model="numpy", forceinline=forceinline, cache=cacheable, no_cfunc_wrapper=True
    )(fn)  # type: ignore[call-overload]
    compiled.stamp = _stamp(fn)
    if cacheable:
        compiled._cache._cache_file._source_stamp = compiled.stamp
    resolve = compiled.get_call_template

    def resolve_once_for_all_constants(args, kws):
        """Numba would compile a callee anew for each literal argument; inlining folds them just as well."""
        return resolve([types.unliteral(a) for a in args], {name: types.unliteral(a) for name, a in kws.items()})

    compiled.get_call_template = resolve_once_for_all_constants
    return compiled
