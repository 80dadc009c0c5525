"""The compiled loop of the CPU proxy, which reads what kernels announce and rings the doorbells for them."""

from __future__ import annotations

from ..formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ..formats.layout import Entry
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
from ..jit.struct_view import View, struct_view

_poll = external("poll", 64, 64, 32, ret=32)
_read = external("read", 32, 64, 64, ret=64)

# A queue: kernels store the producer index at `word`, and `last` is the last one that was forwarded. `record` 0: the
# device needs no doorbell record. `early`: the register is also rung before the record is written, for latency.
PROXY_ROW = Entry("proxy_row", 64, """
    word             0  i64
    last             8  i64
    register        16  i64
    record          24  i64
    qpn             32  i64
    early           40  i64
""")

# A service: the addresses of `count` rows are at `rows`. After changing that table, the caller increments `asked` and
# waits until `answered` is equal. From then on the thread uses only the new table. `busy` is how many kernels run.
PROXY = Entry("proxy", 128, """
    stop             0  i64
    asked            8  i64
    answered        16  i64
    busy            24  i64
    count           32  i64
    rows            40  i64
    spin_ns         48  i64
    sleep_ms        56  i64
    yield_every     64  i64
    pollfd          72  i64
    kick_fd         80  i64
    drained         88  i64
""")

row_at: View = struct_view(PROXY_ROW)
proxy_at: View = struct_view(PROXY)


@engine_function
def _ring(row, producer):
    r = row_at(row)
    drain_stores()
    st_mmio64(r.register, be64((producer & PI_MASK) << 32 + WQE_IDX_SHIFT | r.qpn << 8))
    drain_stores()


@engine_function
def forward(row):
    """Forward a new producer index (`doca_gpu_verbs_cpu_proxy_progress`). Return 1, or 0 if there is none."""
    r = row_at(row)
    producer = ld_relaxed64(r.word)
    if producer == r.last:
        return 0
    fence_acquire_sys()
    if r.early != 0:
        _ring(row, producer)
    if r.record != 0:
        fence_release_sys()
        st_relaxed32(r.record, be32(producer & PI_MASK))
        _ring(row, producer)
    r.last = producer
    return 1


@engine_function
def ask(proxy):
    """Tell the thread that the table has changed."""
    st_release64(proxy + PROXY.asked, proxy_at(proxy).asked + 1)


@engine_function
def _turn(proxy):
    asked = ld_acquire64(proxy + PROXY.asked)
    if asked != proxy_at(proxy).answered:
        st_release64(proxy + PROXY.answered, asked)
    done = 0
    rows = proxy_at(proxy).rows
    for i in range(ld_relaxed64(proxy + PROXY.count)):
        done += forward(ld_relaxed64(rows + 8 * i))
    return done


@engine_function
def _must_watch(proxy):
    """Return whether a kernel may announce something at any moment."""
    return ld_relaxed64(proxy + PROXY.busy) > 0 and ld_relaxed64(proxy + PROXY.count) != 0


@engine_function
def _sleep(proxy):
    """Sleep until kicked, or for `sleep_ms`: no store of a kernel that the proxy was not told of wakes the thread."""
    p = proxy_at(proxy)
    if _poll(p.pollfd, 1, p.sleep_ms if ld_relaxed64(proxy + PROXY.count) != 0 else -1) > 0:
        _read(p.kick_fd, proxy + PROXY.drained, 8)


@engine_function
def serve(proxy):
    """Forward doorbells until told to stop. Stay awake while kernels run, and for `spin_ns` after a doorbell."""
    p = proxy_at(proxy)
    idle = 0
    idle_since = 0
    asleep = 0
    while ld_relaxed64(proxy + PROXY.stop) == 0:
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
        if idle % p.yield_every != 0:
            pause()
            continue
        yield_thread()
        if _must_watch(proxy):
            continue
        now = clock_ns()
        if idle_since == 0:
            idle_since = now
        elif now - idle_since > p.spin_ns:
            asleep = 1
