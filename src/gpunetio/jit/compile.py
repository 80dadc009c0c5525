"""`@device_function` and `@engine_function`: functions that are compiled for CPU threads and for CUDA.

A function is compiled for the types of its arguments, as part of each *root* that reaches it. A root is a function that
Python, C or a launch calls (roots.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from ..compiler import compiling
from .frozen import PACKAGE, Watch, is_ours
from .kinds import INT
from .signatures import signature_of
from .source import note_file

# The functions that programs call take addresses, keys and counts. An array or a float in their place is a mistake.
_FOR_PROGRAMS = {PACKAGE / "device", PACKAGE / "jit"}


class DeviceFunction:
    """A function that is compiled for each root that calls it, and for the types of the arguments that it gets there.

    A call from Python runs the compiled function on the host. `py_func` is the Python function.
    """

    py_func: Any  # a FunctionType, which pyright would take for a method
    __name__: str
    __qualname__: str
    inlined: bool
    takes_integers: bool
    watch: Watch
    is_kernel: bool

    def __init__(self, fn: FunctionType, inlined: bool, takes_integers: bool = False):
        functools.update_wrapper(self, fn)
        note_file(fn)
        self.py_func, self.inlined, self.takes_integers = fn, inlined, takes_integers
        self.extension: Any = None  # the extension that it is part of, if any (extension.py)
        self.is_kernel = False
        self.watch = Watch(fn)
        self._signed: tuple[object, object, inspect.Signature] | None = None  # the signature for these defaults
        self._ours = is_ours(fn.__code__.co_filename)
        self._quick: Any = None  # what its root for integers has frozen, and its plain call; None if it can fail

    def __repr__(self) -> str:
        return f"<compiled function {self.__qualname__}{self.signature}>"

    @property
    def signature(self) -> inspect.Signature:
        """Return its parameters, with their present defaults."""
        function: Any = self.py_func
        defaults, named = function.__defaults__, function.__kwdefaults__
        if self._signed is None or self._signed[0] is not defaults or self._signed[1] is not named:
            self._signed = defaults, named, signature_of(self.py_func)
        return self._signed[2]

    def freezes(self) -> tuple[object, tuple[FunctionType, ...]]:
        """Return everything that determines its code, and the functions whose code it contains (frozen.py)."""
        return (self.inlined, self.takes_integers), (self.py_func,)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Run it on the host. Return integers and floats, a tuple of them, or nothing."""
        quick = self._quick
        if quick is not None and not named and quick[0] == self._frozen():
            try:
                return quick[1](*given)
            except (TypeError, OverflowError):  # not integers, not the right number, or unsigned integers
                pass
        return later("roots").call(self, given, named)

    def _frozen(self) -> object:
        """Return everything that determines a root for integers and may change."""
        return None if self._ours else (self.watch.now(), later("roots").checks_bounds())

    def interpret(self, *given: Any, **named: Any) -> Any:
        """Run it as plain Python, on the host: the reference for the compiled function (interpret.py)."""
        return later("interpret").interpreted(self.py_func)(*given, **named)

    def compile(self) -> Any:
        """Compile it for integers, or load it from the cache, and return the root. Idempotent."""
        frozen = self._frozen()  # taken first: a value may change while this compiles
        made = later("roots").root(self, (INT,) * len(self.signature.parameters))
        self._quick = (frozen, made.plain) if made.plain else None
        return made


@functools.cache
def later(module: str) -> Any:
    """Import and return a module that imports the caller's. No fork meanwhile: a child would keep half an import."""
    with compiling():
        return importlib.import_module(f"{__package__}.{module}")


Function = DeviceFunction


def device_function(fn: Callable[..., object]) -> DeviceFunction:
    """Make `fn` callable from kernels and from the software NIC, on CPU and GPU (`__device__ __forceinline__`).

    Mode arguments with defaults fold away when they are constants.
    """
    return _compiled(fn, inlined=True)


def engine_function(fn: Callable[..., object]) -> DeviceFunction:
    """Compile like `device_function`, but do not inline the function into each caller. For big functions.

    On the host, LLVM decides. On CUDA the function is always called, whatever its size.
    """
    return _compiled(fn, inlined=False)


@functools.cache
def _is_for_programs(file: str) -> bool:
    return not _FOR_PROGRAMS.isdisjoint(Path(file).parents)


def _compiled(fn: Any, inlined: bool) -> DeviceFunction:
    return DeviceFunction(fn, inlined, _is_for_programs(fn.__code__.co_filename))


@functools.cache
def helper(fn: FunctionType) -> DeviceFunction:
    """Return the device function for a plain function of a program that a kernel calls."""
    return DeviceFunction(fn, inlined=True)
