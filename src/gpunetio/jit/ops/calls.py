"""Calls of C functions."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from .lowering import INT, Emit, Llvm, op

NO_CALLS = 801  # what a call returns on CUDA: CUDA_ERROR_NOT_SUPPORTED


def _call(b, function, *args):
    fnty = ir.FunctionType(INT[32], [a.type for a in args])
    return b.call(b.inttoptr(function, fnty.as_pointer()), args)


@op(64, 64, 64, 64, 64, ret=32, cpu=_call, cuda=lambda b, *args: INT[32](NO_CALLS))
def call_c(function: int, a: int, b: int, c: int, d: int) -> int:
    """Call the C function at an address, and return its `int`. One with fewer parameters ignores the rest (psABI).

    Load the address from memory, never from a global: Numba would freeze a global into its cache.
    """


def through(symbol: str) -> Emit:
    """Call the function whose address is stored at a symbol, as Numba compiles it. The result is 0 if none is stored.

    Numba passes where the result goes, and where an exception would go; a function without a result stores null.
    """

    def emit(b, *args):
        slot: Llvm = b.module.globals.get(symbol) or ir.GlobalVariable(b.module, INT[64], symbol)
        result, exception = cgutils.alloca_once(b, INT[64]), cgutils.alloca_once(b, INT[8].as_pointer())
        b.store(INT[64](0), result)
        function = b.load_atomic(slot, "acquire", 8)
        with b.if_then(b.icmp_unsigned("!=", function, INT[64](0))):
            passed = [result, exception, *args]
            fnty = ir.FunctionType(INT[32], [a.type for a in passed])
            b.call(b.inttoptr(function, fnty.as_pointer()), passed)
        return b.load(result)

    return emit
