"""Time, and ways to wait."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import platform

from llvmlite import ir
from numba.core import cgutils

from .lowering import INT, extern, llvm, op, ptx

CLOCK_MONOTONIC = 1


def _clock_gettime(b):
    timespec = cgutils.alloca_once(b, ir.LiteralStructType([INT[64], INT[64]]))
    where = b.bitcast(timespec, INT[8].as_pointer())
    extern(b, "clock_gettime", INT[32], [INT[32](CLOCK_MONOTONIC), where])
    seconds, nanos = (b.load(b.gep(timespec, [INT[32](0), INT[32](i)])) for i in (0, 1))
    return b.add(b.mul(seconds, INT[64](1_000_000_000)), nanos)


@op(ret=64, cpu=_clock_gettime, cuda=ptx("mov.u64 $0, %globaltimer;", 64))
def clock_ns() -> int:
    """Return the ns of a monotonic clock: CLOCK_MONOTONIC or %globaltimer (`doca_gpu_dev_verbs_query_globaltimer`)."""


def _pause(b):
    if platform.machine() == "x86_64":
        return llvm("llvm.x86.sse2.pause")(b)
    return b.fence("acquire")  # there is no portable hint; a fence at least keeps loads in the loop


@op(cpu=_pause, cuda=ptx("nanosleep.u32 20;"))
def pause() -> None:
    """Hint to the core that this is a spin loop."""


@op(cpu=lambda b: extern(b, "sched_yield", INT[32], []), cuda=ptx("nanosleep.u32 100;"))
def yield_thread() -> None:
    """Let another thread run. Host threads that wait must do this, because there are more of them than cores."""
