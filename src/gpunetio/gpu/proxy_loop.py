"""The compiled loop of the CPU proxy, which reads what kernels announce and rings the doorbells for them."""

from __future__ import annotations

from ..formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ..formats.layout import I64, Record
from ..jit.compile import engine_function
from ..jit.ops import (
    be32,
    be64,
    clock_ns,
    drain_stores,
    fence_acquire_sys,
    fence_release_sys,
    ld_acquire64,
    ld_relaxed64,
    pause,
    st_mmio64,
    st_relaxed32,
    st_release64,
    yield_thread,
)
from ..jit.ops.calls import external

_poll = external("poll", 64, 64, 32, ret=32)
_read = external("read", 32, 64, 64, ret=64)


class ProxyRow(Record, size=64):
    """A queue whose doorbells the proxy forwards.

    Kernels store the producer index at `word`, and `last` is the last one that was forwarded. `record` 0: the device
    needs no doorbell record. `early`: the register is also rung before the record is written, for latency.
    """

    word: I64 = 0
    last: I64 = 8
    register: I64 = 16
    record: I64 = 24
    qpn: I64 = 32
    early: I64 = 40


PROXY_ROW = ProxyRow.entry


class ProxyState(Record, size=128):
    """A thread that forwards doorbells.

    The addresses of `count` rows are at `rows`. After changing that table, the caller increments `asked` and waits
    until `answered` is equal. From then on the thread uses only the new table. `busy` is how many kernels run.
    """

    stop: I64 = 0
    asked: I64 = 8
    answered: I64 = 16
    busy: I64 = 24
    count: I64 = 32
    rows: I64 = 40
    spin_ns: I64 = 48
    sleep_ms: I64 = 56
    yield_every: I64 = 64
    pollfd: I64 = 72
    kick_fd: I64 = 80
    drained: I64 = 88


PROXY = ProxyState.entry


@engine_function
def _ring(row: ProxyRow, producer: int) -> None:
    drain_stores()
    st_mmio64(row.register, be64((producer & PI_MASK) << 32 + WQE_IDX_SHIFT | row.qpn << 8))
    drain_stores()


@engine_function
def forward(row: ProxyRow) -> int:
    """Forward a new producer index (`doca_gpu_verbs_cpu_proxy_progress`). Return 1, or 0 if there is none."""
    producer = ld_relaxed64(row.word)
    if producer == row.last:
        return 0
    fence_acquire_sys()
    if row.early != 0:
        _ring(row, producer)
    if row.record != 0:
        fence_release_sys()
        st_relaxed32(row.record, be32(producer & PI_MASK))
        _ring(row, producer)
    row.last = producer
    return 1


@engine_function
def ask(proxy: ProxyState) -> None:
    """Tell the thread that the table has changed."""
    st_release64(proxy + ProxyState.asked, proxy.asked + 1)


@engine_function
def _turn(proxy: ProxyState) -> int:
    asked = ld_acquire64(proxy + ProxyState.asked)
    if asked != proxy.answered:
        st_release64(proxy + ProxyState.answered, asked)
    done = 0
    rows = proxy.rows
    for i in range(ld_relaxed64(proxy + ProxyState.count)):
        done += forward(ld_relaxed64(rows + 8 * i))
    return done


@engine_function
def _must_watch(proxy: ProxyState) -> bool:
    """Return whether a kernel may announce something at any moment."""
    return ld_relaxed64(proxy + ProxyState.busy) > 0 and ld_relaxed64(proxy + ProxyState.count) != 0


@engine_function
def _sleep(proxy: ProxyState) -> None:
    """Sleep until kicked, or for `sleep_ms`: no store of a kernel that the proxy was not told of wakes the thread."""
    if _poll(proxy.pollfd, 1, proxy.sleep_ms if ld_relaxed64(proxy + ProxyState.count) != 0 else -1) > 0:
        _read(proxy.kick_fd, proxy + ProxyState.drained, 8)


@engine_function
def serve(proxy: ProxyState) -> None:
    """Forward doorbells until told to stop. Stay awake while kernels run, and for `spin_ns` after a doorbell."""
    idle = 0
    idle_since = 0
    asleep = 0
    while ld_relaxed64(proxy + ProxyState.stop) == 0:
        if _turn(proxy) > 0:
            idle = 0
            idle_since = 0
            asleep = 0
            continue
        if asleep != 0:
            if _must_watch(proxy):
                asleep = 0
            else:
                _sleep(proxy)
            continue
        idle += 1
        if idle % proxy.yield_every != 0:
            pause()
            continue
        yield_thread()
        if _must_watch(proxy):
            continue
        now = clock_ns()
        if idle_since == 0:
            idle_since = now
        elif now - idle_since > proxy.spin_ns:
            asleep = 1
