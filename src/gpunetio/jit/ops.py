"""Primitive operations with one meaning and two lowerings: LLVM on the CPU, PTX on CUDA.

Only this file knows the target, so a port to another GPU compiler rewrites this file alone.

Every value is an int64: Numba turns `uint64 + int64` into a float. Narrow loads zero-extend, narrow stores truncate.
Plain `ld*`/`st*` are for memory that no other agent accesses at that moment. A loop that waits for another agent polls
with `ld_relaxed*` or `ld_acquire*`, because LLVM hoists a plain load out of the loop.

Scopes follow the PTX memory model: `sys` includes the CPU and the NIC, `gpu` the threads of one GPU, `cta` those of one
block. The CPU has one scope, so all three lower to the same instruction there.
"""

# A stub below has the signature and the docstring; its body is the pair of lowerings in the decorator.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import inspect
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.cpu import CPUContext
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .compile import device_function, need_integers

_INT = {bits: ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128)}
_VOID = ir.VoidType()
_CONSTRAINT = {16: "h", 32: "r", 64: "l"}

Emit = Callable[..., Any]  # (builder, *args) -> value
Load = Callable[[int], int]
Store = Callable[[int, int], None]


def op(*widths: int, ret: int | None = None, cpu: Emit, cuda: Emit) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic. It truncates int64 arguments to `widths`, and zero-extends the `ret` bits of its result."""
    result = types.void if ret is None else types.int64

    def codegen(context, builder, signature, args):
        narrow = [a if w == 64 else builder.trunc(a, _INT[w]) for a, w in zip(args, widths, strict=True)]
        if isinstance(context, CPUContext):
            value = cpu(builder, *narrow)
        else:
            value = cuda(builder, *narrow)
        if ret is None:
            return context.get_dummy_value()
        return value if value.type.width == 64 else builder.zext(value, _INT[64])

    def bind(stub):
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
        return made

    return bind


# --- building blocks of the CPU lowering ---------------------------------------------------------------------------


def _ptr(b, addr, width):
    return b.inttoptr(addr, _INT[width].as_pointer())


def _load(width, order=None) -> Emit:
    if order is None:
        return lambda b, addr: b.load(_ptr(b, addr, width), align=width // 8)
    return lambda b, addr: b.load_atomic(_ptr(b, addr, width), order, width // 8)


def _store(width, order=None) -> Emit:
    if order is None:
        return lambda b, addr, value: b.store(value, _ptr(b, addr, width), align=width // 8)
    return lambda b, addr, value: b.store_atomic(value, _ptr(b, addr, width), order, width // 8)


def _rmw(kind, width, order="acq_rel") -> Emit:
    return lambda b, addr, value: b.atomic_rmw(kind, _ptr(b, addr, width), value, order)


def _cas(width) -> Emit:
    def emit(b, addr, expected, new):
        return b.extract_value(b.cmpxchg(_ptr(b, addr, width), expected, new, "acq_rel", "acquire"), 0)

    return emit


def _fence(order) -> Emit:
    return lambda b: b.fence(order)


def _llvm(name, *overload, ret=None) -> Emit:
    """Call an LLVM intrinsic."""

    def emit(b, *args):
        fnty = None if overload else ir.FunctionType(_INT[ret] if ret else _VOID, [a.type for a in args])
        return b.call(b.module.declare_intrinsic(name, list(overload), fnty), args)

    return emit


_DSB_ST = ir.Constant(_INT[32], 0xE)
# A release fence is no instruction on x86, and covers one shareability domain on Arm. It orders neither write-combined
# stores nor stores to a device.
_drain: Emit = {
    "x86_64": _llvm("llvm.x86.sse.sfence"),
    "aarch64": lambda b: _llvm("llvm.aarch64.dsb")(b, _DSB_ST),
}.get(platform.machine(), _fence("seq_cst"))


def _extern(b, name, ret, args):
    """Call a C function by its symbol."""
    fnty = ir.FunctionType(ret, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, name), args)


# --- building blocks of the CUDA lowering --------------------------------------------------------------------------


def _ptx(text, ret=None, *, pure=False, convergent=False) -> Emit:
    """Emit inline PTX. Without `pure`, it orders memory and is kept. `convergent` forbids moving it into a branch."""

    def emit(b, *args):
        constraints = [] if ret is None else ["=" + _CONSTRAINT[ret]]
        constraints += [_CONSTRAINT[a.type.width] for a in args]
        constraints += [] if pure else ["~{memory}"]
        fnty = ir.FunctionType(_VOID if ret is None else _INT[ret], [a.type for a in args])
        asm = ir.InlineAsm(fnty, text, ",".join(constraints), side_effect=not pure)
        return b.call(asm, args, attrs=("convergent",) if convergent else ())

    return emit


def _ptx_load(how, width) -> Emit:
    if width == 8:  # PTX has no 8-bit registers
        read = _ptx(f"{how}.u8 $0, [$1];", 16)
        return lambda b, addr: b.trunc(read(b, addr), _INT[8])
    return _ptx(f"{how}.u{width} $0, [$1];", width)


def _ptx_store(how, width) -> Emit:
    if width == 8:
        write = _ptx(f"{how}.u8 [$0], $1;")
        return lambda b, addr, value: write(b, addr, b.zext(value, _INT[16]))
    return _ptx(f"{how}.u{width} [$0], $1;")


def _compute_capability() -> tuple[int, int]:
    """Return that of the GPU being compiled for. This asks as Numba itself does, so `launch.offline` answers both."""
    from numba.cuda import dispatcher

    return dispatcher.get_current_device().compute_capability  # type: ignore[attr-defined]


def _from_sm90(new: str, old: str) -> Emit:
    """Emit PTX that GPUs before sm_90 do not have, or `old` for those."""
    return lambda b: _ptx(new if _compute_capability() >= (9, 0) else old)(b)


# --- loads and stores ----------------------------------------------------------------------------------------------


def _load_op(name, width, order, how, doc):
    def stub(addr: int) -> int: ...

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = doc
    cuda = _load(width) if how is None else _ptx_load(how, width)
    return op(64, ret=width, cpu=_load(width, order), cuda=cuda)(stub)


def _store_op(name, width, order, how, doc):
    def stub(addr: int, value: int) -> None: ...

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = doc
    cuda = _store(width) if how is None else _ptx_store(how, width)
    return op(64, width, cpu=_store(width, order), cuda=cuda)(stub)


ld8: Load = _load_op("ld8", 8, None, None, "Plain 8-bit load.")
ld16: Load = _load_op("ld16", 16, None, None, "Plain 16-bit load.")
ld32: Load = _load_op("ld32", 32, None, None, "Plain 32-bit load.")
ld64: Load = _load_op("ld64", 64, None, None, "Plain 64-bit load.")
st8: Store = _store_op("st8", 8, None, None, "Plain 8-bit store.")
st16: Store = _store_op("st16", 16, None, None, "Plain 16-bit store.")
st32: Store = _store_op("st32", 32, None, None, "Plain 32-bit store.")
st64: Store = _store_op("st64", 64, None, None, "Plain 64-bit store.")



# The compiler may move pure inline PTX out of loops, which makes these loads cheap behind fences. It may also move them
# ahead of a check of the address, as in `if queue != 0`. So a value that cannot be an address is not read.
_NO_ADDRESS_BELOW, _ADDRESSES = 1 << 16, 1 << 56


def _fixed_op(name, width):
    def stub(addr: int) -> int: ...

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = (
        f"{width}-bit load of memory that does not change while the kernel runs: the compiler may keep the value and "
        "move the load, also across fences, and the load goes through the non-coherent cache."
    )
    how = _ptx(
        f"{{.reg .pred p; .reg .b64 t; sub.u64 t, $1, {_NO_ADDRESS_BELOW}; setp.lt.u64 p, t, {_ADDRESSES}; "
        f"mov.u{width} $0, 0; @p ld.global.nc.u{width} $0, [$1];}}",
        width, pure=True,
    )  # fmt: skip
    return op(64, ret=width, cpu=_load(width), cuda=how)(stub)


ld_fixed16: Load = _fixed_op("ld_fixed16", 16)
ld_fixed32: Load = _fixed_op("ld_fixed32", 32)
ld_fixed64: Load = _fixed_op("ld_fixed64", 64)

_RELAXED_SYS = "ld.relaxed.sys.global.L1::no_allocate"
ld_relaxed8: Load = _load_op("ld_relaxed8", 8, "monotonic", _RELAXED_SYS, "System-scope relaxed load, for polling.")
ld_relaxed32: Load = _load_op(
    "ld_relaxed32", 32, "monotonic", _RELAXED_SYS, "System-scope relaxed load, for polling."
)
ld_relaxed64: Load = _load_op(
    "ld_relaxed64", 64, "monotonic", _RELAXED_SYS, "System-scope relaxed load, for polling."
)
ld_relaxed_gpu64: Load = _load_op(
    "ld_relaxed_gpu64", 64, "monotonic", "ld.relaxed.gpu.global", "GPU-scope relaxed load, for polling."
)
ld_acquire32: Load = _load_op("ld_acquire32", 32, "acquire", "ld.acquire.sys.global", "System-scope acquire load.")
ld_acquire64: Load = _load_op("ld_acquire64", 64, "acquire", "ld.acquire.sys.global", "System-scope acquire load.")
st_relaxed32: Store = _store_op("st_relaxed32", 32, "monotonic", "st.relaxed.sys.global", "System-scope relaxed store.")
st_relaxed64: Store = _store_op("st_relaxed64", 64, "monotonic", "st.relaxed.sys.global", "System-scope relaxed store.")
st_relaxed_gpu64: Store = _store_op(
    "st_relaxed_gpu64", 64, "monotonic", "st.relaxed.gpu.global", "GPU-scope relaxed store."
)
st_release32: Store = _store_op("st_release32", 32, "release", "st.release.sys.global", "System-scope release store.")
st_release64: Store = _store_op("st_release64", 64, "release", "st.release.sys.global", "System-scope release store.")


def _mmio_release(b, addr, value):
    new = _ptx("st.async.mmio.release.sys.global.b64 [$0], $1;")
    fence, store = _from_sm90("fence.release.sys;", "fence.acq_rel.sys;"), _ptx_store("st.mmio.relaxed.sys.global", 64)
    if _compute_capability() >= (10, 0):
        return new(b, addr, value)
    fence(b)
    return store(b, addr, value)


@op(64, 64, cpu=_store(64, "release"), cuda=_mmio_release)
def st_mmio_release64(addr: int, value: int) -> None:
    """Store to a doorbell register after all earlier accesses. From sm_100 on, the thread does not wait for them
    (`doca_gpu_dev_verbs_async_store_release`)."""


st_mmio64: Store = _store_op(
    "st_mmio64", 64, "monotonic", "st.mmio.relaxed.sys.global", "Store to a doorbell register."
)


def _store_pair(b, addr, low, high):
    vector = ir.VectorType(_INT[64], 2)
    value = b.insert_element(ir.Constant(vector, ir.Undefined), low, _INT[32](0))
    b.store(b.insert_element(value, high, _INT[32](1)), b.inttoptr(addr, vector.as_pointer()), align=16)


@op(64, 64, 64, cpu=_store_pair, cuda=_ptx("st.cs.v2.b64 [$0], {$1, $2};"))
def st128(addr: int, low: int, high: int) -> None:
    """Store 16 bytes to an aligned address in any memory. On CUDA the store streams, because the NIC reads it next."""


# --- byte order ----------------------------------------------------------------------------------------------------


@op(16, ret=16, cpu=_llvm("llvm.bswap", _INT[16]), cuda=_llvm("llvm.bswap", _INT[16]))
def be16(value: int) -> int:
    """Swap the bytes of a 16-bit value."""


# On CUDA, llvm.bswap takes twice as many instructions as a byte permutation.
@op(32, ret=32, cpu=_llvm("llvm.bswap", _INT[32]), cuda=_ptx("prmt.b32 $0, $1, 0, 0x0123;", 32, pure=True))
def be32(value: int) -> int:
    """Swap the bytes of a 32-bit value."""


_PRMT64 = (
    "{.reg .b32 l, h; mov.b64 {l, h}, $1; prmt.b32 l, l, 0, 0x0123; prmt.b32 h, h, 0, 0x0123; mov.b64 $0, {h, l};}"
)


@op(64, ret=64, cpu=_llvm("llvm.bswap", _INT[64]), cuda=_ptx(_PRMT64, 64, pure=True))
def be64(value: int) -> int:
    """Swap the bytes of a 64-bit value."""


def _pack(b, low, high):
    return b.or_(b.zext(low, _INT[64]), b.shl(b.zext(high, _INT[64]), _INT[64](32)))


@op(32, 32, ret=64, cpu=_pack, cuda=_ptx("mov.b64 $0, {$1, $2};", 64, pure=True))
def pack64(low: int, high: int) -> int:
    """Combine two 32-bit words into a 64-bit value whose store puts `low` at the lower address."""


# --- fences --------------------------------------------------------------------------------------------------------


@op(cpu=_fence("release"), cuda=_from_sm90("fence.release.sys;", "fence.acq_rel.sys;"))
def fence_release_sys() -> None:
    """Order earlier accesses before later stores, for every agent of the system."""


@op(cpu=_fence("release"), cuda=_from_sm90("fence.release.gpu;", "fence.acq_rel.gpu;"))
def fence_release_gpu() -> None:
    """Order earlier accesses before later stores, for the threads of this GPU."""


@op(cpu=_fence("release"), cuda=_from_sm90("fence.release.cta;", "fence.acq_rel.cta;"))
def fence_release_cta() -> None:
    """Order earlier accesses before later stores, for the threads of this block."""


@op(cpu=_fence("acq_rel"), cuda=_ptx("fence.acq_rel.sys;"))
def fence_sys() -> None:
    """Order earlier accesses before later ones, for every agent of the system: release and acquire in one."""


@op(cpu=_drain, cuda=_ptx("fence.acq_rel.sys;"))
def drain_stores() -> None:
    """Make earlier stores arrive before later ones, also where the CPU combines writes, as on BlueFlame pages."""


@op(cpu=_fence("acq_rel"), cuda=_ptx("fence.acq_rel.gpu;"))
def fence_gpu() -> None:
    """Order earlier accesses before later ones, for the threads of this GPU: release and acquire in one."""


@op(cpu=_fence("acq_rel"), cuda=_ptx("fence.acq_rel.cta;"))
def fence_cta() -> None:
    """Order earlier accesses before later ones, for the threads of this block."""


@op(cpu=_fence("acquire"), cuda=_from_sm90("fence.acquire.sys;", "fence.acq_rel.sys;"))
def fence_acquire_sys() -> None:
    """Order earlier loads before later accesses, for every agent of the system."""


@op(cpu=_fence("acquire"), cuda=_from_sm90("fence.acquire.gpu;", "fence.acq_rel.gpu;"))
def fence_acquire_gpu() -> None:
    """Order earlier loads before later accesses, for the threads of this GPU."""


@op(cpu=_fence("acquire"), cuda=_from_sm90("fence.acquire.cta;", "fence.acq_rel.cta;"))
def fence_acquire_cta() -> None:
    """Order earlier loads before later accesses, for the threads of this block."""


# --- atomics: each returns the old value ---------------------------------------------------------------------------


@op(64, 64, ret=64, cpu=_rmw("add", 64, "monotonic"), cuda=_ptx("atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_gpu64(addr: int, value: int) -> int:
    """Relaxed add at GPU scope."""


@op(64, 64, ret=64, cpu=_rmw("add", 64, "monotonic"), cuda=_ptx("atom.relaxed.cta.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_cta64(addr: int, value: int) -> int:
    """Relaxed add at block scope."""


@op(64, 64, ret=64, cpu=_rmw("add", 64), cuda=_ptx("atom.acq_rel.sys.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_sys64(addr: int, value: int) -> int:
    """Acquire-release add at system scope."""


@op(64, 64, ret=64, cpu=_rmw("umax", 64), cuda=_ptx("atom.acquire.gpu.global.max.u64 $0, [$1], $2;", 64))
def fetch_max_gpu64(addr: int, value: int) -> int:
    """Unsigned maximum, acquire, at GPU scope."""


@op(64, 64, ret=64, cpu=_rmw("umax", 64), cuda=_ptx("atom.acquire.cta.global.max.u64 $0, [$1], $2;", 64))
def fetch_max_cta64(addr: int, value: int) -> int:
    """Unsigned maximum, acquire, at block scope."""


@op(64, 64, cpu=_rmw("umax", 64), cuda=_ptx("red.relaxed.gpu.global.max.u64 [$0], $1;"))
def raise_gpu64(addr: int, value: int) -> None:
    """Unsigned maximum, relaxed, at GPU scope. It returns nothing, so no thread waits for the old value."""


@op(64, 64, ret=64, cpu=_rmw("xchg", 64), cuda=_ptx("atom.acq_rel.sys.global.exch.b64 $0, [$1], $2;", 64))
def exchange64(addr: int, value: int) -> int:
    """Swap in `value` at system scope."""


@op(64, 64, 64, ret=64, cpu=_cas(64), cuda=_ptx("atom.relaxed.gpu.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_gpu64(addr: int, expected: int, new: int) -> int:
    """Compare and swap at GPU scope."""


@op(64, 64, 64, ret=64, cpu=_cas(64), cuda=_ptx("atom.acq_rel.gpu.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_acq_rel_gpu64(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at GPU scope."""


@op(64, 32, 32, ret=32, cpu=_cas(32), cuda=_ptx("atom.acq_rel.sys.global.cas.b32 $0, [$1], $2, $3;", 32))
def cas_sys32(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at system scope."""


@op(64, 64, 64, ret=64, cpu=_cas(64), cuda=_ptx("atom.acq_rel.sys.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_sys64(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at system scope."""


# --- bulk copies ---------------------------------------------------------------------------------------------------


def _copy_words(b, dst, src, nbytes):
    """Copy 8 bytes at a time if both addresses are aligned, and the rest by bytes."""
    aligned = b.icmp_unsigned("==", b.and_(b.or_(dst, src), _INT[64](7)), _INT[64](0))
    words = b.select(aligned, b.lshr(nbytes, _INT[64](3)), _INT[64](0))
    for width, start, end in ((64, _INT[64](0), words), (8, b.shl(words, _INT[64](3)), nbytes)):
        step = _INT[64](width // 8)
        with cgutils.for_range(b, b.sub(end, start)) as loop:
            at = b.mul(b.add(loop.index, start), step)
            b.store(b.load(_ptr(b, b.add(src, at), width)), _ptr(b, b.add(dst, at), width))


def _host_register(b, register, source):
    """Store the first word last, because the NIC watches that one."""
    words = [b.load(_ptr(b, b.add(source, _INT[64](8 * i)), 64)) for i in range(8)]
    for i in range(1, 8):
        b.store(words[i], _ptr(b, b.add(register, _INT[64](8 * i)), 64))
    b.store_atomic(words[0], _ptr(b, register, 64), "release", 8)


_BULK_COPY = (
    "{.reg .b64 s; cvta.to.shared.u64 s, $1; fence.proxy.async.shared::cta;"
    " cp.async.bulk.global.shared::cta.bulk_group [$0], [s], 64;"
    " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;}"
)


def _bulk_copy(b, register, source):
    return _ptx(_BULK_COPY)(b, register, source) if _compute_capability() >= (9, 0) else None


@op(64, 64, cpu=_host_register, cuda=_bulk_copy)
def copy_to_register(register: int, source: int) -> None:
    """Write 64 bytes of the block's shared memory to a BlueFlame register, at once. Only if `has_bulk_copy`."""


@op(ret=32, cpu=lambda b: _INT[32](1), cuda=lambda b: _INT[32](int(_compute_capability() >= (9, 0))))
def has_bulk_copy() -> int:
    """Return 1 where `copy_to_register` works: on the host and from sm_90 on. Folds at compile time."""


def _prefetch(b, addr):
    flags = [_INT[32](0), _INT[32](3), _INT[32](1)]  # for reading, into all caches, data
    pointer = _ptr(b, addr, 8)
    fnty = ir.FunctionType(_VOID, [pointer.type, *(flag.type for flag in flags)])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, "llvm.prefetch.p0i8"), [pointer, *flags])


@op(64, cpu=_prefetch, cuda=_ptx("prefetch.global.L2 [$0];"))
def prefetch(addr: int) -> None:
    """Prefetch the cache line of `addr`."""


@op(64, 64, 64, cpu=lambda b, d, s, n: cgutils.raw_memcpy(b, _ptr(b, d, 8), _ptr(b, s, 8), n, 1), cuda=_copy_words)
def copy(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` from `src` to `dst`, which must not overlap."""


# --- carry-less multiplication: polynomials over GF(2), for CRCs -----------------------------------------------------
# Bit-reflected, as CRC-32 (IEEE 802.3) is: the lowest bit of the first byte is the highest power of x. On x86,
# PCLMULQDQ multiplies if the CPU has it that Numba compiles for; Numba's cache is per CPU, too.

CRC32_POLYNOMIAL = 0xEDB88320  # reflected, without x³²


def x_to_the(n: int) -> int:
    """Return x^n modulo the polynomial of CRC-32, reflected: bit 31 is the coefficient of 1. x has order 2³² - 1."""
    result, power = 1 << 31, 1 << 30
    n %= (1 << 32) - 1
    while n:
        if n & 1:
            result = _polynomial_product(result, power)
        power = _polynomial_product(power, power)
        n >>= 1
    return result


def _polynomial_product(a: int, b: int) -> int:
    product = 0
    for bit in reversed(range(32)):
        if b >> bit & 1:
            product ^= a
        a = a >> 1 ^ (CRC32_POLYNOMIAL if a & 1 else 0)
    return product


def _clmul_lanes() -> int:
    """Return the number of 64-bit products per instruction: 0 without PCLMULQDQ, 1 with it, 2 or 4 with VPCLMULQDQ."""
    compiler: Any = cpu_target.target_context
    features = compiler.codegen().magic_tuple()[-1].split(",")
    if platform.machine() != "x86_64" or "+pclmul" not in features:
        return 0
    if "+vpclmulqdq" not in features or "+avx2" not in features:
        return 1
    return 4 if "+avx512f" in features else 2


@op(ret=32, cpu=lambda b: _INT[32](int(_clmul_lanes() > 0)), cuda=lambda b: _INT[32](0))
def has_clmul() -> int:
    """Return 1 where `crc32_fold` works. Folds at compile time."""


_PAIR = ir.VectorType(_INT[64], 2)
_PCLMULQDQ = {2: "llvm.x86.pclmulqdq", 4: "llvm.x86.pclmulqdq.256", 8: "llvm.x86.pclmulqdq.512"}


def _pclmul(b, x, y, halves):
    """Multiply a half of `x` and one of `y` in each lane. Bit 0 of `halves` selects that of `x`, bit 4 that of `y`."""
    fnty = ir.FunctionType(x.type, [x.type, x.type, _INT[8]])
    return b.call(b.module.declare_intrinsic(_PCLMULQDQ[x.type.count], (), fnty), [x, y, _INT[8](halves)])


def _clmul(b, x, y):
    if _clmul_lanes():
        x, y = (b.insert_element(ir.Constant(_PAIR, [0, 0]), v, _INT[32](0)) for v in (x, y))
        return b.extract_element(_pclmul(b, x, y, 0x00), _INT[32](0))
    return _clmul_by_bits(b, x, y)


def _clmul_by_bits(b, x, y):
    product = cgutils.alloca_once_value(b, _INT[64](0))
    with cgutils.for_range(b, _INT[64](64)) as loop:
        bit = b.and_(b.lshr(y, loop.index), _INT[64](1))
        term = b.and_(b.shl(x, loop.index), b.sub(_INT[64](0), bit))
        b.store(b.xor(b.load(product), term), product)
    return b.load(product)


@op(64, 64, ret=64, cpu=_clmul, cuda=_clmul_by_bits)
def clmul(a: int, b: int) -> int:
    """Return the lower 64 bits of the carry-less product."""


def _fold(b, x, nbytes):
    """Fold each lane `nbytes` forward (Gopal et al., Intel 323102, for reflected CRCs)."""
    halves = [x_to_the(8 * nbytes + 32) << 1, x_to_the(8 * nbytes - 32) << 1]
    constants = ir.Constant(x.type, halves * (x.type.count // 2))
    return b.xor(_pclmul(b, x, constants, 0x00), _pclmul(b, x, constants, 0x11))


def _crc32_fold(b, initial, address, nbytes):
    lanes = _clmul_lanes()
    if not lanes:
        return _INT[64](0)

    def load(at, lanes=1):
        return b.load(b.inttoptr(at, ir.VectorType(_INT[64], 2 * lanes).as_pointer()), align=1)

    def first(lanes=1):
        zero = ir.Constant(ir.VectorType(_INT[64], 2 * lanes), [0] * 2 * lanes)
        return b.xor(load(address, lanes), b.insert_element(zero, initial, _INT[32](0)))

    def fold_all(x, at, lanes):
        """Fold the rest, from `at` to `end`, into `x`, in steps of the size of `x`."""
        last = b.sub(end, _INT[64](16 * lanes))
        with _while(b, lambda: b.icmp_unsigned("<=", b.load(at), last)):
            b.store(b.xor(_fold(b, b.load(x), 16 * lanes), load(b.load(at), lanes)), x)
            b.store(b.add(b.load(at), _INT[64](16 * lanes)), at)

    end = b.add(address, nbytes)
    x = cgutils.alloca_once_value(b, first())
    at = cgutils.alloca_once_value(b, b.add(address, _INT[64](16)))

    step = 64 * lanes
    with b.if_then(b.icmp_unsigned(">=", nbytes, _INT[64](step))):
        # Four streams hide the latency of a product, several cycles. Only they are live in this loop.
        wide = [first(lanes)] + [load(b.add(address, _INT[64](16 * lanes * i)), lanes) for i in (1, 2, 3)]
        streams = [cgutils.alloca_once_value(b, value) for value in wide]
        b.store(b.add(address, _INT[64](step)), at)
        last = b.sub(end, _INT[64](step))
        with _while(b, lambda: b.icmp_unsigned("<=", b.load(at), last)):
            for i, stream in enumerate(streams):
                data = load(b.add(b.load(at), _INT[64](16 * lanes * i)), lanes)
                b.store(b.xor(_fold(b, b.load(stream), step), data), stream)
            b.store(b.add(b.load(at), _INT[64](step)), at)
        for stream in streams[1:]:
            b.store(b.xor(_fold(b, b.load(streams[0]), 16 * lanes), b.load(stream)), streams[0])
        if lanes > 1:
            fold_all(streams[0], at, lanes)
        whole = b.load(streams[0])
        for i in range(lanes):
            lane = b.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(_INT[32], 2), [2 * i, 2 * i + 1]))
            b.store(lane if i == 0 else b.xor(_fold(b, b.load(x), 16), lane), x)

    fold_all(x, at, 1)
    rest = b.sub(end, b.load(at))
    with b.if_then(b.icmp_unsigned("!=", rest, _INT[64](0))):
        # `rest` bytes are left. The bytes of x that lie before the last 16 are folded forward. The other bytes of x
        # join the bytes that are left.
        bits = b.shl(b.zext(rest, _INT[128]), _INT[128](3))
        others = b.sub(_INT[128](128), bits)
        whole = b.bitcast(b.load(x), _INT[128])
        carried = b.bitcast(b.shl(whole, others), _PAIR)
        left = b.shl(b.lshr(b.bitcast(load(b.sub(end, _INT[64](16))), _INT[128]), others), others)
        b.store(b.xor(_fold(b, carried, 16), b.bitcast(b.or_(b.lshr(whole, bits), left), _PAIR)), x)

    # Reduce 128 bits to 96, and these to 64. The bytes are followed by 32 zero bits, as in any CRC.
    to_96, to_64 = (ir.Constant(_PAIR, [x_to_the(bits) << 1, 0]) for bits in (96, 64))
    x = b.load(x)
    high = b.zext(b.extract_element(x, _INT[32](1)), _INT[128])
    x = b.xor(b.bitcast(_pclmul(b, x, to_96, 0x00), _INT[128]), high)
    low = b.bitcast(b.and_(x, _INT[128](0xFFFF_FFFF)), _PAIR)
    x = b.xor(b.bitcast(_pclmul(b, low, to_64, 0x00), _INT[128]), b.lshr(x, _INT[128](32)))
    return b.trunc(x, _INT[64])


@contextlib.contextmanager
def _while(b, condition):
    """Emit a loop that tests first and has one branch per turn."""
    body, after = b.append_basic_block("body"), b.append_basic_block("after")
    b.cbranch(condition(), body, after)
    b.position_at_end(body)
    yield
    b.cbranch(condition(), body, after)
    b.position_at_end(after)


@op(64, 64, 64, ret=64, cpu=_crc32_fold, cuda=lambda b, *args: _INT[64](0))
def crc32_fold(initial: int, address: int, nbytes: int) -> int:
    """Reduce at least 16 bytes, followed by 32 zero bits, to 64 bits that are congruent modulo the polynomial.

    `initial`, the CRC register so far, is XORed into the first 8 bytes. Only if `has_clmul`.
    """


# --- C functions ---------------------------------------------------------------------------------------------------

NO_CALLS = 801  # what a call returns on CUDA: CUDA_ERROR_NOT_SUPPORTED


def _call(b, function, *args):
    fnty = ir.FunctionType(_INT[32], [a.type for a in args])
    return b.call(b.inttoptr(function, fnty.as_pointer()), args)


@op(64, 64, 64, 64, 64, ret=32, cpu=_call, cuda=lambda b, *args: _INT[32](NO_CALLS))
def call_c(function: int, a: int, b: int, c: int, d: int) -> int:
    """Call the C function at an address, and return its `int`. One with fewer parameters ignores the rest (psABI).

    Load the address from memory, never from a global: Numba would freeze a global into its cache.
    """


# --- time and patience ---------------------------------------------------------------------------------------------

CLOCK_MONOTONIC = 1


def _clock_gettime(b):
    timespec = cgutils.alloca_once(b, ir.LiteralStructType([_INT[64], _INT[64]]))
    where = b.bitcast(timespec, _INT[8].as_pointer())
    _extern(b, "clock_gettime", _INT[32], [_INT[32](CLOCK_MONOTONIC), where])
    seconds, nanos = (b.load(b.gep(timespec, [_INT[32](0), _INT[32](i)])) for i in (0, 1))
    return b.add(b.mul(seconds, _INT[64](1_000_000_000)), nanos)


@op(ret=64, cpu=_clock_gettime, cuda=_ptx("mov.u64 $0, %globaltimer;", 64))
def clock_ns() -> int:
    """Return the ns of a monotonic clock: CLOCK_MONOTONIC or %globaltimer (`doca_gpu_dev_verbs_query_globaltimer`)."""


def _pause(b):
    if platform.machine() == "x86_64":
        return _llvm("llvm.x86.sse2.pause")(b)
    return b.fence("acquire")  # there is no portable hint; a fence at least keeps loads in the loop


@op(cpu=_pause, cuda=_ptx("nanosleep.u32 20;"))
def pause() -> None:
    """Hint to the core that this is a spin loop."""


@op(cpu=lambda b: _extern(b, "sched_yield", _INT[32], []), cuda=_ptx("nanosleep.u32 100;"))
def yield_thread() -> None:
    """Let another thread run. Host threads that wait must do this, because there are more of them than cores."""


# --- who am I, and the group I belong to ---------------------------------------------------------------------------
# On the host, identity comes from a record that the launcher leaves in pthread-specific data (host_threads.py). The key
# is read from memory by symbol, never frozen into compiled code, which another process may load from the cache.


THREAD_KEY_SYMBOL = "gpunetio_thread_key"


def _thread_word(index) -> Emit:
    def emit(b):
        key = b.module.globals.get(THREAD_KEY_SYMBOL) or ir.GlobalVariable(b.module, _INT[32], THREAD_KEY_SYMBOL)
        record = _extern(b, "pthread_getspecific", _INT[64].as_pointer(), [b.load(key)])
        return b.load(b.gep(record, [_INT[32](index)]))

    return emit


def _special(register) -> Emit:
    return _ptx(f"mov.u32 $0, %{register};", 32, pure=True)


def _word_or_register(index, register) -> dict[str, Emit]:
    word = _thread_word(index)
    return {"cpu": lambda b: b.trunc(word(b), _INT[32]), "cuda": _special(register)}


@op(ret=32, **_word_or_register(0, "tid.x"))
def thread_idx() -> int:
    """Return the index of the thread in its block (threadIdx.x)."""


@op(ret=32, **_word_or_register(1, "ctaid.x"))
def block_idx() -> int:
    """Return the index of the block in the grid (blockIdx.x)."""


@op(ret=32, **_word_or_register(2, "ntid.x"))
def block_dim() -> int:
    """Return the number of threads in a block (blockDim.x)."""


@op(ret=32, **_word_or_register(3, "nctaid.x"))
def grid_dim() -> int:
    """Return the number of blocks in the grid (gridDim.x)."""


@op(ret=32, **_word_or_register(4, "laneid"))
def lane_id() -> int:
    """Return the lane of the thread in its warp (`doca_gpu_dev_verbs_get_lane_id`)."""


@op(ret=32, cpu=lambda b: b.trunc(_thread_word(5)(b), _INT[32]), cuda=lambda b: _INT[32](32))
def warp_size() -> int:
    """Return the number of threads in a warp: 32 on CUDA, a choice of the launch on the host."""


@op(ret=64, cpu=_thread_word(6), cuda=lambda b: _INT[64](0))
def _warp_group() -> int:
    """Return the address of the warp's barrier. Host only (host_threads.py)."""


@op(ret=64, cpu=_thread_word(7), cuda=lambda b: _INT[64](0))
def _block_group() -> int:
    """Return the address of the block's barrier. Host only (host_threads.py)."""


BLOCK_SLOT = 128  # bytes
GROUP_HEADER = 8  # words of a host group before the slot
GROUP_WORDS = GROUP_HEADER + BLOCK_SLOT // 8
_CPU_ONLY = 1


@op(ret=32, cpu=lambda b: _INT[32](_CPU_ONLY), cuda=lambda b: _INT[32](0))
def on_host() -> int:
    """Return 1 in code compiled for the CPU, 0 on CUDA. Folds at compile time."""


_nothing: Emit = lambda b, *args: None  # noqa: E731


def _shared_slot(b):
    """Return the generic address of the block's variable in shared memory."""
    name, slot = "gpunetio_shared_slot", ir.ArrayType(_INT[8], BLOCK_SLOT)
    variable: Any = b.module.globals.get(name)
    if variable is None:
        variable = cgutils.add_global_variable(b.module, slot, name, addrspace=3)
        variable.linkage, variable.align, variable.initializer = "internal", 128, ir.Constant(slot, ir.Undefined)
    return b.ptrtoint(b.addrspacecast(variable, slot.as_pointer(), "generic"), _INT[64])


@op(ret=64, cpu=lambda b: b.add(_thread_word(7)(b), _INT[64](8 * GROUP_HEADER)), cuda=_shared_slot)
def _block_slot() -> int: ...


@device_function
def block_slot():
    """Return the address of 128 bytes that the threads of a block share.

    The first 64 are free for any use, for example a WQE for BlueFlame. `block_broadcast` uses the others.
    """
    return _block_slot()  # only here: each function that contains it gets a variable of its own


@op(cpu=_nothing, cuda=_ptx("bar.sync 0;", convergent=True))
def _cuda_block_sync() -> None: ...


@op(cpu=_nothing, cuda=_ptx("bar.warp.sync 0xffffffff;", convergent=True))
def _cuda_warp_sync() -> None: ...


_SHFL64 = (
    "{.reg .b32 l, h; mov.b64 {l, h}, $1; shfl.sync.idx.b32 l, l, $2, 31, 0xffffffff;"
    " shfl.sync.idx.b32 h, h, $2, 31, 0xffffffff; mov.b64 $0, {l, h};}"
)


@op(64, 32, ret=64, cpu=lambda b, value, lane: value, cuda=_ptx(_SHFL64, 64, convergent=True))
def _cuda_warp_broadcast(value: int, lane: int) -> int: ...


# --- lanes that run together ---------------------------------------------------------------------------------------
# Threads of a CUDA warp that are converged at some point of the program can act as one. Host threads never are.


@op(ret=32, cpu=lambda b: _INT[32](1), cuda=_ptx("activemask.b32 $0;", 32, convergent=True))
def _active_lanes() -> int: ...


@op(32, 64, ret=32, cpu=lambda b, lanes, value: lanes,
    cuda=_ptx("match.any.sync.b64 $0, $2, $1;", 32, convergent=True))  # fmt: skip
def _match(lanes: int, value: int) -> int: ...


@device_function
def converged_lanes(value):
    """Return the mask of lanes that are converged here and have the same `value`; on the host, only this thread."""
    return 1 if on_host() else _match(_active_lanes(), value)


@device_function
def lanes_with(lanes, value):
    """Return the lanes of a mask that have the same `value` as this one. All lanes of the mask call this."""
    return lanes if on_host() else _match(lanes, value)


@op(32, ret=32, cpu=_llvm("llvm.ctpop", _INT[32]), cuda=_ptx("popc.b32 $0, $1;", 32, pure=True))
def count_lanes(lanes: int) -> int:
    """Return the number of lanes in a mask."""


@op(32, ret=32, cpu=lambda b, lanes: _INT[32](0),
    cuda=_ptx("{.reg .b32 m; mov.u32 m, %lanemask_lt; and.b32 m, m, $1; popc.b32 $0, m;}", 32, pure=True))  # fmt: skip
def rank_among(lanes: int) -> int:
    """Return the number of lanes of a mask that are below this one."""


@op(32, cpu=_nothing, cuda=_ptx("bar.warp.sync $0;", convergent=True))
def sync_lanes(lanes: int) -> None:
    """Wait for the lanes of a mask, which all call this. Each lane then sees what the others have stored."""


_SHFL64_FIRST = (
    "{.reg .b32 l, h, f; brev.b32 f, $2; bfind.shiftamt.u32 f, f; mov.b64 {l, h}, $1;"
    " shfl.sync.idx.b32 l, l, f, 31, $2; shfl.sync.idx.b32 h, h, f, 31, $2; mov.b64 $0, {l, h};}"
)


@op(64, 32, ret=64, cpu=lambda b, value, lanes: value, cuda=_ptx(_SHFL64_FIRST, 64, convergent=True))
def from_first(value: int, lanes: int) -> int:
    """Return the `value` of the lowest lane of a mask in all its lanes."""


# --- synchronisation within a group --------------------------------------------------------------------------------
# A host group is a record of int64 words: arrived, generation, size, value. The slot of a block follows.

_GENERATION, _SIZE, _VALUE = 8, 16, 24
_BROADCAST = 64  # in the slot


@device_function
def _host_barrier(group):
    generation = ld_relaxed64(group + _GENERATION)
    if fetch_add_sys64(group, 1) + 1 == ld64(group + _SIZE):
        st64(group, 0)
        st_release64(group + _GENERATION, generation + 1)
    else:
        while ld_acquire64(group + _GENERATION) == generation:
            yield_thread()


@device_function
def block_sync():
    """Wait for every thread of the block (`__syncthreads`)."""
    if on_host():
        if block_dim() > 1:
            _host_barrier(_block_group())
    else:
        _cuda_block_sync()


@device_function
def warp_sync():
    """Wait for every lane of the warp (`__syncwarp`)."""
    if on_host():
        if warp_size() > 1:
            _host_barrier(_warp_group())
    else:
        _cuda_warp_sync()


@device_function
def warp_broadcast(value, lane):
    """Return the `value` of lane `lane` in every lane of the warp (`__shfl_sync`)."""
    if on_host():
        if warp_size() == 1:
            return value
        group = _warp_group()
        if lane_id() == lane:
            st64(group + _VALUE, value)
        _host_barrier(group)
        value = ld64(group + _VALUE)
        _host_barrier(group)
        return value
    return _cuda_warp_broadcast(value, lane)


@device_function
def block_broadcast(value, thread):
    """Return the `value` of thread `thread` in every thread of the block."""
    if block_dim() == 1:
        return value
    slot = block_slot() + _BROADCAST
    if thread_idx() == thread:
        st64(slot, value)
    block_sync()
    value = ld64(slot)
    block_sync()  # all have read it before the next broadcast
    return value


@device_function
def global_id():
    """Return the index of the thread in the whole launch."""
    return block_idx() * block_dim() + thread_idx()
