"""Compiled code that a process loads when it first needs it: nobody waits for the compiler for what others use."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import binding
from numba import types

from .compile import DeviceFunction, device_function, engine_function
from .ops.calls import through
from .ops.lowering import op


class Extension:
    """Functions that are compiled together, when `load` is called, and not with their callers.

    Until then, compiled code that calls one of them gets 0, and nothing happens. Callers reach the functions through
    pointers in memory, so what runs already can call them from then on. On CUDA, calls are direct: a kernel is compiled
    with all that it calls. `name` says to those who wait what is compiled.
    """

    def __init__(self, name: str):
        self.name = name
        self._functions: list[tuple[Any, int, ctypes.c_int64]] = []  # with how many arguments, and its pointer

    def function(self, fn: Callable[..., object]) -> DeviceFunction:
        """Decorate a function of at most five integers, which returns one or nothing: an `engine_function`."""
        compiled: Any = engine_function(fn)
        compiled.extension = self
        arguments, symbol = tuple(inspect.signature(fn).parameters), f"gpunetio_{fn.__module__}.{fn.__qualname__}"
        pointer = ctypes.c_int64()
        binding.add_symbol(symbol, ctypes.addressof(pointer))
        self._functions.append((compiled, len(arguments), pointer))

        # The same parameters in Python, as Numba takes them from the function.
        listed = ", ".join(arguments)
        names: dict[str, Any] = {}
        text = f"def stub({listed}): ...\ndef {fn.__name__}({listed}): return call({listed})"
        exec(compile(text, inspect.getfile(fn), "exec"), names)
        stub, caller = names["stub"], names[fn.__name__]
        names["call"] = op(*[64] * len(arguments), ret=64, cpu=through(symbol), cuda=_no_pointers)(stub)
        caller.__module__, caller.__qualname__, caller.__doc__ = fn.__module__, fn.__qualname__, fn.__doc__
        made: Any = device_function(caller)
        made.direct = compiled
        return made

    def load(self) -> None:
        """Compile the functions, or load them from the cache, and have calls reach them. Idempotent.

        If this fails or is interrupted, some of the functions may be there; the next call completes it.
        """
        for function, arguments, pointer in self._functions:
            if not pointer.value:
                signature = (types.int64,) * arguments
                function.compile(signature)
                made = function.overloads[signature]
                pointer.value = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)


def _no_pointers(*_: object) -> object:
    raise AssertionError("on CUDA, functions of extensions are called directly (cuda_functions.py)")
