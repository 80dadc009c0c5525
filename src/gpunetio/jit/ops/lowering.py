"""How primitives become LLVM on the CPU and PTX on CUDA: `op`, and the building blocks of both."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.cpu import CPUContext
from numba.extending import intrinsic

from ..compile import need_integers

Llvm = Any  # what llvmlite builds: values, types, builders. It has no types for them
INT: dict[int, Llvm] = {bits: ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128)}
VOID: Llvm = ir.VoidType()
CONSTRAINT = {16: "h", 32: "r", 64: "l"}

Emit = Callable[..., Llvm]  # (builder, *args) -> value
Stub = TypeVar("Stub", bound=Callable[..., object])
Load = Callable[[int], int]
Store = Callable[[int, int], None]


def op(*widths: int, ret: int | None = None, cpu: Emit, cuda: Emit) -> Callable[[Stub], Stub]:
    """Make an intrinsic. It truncates int64 arguments to `widths`, and zero-extends the `ret` bits of its result."""
    result = types.void if ret is None else types.int64

    def codegen(context, builder, signature, args):
        narrow = [a if w == 64 else builder.trunc(a, INT[w]) for a, w in zip(args, widths, strict=True)]
        if isinstance(context, CPUContext):
            value = cpu(builder, *narrow)
        else:
            value = cuda(builder, *narrow)
        if ret is None:
            return context.get_dummy_value()
        return value if value.type.width == 64 else builder.zext(value, INT[64])

    def bind(stub: Stub) -> Stub:
        answer = (result(*[types.int64] * len(widths)), codegen)
        names = tuple(inspect.signature(stub).parameters)

        def of(*found):
            need_integers(stub.__name__, names, found)
            return answer

        typing: Any = (  # Numba checks the number of parameters, so *args does not work
            lambda typingctx: of(),
            lambda typingctx, a: of(a),
            lambda typingctx, a, b: of(a, b),
            lambda typingctx, a, b, c: of(a, b, c),
            lambda typingctx, a, b, c, d: of(a, b, c, d),
            lambda typingctx, a, b, c, d, e: of(a, b, c, d, e),
        )[len(widths)]
        typing.__name__, typing.__qualname__ = stub.__name__, stub.__qualname__
        typing.__doc__, typing.__module__ = stub.__doc__, stub.__module__
        made: Any = intrinsic(typing)
        made.__signature__ = inspect.signature(stub)  # for help(), which would show that of `typing`
        return cast(Stub, made)

    return bind


# --- on the CPU -----------------------------------------------------------------------------------------------------


def ptr(b: Llvm, addr: Llvm, width: int) -> Llvm:
    """Return an address as a pointer to an integer of `width` bits."""
    return b.inttoptr(addr, INT[width].as_pointer())


def load(width: int, order: str | None = None) -> Emit:
    """Load; atomically, with an order."""
    if order is None:
        return lambda b, addr: b.load(ptr(b, addr, width), align=width // 8)
    return lambda b, addr: b.load_atomic(ptr(b, addr, width), order, width // 8)


def store(width: int, order: str | None = None) -> Emit:
    """Store; atomically, with an order."""
    if order is None:
        return lambda b, addr, value: b.store(value, ptr(b, addr, width), align=width // 8)
    return lambda b, addr, value: b.store_atomic(value, ptr(b, addr, width), order, width // 8)


def rmw(kind: str, width: int, order: str = "acq_rel") -> Emit:
    """Read, modify and write atomically. Return the old value."""
    return lambda b, addr, value: b.atomic_rmw(kind, ptr(b, addr, width), value, order)


def cas(width: int) -> Emit:
    """Compare and swap. Return the old value."""

    def emit(b, addr, expected, new):
        return b.extract_value(b.cmpxchg(ptr(b, addr, width), expected, new, "acq_rel", "acquire"), 0)

    return emit


def cpu_fence(order: str) -> Emit:
    """Order what comes before against what comes after."""
    return lambda b: b.fence(order)


def llvm(name: str, *overload: Llvm, ret: int | None = None) -> Emit:
    """Call an LLVM intrinsic."""

    def emit(b, *args):
        fnty = None if overload else ir.FunctionType(INT[ret] if ret else VOID, [a.type for a in args])
        return b.call(b.module.declare_intrinsic(name, list(overload), fnty), args)

    return emit


_DSB_ST = ir.Constant(INT[32], 0xE)
# A release fence is no instruction on x86, and covers one shareability domain on Arm. It orders neither write-combined
# stores nor stores to a device.
drain: Emit = {
    "x86_64": llvm("llvm.x86.sse.sfence"),
    "aarch64": lambda b: llvm("llvm.aarch64.dsb")(b, _DSB_ST),
}.get(platform.machine(), cpu_fence("seq_cst"))


def extern(b: Llvm, name: str, ret: Llvm, args: Sequence[Llvm]) -> Llvm:
    """Call a C function by its symbol."""
    fnty = ir.FunctionType(ret, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, name), args)


nothing: Emit = lambda b, *args: None  # noqa: E731


# --- on CUDA --------------------------------------------------------------------------------------------------------


def ptx(text: str, ret: int | None = None, *, pure: bool = False, convergent: bool = False) -> Emit:
    """Emit inline PTX. Without `pure`, it orders memory and is kept. `convergent` forbids moving it into a branch.

    Of several instructions, one may read an operand after another has written the result: they share no register (`&`).
    """
    written = "=&" if text.startswith("{") else "="

    def emit(b, *args):
        constraints = [] if ret is None else [written + CONSTRAINT[ret]]
        constraints += [CONSTRAINT[a.type.width] for a in args]
        constraints += [] if pure else ["~{memory}"]
        fnty = ir.FunctionType(VOID if ret is None else INT[ret], [a.type for a in args])
        asm = ir.InlineAsm(fnty, text, ",".join(constraints), side_effect=not pure)
        return b.call(asm, args, attrs=("convergent",) if convergent else ())

    return emit


def ptx_load(how: str, width: int) -> Emit:
    """Load with this PTX instruction."""
    if width == 8:  # PTX has no 8-bit registers
        read = ptx(f"{how}.u8 $0, [$1];", 16)
        return lambda b, addr: b.trunc(read(b, addr), INT[8])
    return ptx(f"{how}.u{width} $0, [$1];", width)


def ptx_store(how: str, width: int) -> Emit:
    """Store with this PTX instruction."""
    if width == 8:
        write = ptx(f"{how}.u8 [$0], $1;")
        return lambda b, addr, value: write(b, addr, b.zext(value, INT[16]))
    return ptx(f"{how}.u{width} [$0], $1;")


def compute_capability() -> tuple[int, int]:
    """Return that of the GPU being compiled for. This asks as Numba itself does, so `launch.offline` answers both."""
    from numba.cuda import dispatcher

    return dispatcher.get_current_device().compute_capability  # type: ignore[attr-defined]


def from_sm90(new: str, old: str) -> Emit:
    """Emit PTX that GPUs before sm_90 do not have, or `old` for those."""
    return lambda b: ptx(new if compute_capability() >= (9, 0) else old)(b)
