"""Calls of C functions."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir

from .lowering import INT, op

NO_CALLS = 801  # what a call returns on CUDA: CUDA_ERROR_NOT_SUPPORTED


def _call(b, function, *args):
    fnty = ir.FunctionType(INT[32], [a.type for a in args])
    return b.call(b.inttoptr(function, fnty.as_pointer()), args)


@op(64, 64, 64, 64, 64, ret=32, cpu=_call, cuda=lambda b, *args: INT[32](NO_CALLS))
def call_c(function: int, a: int, b: int, c: int, d: int) -> int:
    """Call the C function at an address, and return its `int`. One with fewer parameters ignores the rest (psABI).

    Load the address from memory, never from a global: Numba would freeze a global into its cache.
    """
