"""`@device_function`: nopython, GIL-free, inlined and cached. CUDA kernels that call the function compile it again."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types
from numba.core import event
from numba.core.compiler import Compiler
from numba.core.dispatcher import Dispatcher

from ..errors import InvalidValueError
from .cache import cache_of
from .progress import Progress
from .units import PlainCode, UnitCompiler

_PACKAGE = Path(__file__).parents[1]
event.register("numba:compile", Progress())


# A regular expression: parsing the package with `ast` would take a third of a program's start-up time.
_IMPORT = re.compile(r"^[ \t]*from (\.+)([\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@functools.cache
def _read(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return the hash of a module, and the package's modules that its relative imports name."""
    source = path.read_bytes()
    found = []
    for dots, module, names in _IMPORT.findall(source.decode()):
        base = path.parents[len(dots) - 1].joinpath(*module.split("."))
        candidates = [base.with_suffix(".py"), base / "__init__.py"]
        candidates += [base / f"{name}.py" for name in re.findall(r"\w+", names)]
        found += [candidate for candidate in candidates if candidate.is_file()]
    return hashlib.sha256(source).digest(), tuple(found)


@functools.cache
def sources_of(path: Path) -> tuple[Path, ...]:
    """Return a module and all modules of the package that it imports, directly or not: its code may contain theirs."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += _read(module)[1]
    return tuple(sorted(seen))


@functools.cache
def stamp_of(path: Path) -> str:
    """Return a hash of everything that the compiled functions of a module may contain.

    Numba's cache checks only the function's own file, so after an edit of a callee stale code would run. This stamp
    covers the callees.
    """
    digest = hashlib.sha256(f"numba {numba.__version__}, llvmlite {llvmlite.__version__}".encode())
    for source in (Path(__file__), *sources_of(path)):
        digest.update(_read(source)[0])
    return digest.hexdigest()


def _stamp(fn: Callable[..., Any]) -> str:
    """Return the stamp of a function.

    Outside this package, it covers the function's file, its callees, and the whole device library, which programs
    import.
    """
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


_INTEGERS = (types.Integer, types.Boolean, types.IntEnumMember, types.Omitted)


def need_integers(function: str, names: Sequence[str], found: Sequence[types.Type]) -> None:
    """Raise InvalidValueError unless all arguments are integers. This runs while the caller is compiled.

    Numba would pass an array as a pointer to its descriptor, not as an address, and would truncate a float.
    """
    for name, kind in zip(names, found, strict=False):
        if not isinstance(types.unliteral(kind), _INTEGERS):
            array = isinstance(kind, types.Array)
            what = f"an array of {kind.dtype}" if array else "None" if kind == types.none else f"of type {kind}"
            cure = "register it with pd.register(), and pass mr.address to the kernel" if array else "pass an integer"
            raise InvalidValueError(f"{function}() takes integers only, and {name} is {what}: {cure}")


def device_function(fn: Callable[..., Any]) -> Any:
    """Make `fn` callable from kernels and from the software NIC, on CPU and GPU (`__device__ __forceinline__`).

    Arguments and results are int64. Mode arguments with defaults fold away when they are constants.
    """
    return _compiled(fn, forceinline=True)


def engine_function(fn: Callable[..., Any]) -> Any:
    """Compile like `device_function`, but let LLVM decide about inlining: for big functions with several callers."""
    return _compiled(fn, forceinline=False)


def _compiled(fn: Callable[..., Any], forceinline: bool) -> Any:
    # Functions from a prompt or from `exec` have no file, so there is no place for their cache.
    file = Path(inspect.getfile(fn))
    cacheable = file.is_file()
    compiled: Any = njit(
        nogil=True, error_model="numpy", forceinline=forceinline, no_cfunc_wrapper=True,
        pipeline_class=PlainCode if _PACKAGE in file.parents else Compiler,
    )(fn)  # type: ignore[call-overload]  # fmt: skip
    compiled.stamp = _stamp(fn)
    if cacheable and (cache := cache_of(fn, compiled.stamp)):
        compiled._cache = cache
    units = compiled.units = compiled._compiler = UnitCompiler(compiled, compiled.stamp)
    public = not {_PACKAGE / "device", _PACKAGE / "jit"}.isdisjoint(file.parents)
    names = fn.__code__.co_varnames

    def resolve_once_for_all_constants(args, kws):
        """Drop literal types: Numba would compile a callee once per literal. Inlining folds them just as well."""
        if public:
            need_integers(fn.__name__, (*names[: len(args)], *kws), (*args, *kws.values()))
        return units.call_template(
            tuple(types.unliteral(a) for a in args), {name: types.unliteral(a) for name, a in kws.items()}
        )

    compiled.get_call_template = resolve_once_for_all_constants
    compiled.get_overload = lambda args: units.part(tuple(args)).library
    return compiled
