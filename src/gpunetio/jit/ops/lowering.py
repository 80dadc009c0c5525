"""Lower primitives to LLVM on the CPU and to PTX on CUDA: `op`, and the building blocks of both."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from llvmlite import ir

from ..compile import later

Llvm = Any  # objects of llvmlite: values, types, builders. llvmlite has no type annotations
INT: dict[int, Llvm] = {bits: ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128)}
VOID: Llvm = ir.VoidType()
CONSTRAINT = {16: "h", 32: "r", 64: "l"}

Emit = Callable[..., Llvm]  # (builder, *args) -> value
Stub = TypeVar("Stub", bound=Callable[..., object])
Load = Callable[[int], int]
Store = Callable[[int, int], None]


class Primitive:
    """A function of integers that is written with LLVM's builder, once for each target.

    Arguments are truncated to `widths`. The result has `ret` bits; None: there is no result.
    """

    __name__: str
    signed: bool  # whether the result is sign-extended
    parameters: tuple[str, ...]
    widths: tuple[int, ...]
    ret: int | None
    cpu: Emit
    cuda: Emit

    def __init__(self, widths: tuple[int, ...], ret: int | None, cpu: Emit, cuda: Emit):
        self.widths, self.ret, self.cpu, self.cuda = widths, ret, cpu, cuda
        self._run: Callable[..., Any] | None = None  # its machine code, for the host

    def freezes(self) -> tuple[object, tuple[Any, ...]]:
        """Return everything outside this package that determines its code (frozen.py)."""
        return self.__name__, ()

    def __call__(self, *given: Any) -> Any:
        """Run it on the host, for code that is not compiled."""
        if len(given) != len(self.widths):
            raise TypeError(f"{self.__name__}() takes {len(self.widths)} integers, not {len(given)}")
        run = self._run
        if run is None:
            run = self._run = later("roots").primitive(self)
        try:
            return run(*given)
        except OverflowError:  # unsigned arguments
            return run(*map(later("arguments").word, itertools.repeat(self.__name__), given))


class Op(Primitive):
    """A primitive operation. Its result is zero-extended."""

    signed = False

    def __init__(self, stub: Callable[..., object], widths: tuple[int, ...], ret: int | None, cpu: Emit, cuda: Emit):
        super().__init__(widths, ret, cpu, cuda)
        functools.update_wrapper(self, stub)
        self.parameters = tuple(inspect.signature(stub).parameters)


def op(*widths: int, ret: int | None = None, cpu: Emit, cuda: Emit) -> Callable[[Stub], Stub]:
    """Return a decorator that makes a primitive operation from a stub, which gives its name and parameters."""
    return lambda stub: cast(Stub, Op(stub, widths, ret, cpu, cuda))


# The target for which a unit is compiled: primitives differ from one GPU to another.
_target: list[Any] = []


@contextlib.contextmanager
def target_of_ops(target: Any) -> Iterator[None]:
    """Emit primitives for this target inside the block. Only one thread compiles at a time (compiler.py)."""
    _target.append(target)
    try:
        yield
    finally:
        _target.pop()


# --- on the CPU -----------------------------------------------------------------------------------------------------


def ptr(b: Llvm, addr: Llvm, width: int) -> Llvm:
    """Return an address as a pointer to an integer of `width` bits."""
    return b.inttoptr(addr, INT[width].as_pointer())


def load(width: int, order: str | None = None) -> Emit:
    """Load. With an order, load atomically."""
    if order is None:
        return lambda b, addr: b.load(ptr(b, addr, width), align=width // 8)
    return lambda b, addr: b.load_atomic(ptr(b, addr, width), order, width // 8)


def store(width: int, order: str | None = None) -> Emit:
    """Store. With an order, store atomically."""
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
    """Order earlier accesses against later ones."""
    return lambda b: b.fence(order)


def llvm(name: str, *overload: Llvm, ret: int | None = None) -> Emit:
    """Call an LLVM intrinsic."""

    def emit(b, *args):
        fnty = None if overload else ir.FunctionType(INT[ret] if ret else VOID, [a.type for a in args])
        return b.call(b.module.declare_intrinsic(name, list(overload), fnty), args)

    return emit


_DSB_ST = ir.Constant(INT[32], 0xE)
# On x86, a release fence emits no instruction. On Arm, it covers one shareability domain. It orders neither
# write-combined stores nor stores to a device.
drain: Emit = {
    "x86_64": llvm("llvm.x86.sse.sfence"),
    "aarch64": lambda b: llvm("llvm.aarch64.dsb")(b, _DSB_ST),
}.get(platform.machine(), cpu_fence("seq_cst"))


def declared(b: Llvm, kind: Llvm, name: str) -> Llvm:
    """Return a C function, which is declared once in a module."""
    return b.module.globals.get(name) or ir.Function(b.module, kind, name)


def extern(b: Llvm, name: str, ret: Llvm, args: Sequence[Llvm]) -> Llvm:
    """Call a C function by its symbol."""
    fnty = ir.FunctionType(ret, [a.type for a in args])
    return b.call(declared(b, fnty, name), args)


# --- what llvmlite's builder lacks ---


def stack(b: Llvm, kind: Llvm) -> Llvm:
    """Return memory on the stack, the same memory in each turn of a loop."""
    with b.goto_entry_block():
        return b.alloca(kind)


def stacked(b: Llvm, value: Llvm) -> Llvm:
    """Return memory on the stack that holds a value."""
    slot = stack(b, value.type)
    b.store(value, slot)
    return slot


@contextlib.contextmanager
def counted(b: Llvm, count: Llvm) -> Iterator[Llvm]:
    """Emit a loop whose body gets the number of its turn, from 0."""
    turn = stacked(b, INT[64](0))
    head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.load(turn)
    b.cbranch(b.icmp_signed("<", index, count), body, after)
    b.position_at_end(body)
    yield index
    b.store(b.add(index, INT[64](1)), turn)
    b.branch(head)
    b.position_at_end(after)


def move(b: Llvm, dst: Llvm, src: Llvm, nbytes: Llvm) -> None:
    """Copy bytes between addresses (memcpy)."""
    byte = INT[8].as_pointer()
    kind = ir.FunctionType(VOID, [byte, byte, INT[64], INT[1]])
    b.call(declared(b, kind, "llvm.memcpy.p0.p0.i64"), [ptr(b, dst, 8), ptr(b, src, 8), nbytes, INT[1](0)])


nothing: Emit = lambda b, *args: None  # noqa: E731


# --- on CUDA --------------------------------------------------------------------------------------------------------


def ptx(text: str, ret: int | None = None, *, pure: bool = False, convergent: bool = False) -> Emit:
    """Emit inline PTX. Without `pure`, it orders memory and is kept. `convergent` forbids moving it into a branch.

    With several instructions, one may read an operand after another has written the result, so the result shares no
    register with an operand (`&`).
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
    """Return the compute capability of the GPU that is compiled for."""
    return _target[-1].capability


def from_sm90(new: str, old: str) -> Emit:
    """Emit the PTX `new`, which needs sm_90, or `old` for earlier GPUs."""
    return lambda b: ptx(new if compute_capability() >= (9, 0) else old)(b)
