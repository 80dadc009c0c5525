"""Copies in bulk and into a register of the NIC, and prefetches."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir

from .lowering import INT, VOID, Emit, compute_capability, counted, declared, move, nothing, op, ptr, ptx


def _copy_words(b, dst, src, nbytes):
    """Copy as many bytes at a time as both addresses allow (headers are at even addresses), then the rest."""
    both, done = b.or_(dst, src), INT[64](0)
    for width in (64, 16, 8):
        size = INT[64](width // 8)
        aligned = b.icmp_unsigned("==", b.and_(both, INT[64](width // 8 - 1)), INT[64](0))
        end = b.select(aligned, b.and_(nbytes, INT[64](-(width // 8))), done)
        with counted(b, b.udiv(b.sub(end, done), size)) as index:
            at = b.add(done, b.mul(index, size))
            b.store(b.load(ptr(b, b.add(src, at), width)), ptr(b, b.add(dst, at), width))
        done = end


def _host_register(b, register, source):
    """Store the first word last, because the NIC watches that word."""
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
    """Write 64 bytes of the block's shared memory to a BlueFlame register in one store. Only if `has_bulk_copy`."""


@op(ret=32, cpu=lambda b: INT[32](1), cuda=lambda b: INT[32](int(compute_capability() >= (9, 0))))
def has_bulk_copy() -> int:
    """Return 1 where `copy_to_register` works: on the host and from sm_90 on. Folds at compile time."""


def _prefetch(writing) -> Emit:
    def emit(b, addr):
        flags = [INT[32](writing), INT[32](3), INT[32](1)]  # into all caches, data
        pointer = ptr(b, addr, 8)
        fnty = ir.FunctionType(VOID, [pointer.type, *(flag.type for flag in flags)])
        return b.call(declared(b, fnty, "llvm.prefetch.p0"), [pointer, *flags])

    return emit


@op(64, cpu=_prefetch(0), cuda=ptx("prefetch.global.L2 [$0];"))
def prefetch(addr: int) -> None:
    """Prefetch the cache line of `addr`."""


@op(64, cpu=_prefetch(1), cuda=lambda b, addr: None)
def prefetch_to_write(addr: int) -> None:
    """Prefetch the cache line of `addr` for a store, on the host. Do nothing on a GPU, which sends stores to memory."""


@op(64, 64, 64, cpu=lambda b, d, s, n: move(b, d, s, n), cuda=_copy_words)
def copy(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` from `src` to `dst`, which must not overlap."""


def _move_lines(count, bounded) -> dict[str, Emit]:
    """Move `count` pieces of 16 bytes: load all, then store all, so that the loads are in flight together."""
    registers = ", ".join(f"v{i}" for i in range(2 * count))
    steps = [f".reg .pred p<{count}>; .reg .b64 d, s, {registers}; mov.b64 d, $0; mov.b64 s, $1;"]
    for i in range(count):
        only = f"@p{i} " if bounded else ""
        steps += [f"setp.lt.u64 p{i}, s, $3;"] * bounded
        steps += [f"{only}ld.global.L1::no_allocate.v2.b64 {{v{2 * i}, v{2 * i + 1}}}, [s]; add.s64 s, s, $2;"]
    for i in range(count):
        only = f"@p{i} " if bounded else ""
        steps += [f"{only}st.global.v2.b64 [d], {{v{2 * i}, v{2 * i + 1}}}; add.s64 d, d, $2;"]

    def on_cpu(b, dst, src, stride, *end):
        for i in range(count):
            at = b.mul(stride, INT[64](i))
            here = b.add(src, at)
            inside = b.icmp_unsigned("<", here, end[0]) if end else INT[1](1)
            with b.if_then(inside):
                move(b, b.add(dst, at), here, INT[64](16))

    return {"cpu": on_cpu, "cuda": ptx(f"{{{' '.join(steps)}}}")}


@op(64, 64, 64, **_move_lines(4, bounded=False))
def move_4_lines(dst: int, src: int, stride: int) -> None:
    """Copy 4 pieces of 16 bytes of global memory, `stride` bytes apart, between aligned addresses."""


@op(64, 64, 64, 64, **_move_lines(8, bounded=True))
def move_8_lines(dst: int, src: int, stride: int, end: int) -> None:
    """Copy up to 8 pieces like `move_4_lines`: those that begin before the address `end` of the source."""


_FETCH = "{.reg .b64 s; cvta.to.shared.u64 s, $0; cp.async.cg.shared.global [s], [$1], 16;}"


@op(64, 64, cpu=lambda b, d, s: move(b, d, s, INT[64](16)), cuda=ptx(_FETCH))
def fetch_line(dst: int, src: int) -> None:
    """Start to copy 16 bytes to the block's shared memory, between aligned addresses (`cp.async`)."""


@op(cpu=nothing, cuda=ptx("cp.async.wait_all;"))
def await_fetched() -> None:
    """Wait until everything that this thread has started to fetch is in place."""
