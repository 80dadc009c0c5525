"""`@device_function`: nopython, GIL-free, inlined and cached. For CUDA it is compiled again (`cuda_functions.py`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numba import njit, types
from numba.core import event

from ..errors import InvalidValueError
from .cache import LazyCache
from .frozen import Watch
from .progress import Progress
from .stamps import PACKAGE, is_ours
from .units import PlainCode, UnitCompiler

event.register("numba:compile", Progress())

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


class DeviceFunction(Protocol):
    """A compiled function. It takes integers and structures, and returns one of these, a tuple of them, or nothing.

    `py_func` is the same function in Python.
    """

    py_func: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # Numba infers the types
        """Call it: from compiled code, or from Python on the host."""
        ...

    def compile(self, signature: tuple[types.Type, ...]) -> object:
        """Compile it for arguments of these types."""
        ...


def device_function(fn: Callable[..., object]) -> DeviceFunction:
    """Make `fn` callable from kernels and from the software NIC, on CPU and GPU (`__device__ __forceinline__`).

    Arguments and results are int64. Mode arguments with defaults fold away when they are constants.
    """
    return _compiled(fn, forceinline=True)


def engine_function(fn: Callable[..., object]) -> DeviceFunction:
    """Compile like `device_function`, for big functions with several callers, which are not inlined into each.

    On the host, LLVM decides. On CUDA the function is called, whatever its size (`cuda_functions.py`).
    """
    return _compiled(fn, forceinline=False)


class _Source(NamedTuple):
    """What matters of a function's file. Functions from a prompt or from `exec` have none."""

    exists: bool
    ours: bool
    public: bool  # what programs call


@functools.cache
def _source(file: str) -> _Source:
    public = not {PACKAGE / "device", PACKAGE / "jit"}.isdisjoint(Path(file).parents)
    return _Source(Path(file).is_file(), is_ours(file), public)


def _compiled(fn: Callable[..., object], forceinline: bool) -> DeviceFunction:
    source = _source(fn.__code__.co_filename)
    plain: dict[str, Any] = {}
    if source.ours:
        # This package's device code has no arrays, so there are no references to count: without looking for them, it
        # is compiled in nine tenths of the time.
        plain = {"pipeline_class": PlainCode, "_nrt": False}
        fn.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]  # Numba asks for it three times
    compiled: Any = njit(
        nogil=True, error_model="numpy", forceinline=forceinline, no_cfunc_wrapper=True, **plain
    )(fn)  # type: ignore[call-overload]  # fmt: skip
    watch = Watch(fn)
    if source.exists:
        cache = compiled._cache = LazyCache(fn, watch)
        compile_in_turn = compiled.compile

        def compile(signature):
            """Compile it, or load what another process has compiled."""
            try:
                return compile_in_turn(signature)
            finally:
                cache.end_turn()

        compiled.compile = compile
    units = compiled.units = compiled._compiler = UnitCompiler(compiled, watch)
    names = fn.__code__.co_varnames

    def types_of_call(args, kws):
        """Check the types of a call, and drop those of literals: Numba would compile a callee once per literal.

        Inlining folds them just as well.
        """
        if source.public:
            need_integers(fn.__name__, (*names[: len(args)], *kws), (*args, *kws.values()))
        return tuple(types.unliteral(a) for a in args), {name: types.unliteral(a) for name, a in kws.items()}

    compiled.types_of_call = types_of_call
    compiled.get_call_template = lambda args, kws: units.call_template(*types_of_call(args, kws))
    compiled.get_overload = lambda args: units.part(tuple(args)).library
    return compiled
