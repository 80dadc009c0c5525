"""How CUDA kernels contain the functions that they call: typed once, linked once, and inlined or called as declared.

numba-cuda alone compiles a function again for each constant that it is called with, hands its module to NVVM once for
each path in the graph of calls (16,435 modules for the 408 of the NIC's engine), and leaves it to LLVM what is inlined:
all of the engine became six functions, for which ptxas took more than five minutes and 9 GB. Here

- types of literals are dropped, as on the host: constants fold when a function is inlined,
- each module is linked once,
- a `device_function` is inlined, and an `engine_function` is called. It has the ABI of C, which returns a value in
  registers. Numba's own returns a status, and the value by way of memory.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from numba.core.dispatcher import Dispatcher
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.compiler import compile_cuda
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher

from ..once import once
from .ops.lowering import compute_capability
from .wrapping import let_wrap

_NOT_IN_A_SYMBOL = re.compile(r"\W")


class Library(CUDACodeLibrary):
    """The module of a function, and the modules of all that it calls, directly or not."""

    @functools.cached_property
    def modules(self) -> list[Any]:
        """Return each module once, callers first: NVVM drops an inline function that no earlier module calls."""
        return list(dict.fromkeys(reversed(super().modules)))[::-1]

    def add_ir_module(self, mod: Any) -> None:
        """Take the function's IR. Sums and products wrap."""
        let_wrap(mod)
        super().add_ir_module(mod)


class CudaFunction(CUDADispatcher):
    """A device function or an engine function as CUDA kernels call it."""

    def __init__(self, function: Any):
        super().__init__(function.py_func, function.targetoptions | {"device": True, "debug": False, "opt": True})
        self._types_of_call = function.types_of_call

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return what types a call."""
        return super().get_call_template(*self._types_of_call(args, kws))

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        """Compile for arguments of these types, unless that is done."""
        if self.targetoptions["forceinline"] or args in self.overloads:
            return super().compile_device(args, return_type)
        with self._compiling_counter:
            made = compile_cuda(
                self.py_func, return_type, args, cc=compute_capability(),
                nvvm_options={"opt": 3, "fastmath": False}, abi="c", abi_info={"abi_name": self._next_symbol()},
            )  # fmt: skip
            made.library.get_function(made.fndesc.llvm_func_name).attributes.add("noinline")
            self.overloads[args] = made
            made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return made

    def _next_symbol(self) -> str:
        """Return a symbol for the next overload. The ABI of C does not put types into it."""
        name = _NOT_IN_A_SYMBOL.sub("_", f"{self.py_func.__module__}.{self.py_func.__qualname__}")
        return f"{name}${len(self.overloads)}" if self.overloads else name


@functools.cache
def _made(function: Any) -> dict[str, CudaFunction]:
    return {}


def _cuda_function(function: Any) -> CudaFunction:
    """Return a function for CUDA kernels, with the values that it freezes now."""
    made, digest = _made(function), function.units.watch.now().digest
    if digest not in made:
        made.clear()
        made[digest] = CudaFunction(function)
    return made[digest]


@once
def install() -> None:
    """Let numba-cuda compile the functions of `compile.py` in this way. Call this before a kernel is compiled."""
    cuda_target.target_context.codegen()._library_class = Library
    context: Any = cuda_target.typing_context
    resolve = context.resolve_value_type

    def resolve_value_type(value: Any) -> Any:
        ours = isinstance(value, Dispatcher) and hasattr(value, "types_of_call")
        return resolve(_cuda_function(getattr(value, "direct", value)) if ours else value)

    context.resolve_value_type = resolve_value_type
