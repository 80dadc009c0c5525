"""Compiled code that a process loads only when it needs it, so that others do not wait for its compilation."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from llvmlite import binding

from .compile import DeviceFunction, engine_function
from .kinds import INT
from .ops.calls import through
from .ops.lowering import Op
from .roots import root
from .signatures import signature_of


class Extension:
    """Functions that are compiled together when `load` is called, rather than with their callers.

    Until then, a call of one of them from compiled code does nothing and returns 0. Callers reach the functions through
    pointers in memory, so code that is already running can call them after `load`. On CUDA, calls are direct: a kernel
    is compiled with everything that it calls. `name` tells users who wait what is being compiled.
    """

    def __init__(self, name: str):
        self.name = name
        self._functions: list[tuple[DeviceFunction, ctypes.c_int64]] = []  # with its pointer

    def function(self, fn: Callable[..., object]) -> Any:
        """Make a function of integers, which returns an integer or nothing, part of the extension. Use as a decorator.

        It is compiled like an `engine_function`.
        """
        compiled = engine_function(fn)
        compiled.extension = self
        pointer = ctypes.c_int64()
        made = ExtensionFunction(compiled)
        binding.add_symbol(made.symbol, ctypes.addressof(pointer))
        self._functions.append((compiled, pointer))
        return made

    def load(self) -> None:
        """Compile the functions, or load them from the cache, and make them callable. Idempotent.

        If this fails or is interrupted, some of the functions may be there; the next call completes it.
        """
        for function, pointer in self._functions:
            if not pointer.value:
                pointer.value = root(function, (INT,) * len(function.signature.parameters)).address


class ExtensionFunction(Op):
    """A function of an extension as callers see it: called through its pointer on the host, and directly on CUDA."""

    symbol: str
    direct: DeviceFunction
    py_func: Any

    def __init__(self, direct: DeviceFunction):
        parameters = tuple(signature_of(direct.py_func).parameters)
        self.symbol = f"gpunetio_{direct.py_func.__module__}.{direct.py_func.__qualname__}"
        super().__init__(direct.py_func, (64,) * len(parameters), 64, through(self.symbol), _no_pointers)
        functools.update_wrapper(self, direct.py_func)
        self.direct, self.py_func = direct, direct.py_func

    def freezes(self) -> tuple[object, tuple[Any, ...]]:
        """Return everything that determines its code, and the functions whose code it contains (frozen.py)."""
        return self.symbol, ()


def _no_pointers(*_: object) -> object:
    raise AssertionError("on CUDA, functions of extensions are called directly (unit.py)")
