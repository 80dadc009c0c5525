"""Atomics. Each returns the old value."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from .lowering import cas, op, ptx, rmw


@op(64, 64, ret=64, cpu=rmw("add", 64, "monotonic"), cuda=ptx("atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_gpu64(addr: int, value: int) -> int:
    """Add, relaxed, at GPU scope."""


@op(64, 64, ret=64, cpu=rmw("add", 64, "monotonic"), cuda=ptx("atom.relaxed.cta.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_cta64(addr: int, value: int) -> int:
    """Add, relaxed, at block scope."""


@op(64, 64, ret=64, cpu=rmw("add", 64), cuda=ptx("atom.acq_rel.cta.add.u64 $0, [$1], $2;", 64))
def fetch_add_acq_rel_cta64(addr: int, value: int) -> int:
    """Add, acquire-release, at block scope, in any memory."""


@op(64, 64, ret=64, cpu=rmw("add", 64), cuda=ptx("atom.acq_rel.sys.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_sys64(addr: int, value: int) -> int:
    """Add, acquire-release, at system scope."""


@op(64, 64, ret=64, cpu=rmw("umax", 64), cuda=ptx("atom.acquire.gpu.global.max.u64 $0, [$1], $2;", 64))
def fetch_max_gpu64(addr: int, value: int) -> int:
    """Take the unsigned maximum, acquire, at GPU scope."""


@op(64, 64, ret=64, cpu=rmw("umax", 64), cuda=ptx("atom.acquire.cta.global.max.u64 $0, [$1], $2;", 64))
def fetch_max_cta64(addr: int, value: int) -> int:
    """Take the unsigned maximum, acquire, at block scope."""


@op(64, 64, cpu=rmw("umax", 64), cuda=ptx("red.relaxed.gpu.global.max.u64 [$0], $1;"))
def raise_gpu64(addr: int, value: int) -> None:
    """Take the unsigned maximum, relaxed, at GPU scope. Return nothing, so that no thread waits for the old value."""


@op(64, 64, ret=64, cpu=rmw("xchg", 64), cuda=ptx("atom.acq_rel.sys.global.exch.b64 $0, [$1], $2;", 64))
def exchange64(addr: int, value: int) -> int:
    """Swap in `value` at system scope."""


# A GPU does not execute atomics of system scope on host memory, unless its bus supports them. Atomics of GPU scope are
# atomic for its threads, wherever the memory is.


@op(64, 64, ret=64, cpu=rmw("xchg", 64), cuda=ptx("atom.acq_rel.gpu.global.exch.b64 $0, [$1], $2;", 64))
def exchange_gpu64(addr: int, value: int) -> int:
    """Swap in `value`, acquire-release, at GPU scope."""


@op(64, 64, ret=64, cpu=rmw("add", 64), cuda=ptx("atom.acq_rel.gpu.global.add.u64 $0, [$1], $2;", 64))
def fetch_add_acq_rel_gpu64(addr: int, value: int) -> int:
    """Add, acquire-release, at GPU scope."""


@op(64, 32, 32, ret=32, cpu=cas(32), cuda=ptx("atom.acq_rel.gpu.global.cas.b32 $0, [$1], $2, $3;", 32))
def cas_acq_rel_gpu32(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at GPU scope."""


@op(64, 64, 64, ret=64, cpu=cas(64), cuda=ptx("atom.relaxed.gpu.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_gpu64(addr: int, expected: int, new: int) -> int:
    """Compare and swap at GPU scope."""


@op(64, 64, 64, ret=64, cpu=cas(64), cuda=ptx("atom.acquire.gpu.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_acquire_gpu64(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire, at GPU scope. Unlike a fence, it does not wait for the thread's own stores."""


@op(64, 64, 64, ret=64, cpu=cas(64), cuda=ptx("atom.acq_rel.gpu.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_acq_rel_gpu64(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at GPU scope."""


@op(64, 32, 32, ret=32, cpu=cas(32), cuda=ptx("atom.acq_rel.sys.global.cas.b32 $0, [$1], $2, $3;", 32))
def cas_sys32(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at system scope."""


@op(64, 64, 64, ret=64, cpu=cas(64), cuda=ptx("atom.acq_rel.sys.global.cas.b64 $0, [$1], $2, $3;", 64))
def cas_sys64(addr: int, expected: int, new: int) -> int:
    """Compare and swap, acquire-release, at system scope."""
