"""Copies: bulk, into a register of the NIC, and prefetches."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from .lowering import INT, VOID, compute_capability, op, ptr, ptx


def _copy_words(b, dst, src, nbytes):
    """Copy 8 bytes at a time if both addresses are aligned, and the rest by bytes."""
    aligned = b.icmp_unsigned("==", b.and_(b.or_(dst, src), INT[64](7)), INT[64](0))
    words = b.select(aligned, b.lshr(nbytes, INT[64](3)), INT[64](0))
    for width, start, end in ((64, INT[64](0), words), (8, b.shl(words, INT[64](3)), nbytes)):
        step = INT[64](width // 8)
        with cgutils.for_range(b, b.sub(end, start)) as loop:
            at = b.mul(b.add(loop.index, start), step)
            b.store(b.load(ptr(b, b.add(src, at), width)), ptr(b, b.add(dst, at), width))


def _host_register(b, register, source):
    """Store the first word last, because the NIC watches that one."""
    words = [b.load(ptr(b, b.add(source, INT[64](8 * i)), 64)) for i in range(8)]
    for i in range(1, 8):
        b.store(words[i], ptr(b, b.add(register, INT[64](8 * i)), 64))
    b.store_atomic(words[0], ptr(b, register, 64), "release", 8)


_BULK_COPY = (
    "{.reg .b64 s; cvta.to.shared.u64 s, $1; fence.proxy.async.shared::cta;"
    " cp.async.bulk.global.shared::cta.bulk_group [$0], [s], 64;"
    " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;}"
)


def _bulk_copy(b, register, source):
    return ptx(_BULK_COPY)(b, register, source) if compute_capability() >= (9, 0) else None


@op(64, 64, cpu=_host_register, cuda=_bulk_copy)
def copy_to_register(register: int, source: int) -> None:
    """Write 64 bytes of the block's shared memory to a BlueFlame register, at once. Only if `has_bulk_copy`."""


@op(ret=32, cpu=lambda b: INT[32](1), cuda=lambda b: INT[32](int(compute_capability() >= (9, 0))))
def has_bulk_copy() -> int:
    """Return 1 where `copy_to_register` works: on the host and from sm_90 on. Folds at compile time."""


def _prefetch(b, addr):
    flags = [INT[32](0), INT[32](3), INT[32](1)]  # for reading, into all caches, data
    pointer = ptr(b, addr, 8)
    fnty = ir.FunctionType(VOID, [pointer.type, *(flag.type for flag in flags)])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, "llvm.prefetch.p0i8"), [pointer, *flags])


@op(64, cpu=_prefetch, cuda=ptx("prefetch.global.L2 [$0];"))
def prefetch(addr: int) -> None:
    """Prefetch the cache line of `addr`."""


@op(64, 64, 64, cpu=lambda b, d, s, n: cgutils.raw_memcpy(b, ptr(b, d, 8), ptr(b, s, 8), n, 1), cuda=_copy_words)
def copy(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` from `src` to `dst`, which must not overlap."""
