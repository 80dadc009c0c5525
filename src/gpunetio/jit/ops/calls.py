"""Calls of C functions."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir

from ..values import Mistake
from .lowering import INT, VOID, Emit, Llvm, Primitive, declared, op, stack

NO_CALLS = 801  # the result of a call on CUDA: CUDA_ERROR_NOT_SUPPORTED


def _call(b, function, *args):
    fnty = ir.FunctionType(INT[32], [a.type for a in args])
    return b.call(b.inttoptr(function, fnty.as_pointer()), args)


@op(64, 64, 64, 64, 64, ret=32, cpu=_call, cuda=lambda b, *args: INT[32](NO_CALLS))
def call_c(function: int, a: int, b: int, c: int, d: int) -> int:
    """Call the C function at an address, and return its `int`. A function ignores surplus arguments (psABI).

    Load the address from memory, never from a global, which would be frozen into code that other processes load.
    """


class External(Primitive):
    """A C function of this process, for compiled code on the host. Its result is sign-extended."""

    signed = True

    def __init__(self, symbol: str, widths: tuple[int, ...], ret: int | None):
        super().__init__(widths, ret, self._call, self._refuse)
        self.__name__ = symbol
        self.parameters = tuple(f"argument {n + 1}" for n in range(len(widths)))

    def freezes(self) -> tuple[object, tuple[object, ...]]:
        """Return everything that determines its code (frozen.py)."""
        return (self.__name__, self.widths, self.ret), ()

    def _call(self, b, *given):
        kind = ir.FunctionType(INT[self.ret] if self.ret else VOID, [INT[width] for width in self.widths])
        return b.call(declared(b, kind, self.__name__), given)

    def _refuse(self, b, *given):
        raise Mistake(f"{self.__name__}() is a function of C, which a GPU does not have")


def external(symbol: str, *widths: int, ret: int | None = None) -> External:
    """Declare a C function by its symbol. Arguments are truncated to `widths`; the result is sign-extended."""
    return External(symbol, widths, ret)


def through(symbol: str) -> Emit:
    """Call the function of integers whose address is stored at a symbol. The result is 0 if none is stored."""

    def emit(b, *args):
        slot: Llvm = b.module.globals.get(symbol) or ir.GlobalVariable(b.module, INT[64], symbol)
        result = stack(b, INT[64])
        b.store(INT[64](0), result)
        function = b.load_atomic(slot, "acquire", 8)
        with b.if_then(b.icmp_unsigned("!=", function, INT[64](0))):
            fnty = ir.FunctionType(INT[64], [a.type for a in args])
            b.store(b.call(b.inttoptr(function, fnty.as_pointer()), args), result)
        return b.load(result)

    return emit
