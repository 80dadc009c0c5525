"""Time, and ways to wait."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import platform

from llvmlite import ir

from .lowering import INT, Llvm, extern, llvm, nothing, op, ptx, stack

CLOCK_MONOTONIC = 1
_TIMESPEC: Llvm = ir.LiteralStructType([INT[64], INT[64]])
_SECOND = 1_000_000_000  # ns

# futex(2). glibc has no function for it, and syscall(2) takes the number that the architecture defines.
_SYS_FUTEX = {"x86_64": 202}.get(platform.machine(), 98)
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_ALL = (1 << 31) - 1


def _clock_gettime(b):
    timespec = stack(b, _TIMESPEC)
    where = b.bitcast(timespec, INT[8].as_pointer())
    extern(b, "clock_gettime", INT[32], [INT[32](CLOCK_MONOTONIC), where])
    seconds, nanos = (b.load(b.gep(timespec, [INT[32](0), INT[32](i)])) for i in (0, 1))
    return b.add(b.mul(seconds, INT[64](_SECOND)), nanos)


@op(ret=64, cpu=_clock_gettime, cuda=ptx("mov.u64 $0, %globaltimer;", 64))
def clock_ns() -> int:
    """Return the ns of a monotonic clock, CLOCK_MONOTONIC or %globaltimer (`doca_gpu_dev_verbs_query_globaltimer`)."""


def _pause(b):
    if platform.machine() == "x86_64":
        return llvm("llvm.x86.sse2.pause")(b)
    return b.fence("acquire")  # there is no portable hint; a fence at least keeps loads in the loop


@op(cpu=_pause, cuda=ptx("nanosleep.u32 20;"))
def pause() -> None:
    """Hint to the core that this is a spin loop."""


@op(cpu=lambda b: extern(b, "sched_yield", INT[32], []), cuda=ptx("nanosleep.u32 100;"))
def yield_thread() -> None:
    """Let another thread run. Host threads that wait must do this, because there may be more threads than cores."""


def _timespec(b, nanos):
    timespec = stack(b, _TIMESPEC)
    for i, part in enumerate((b.udiv, b.urem)):
        b.store(part(nanos, INT[64](_SECOND)), b.gep(timespec, [INT[32](0), INT[32](i)]))
    return b.ptrtoint(timespec, INT[64])


def _nanosleep(b, nanos):
    extern(b, "nanosleep", INT[32], [_timespec(b, nanos), INT[64](0)])


@op(64, cpu=_nanosleep, cuda=nothing)
def sleep_ns(nanos: int) -> None:
    """Sleep; a signal ends the sleep early. Return immediately on CUDA."""


def _futex(b, *args):
    extern(b, "syscall", INT[64], [INT[64](_SYS_FUTEX), *args])


def _futex_wait(b, word, expected, nanos):
    _futex(b, word, INT[64](_FUTEX_WAIT_PRIVATE), expected, _timespec(b, nanos))


def _futex_wake(b, word):
    _futex(b, word, INT[64](_FUTEX_WAKE_PRIVATE), INT[64](_ALL), INT[64](0))


@op(64, 64, 64, cpu=_futex_wait, cuda=nothing)
def futex_wait(word: int, expected: int, nanos: int) -> None:
    """Sleep until `futex_wake(word)`, for `nanos` at most, if the 32 bits at `word` are `expected`.

    A signal ends the sleep early. Return immediately on CUDA.
    """


@op(64, cpu=_futex_wake, cuda=nothing)
def futex_wake(word: int) -> None:
    """Wake all threads of this process that sleep at a word. Do nothing on CUDA."""
