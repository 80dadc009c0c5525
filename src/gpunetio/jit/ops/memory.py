"""Loads, stores, and byte order."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir

from ..targets import SWAP_PTX
from .lowering import (
    INT,
    Emit,
    Load,
    Store,
    compute_capability,
    from_sm90,
    llvm,
    load,
    op,
    ptx,
    ptx_load,
    ptx_store,
    store,
)


def _load_op(name, width, order, how, doc):
    def stub(addr: int) -> int: ...

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = doc
    cuda = load(width) if how is None else ptx_load(how, width)
    return op(64, ret=width, cpu=load(width, order), cuda=cuda)(stub)


def _store_op(name, width, order, how, doc):
    def stub(addr: int, value: int) -> None: ...

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = doc
    cuda = store(width) if how is None else ptx_store(how, width)
    return op(64, width, cpu=store(width, order), cuda=cuda)(stub)


ld8: Load = _load_op("ld8", 8, None, None, "Plain 8-bit load.")
ld16: Load = _load_op("ld16", 16, None, None, "Plain 16-bit load.")
ld32: Load = _load_op("ld32", 32, None, None, "Plain 32-bit load.")
ld64: Load = _load_op("ld64", 64, None, None, "Plain 64-bit load.")
st8: Store = _store_op("st8", 8, None, None, "Plain 8-bit store.")
st16: Store = _store_op("st16", 16, None, None, "Plain 16-bit store.")
st32: Store = _store_op("st32", 32, None, None, "Plain 32-bit store.")
st64: Store = _store_op("st64", 64, None, None, "Plain 64-bit store.")



# The compiler may move pure inline PTX out of loops, which makes these loads cheap after fences. It may also move them
# ahead of a check of the address, as in `if queue != 0`. So a value that cannot be an address is not dereferenced.
_NO_ADDRESS_BELOW, _ADDRESSES = 1 << 16, 1 << 56


def _fixed_op(name, width):
    def stub(addr: int) -> int: ...

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = (
        f"{width}-bit load of memory that does not change while the kernel runs: the compiler may keep the value and "
        "move the load, also across fences, and the load goes through the non-coherent cache."
    )
    how = ptx(
        f"{{.reg .pred p; .reg .b64 t; sub.u64 t, $1, {_NO_ADDRESS_BELOW}; setp.lt.u64 p, t, {_ADDRESSES}; "
        f"mov.u{width} $0, 0; @p ld.global.nc.u{width} $0, [$1];}}",
        width, pure=True,
    )
    return op(64, ret=width, cpu=load(width), cuda=how)(stub)


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
ld_acquire_cta64: Load = _load_op(
    "ld_acquire_cta64", 64, "acquire", "ld.acquire.cta", "Block-scope acquire load, of any memory."
)
st_release_cta64: Store = _store_op(
    "st_release_cta64", 64, "release", "st.release.cta", "Block-scope release store, to any memory."
)


def _mmio_release(b, addr, value):
    new = ptx("st.async.mmio.release.sys.global.b64 [$0], $1;")
    fence, store = from_sm90("fence.release.sys;", "fence.acq_rel.sys;"), ptx_store("st.mmio.relaxed.sys.global", 64)
    if compute_capability() >= (10, 0):
        return new(b, addr, value)
    fence(b)
    return store(b, addr, value)


@op(64, 64, cpu=store(64, "release"), cuda=_mmio_release)
def st_mmio_release64(addr: int, value: int) -> None:
    """Store to a doorbell register after all earlier accesses. From sm_100 on, the thread does not wait for them
    (`doca_gpu_dev_verbs_async_store_release`)."""


st_mmio64: Store = _store_op(
    "st_mmio64", 64, "monotonic", "st.mmio.relaxed.sys.global", "Store to a doorbell register."
)


def _store_pair(b, addr, low, high):
    vector = ir.VectorType(INT[64], 2)
    value = b.insert_element(ir.Constant(vector, ir.Undefined), low, INT[32](0))
    b.store(b.insert_element(value, high, INT[32](1)), b.inttoptr(addr, vector.as_pointer()), align=16)


@op(64, 64, 64, cpu=_store_pair, cuda=ptx("st.cs.v2.b64 [$0], {$1, $2};"))
def st128(addr: int, low: int, high: int) -> None:
    """Store 16 bytes to an aligned address in any memory. On CUDA the store streams, because the NIC reads it next."""


_SWAP: dict[int, dict[str, Emit]] = {
    16: {"cpu": llvm("llvm.bswap", INT[16]), "cuda": llvm("llvm.bswap", INT[16])},
    32: {"cpu": llvm("llvm.bswap", INT[32]), "cuda": ptx(SWAP_PTX[32], 32, pure=True)},
    64: {"cpu": llvm("llvm.bswap", INT[64]), "cuda": ptx(SWAP_PTX[64], 64, pure=True)},
}


@op(16, ret=16, **_SWAP[16])
def be16(value: int) -> int:
    """Swap the bytes of a 16-bit value."""


@op(32, ret=32, **_SWAP[32])
def be32(value: int) -> int:
    """Swap the bytes of a 32-bit value."""


@op(64, ret=64, **_SWAP[64])
def be64(value: int) -> int:
    """Swap the bytes of a 64-bit value."""


def _pack(b, low, high):
    return b.or_(b.zext(low, INT[64]), b.shl(b.zext(high, INT[64]), INT[64](32)))


@op(32, 32, ret=64, cpu=_pack, cuda=ptx("mov.b64 $0, {$1, $2};", 64, pure=True))
def pack64(low: int, high: int) -> int:
    """Combine two 32-bit words into a 64-bit value whose store puts `low` at the lower address."""
