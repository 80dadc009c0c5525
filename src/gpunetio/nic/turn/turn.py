"""What a worker's thread does for a turn: it makes one, or has a place make a slice of turns (gpu/slices.py)."""

from __future__ import annotations

from ...jit.compile import engine_function
from ...jit.ops import (
    call_c, clock_ns, exchange64, futex_wait, futex_wake, ld_acquire64, ld_relaxed64, st32, st_release64,
)  # fmt: skip
from ...jit.twin import count_user
from ..state.near import bytes_for
from ..state.slices import SLICES, slices_at
from ..state.worker import WORKER, worker_at
from .step import scan_records, step

_LOOK_NS = 20_000  # how long the thread sleeps between two looks at a slice
_QUERY_NS = 100_000_000  # between two questions whether the kernel has failed
_NOT_READY = 600  # CUresult
_FUTEX_BITS = (1 << 32) - 1


@engine_function
def wake_poster(nic):
    """Wake the thread that sleeps until its command is executed, if that is so."""
    if ld_relaxed64(nic + WORKER.command_seq) == ld_acquire64(nic + WORKER.command_done):
        exchange64(nic + WORKER.awaited, 0)
        futex_wake(nic + WORKER.command_done)


@engine_function
def _launch(nic, slices):
    """Launch a slice on a GPU."""
    m = slices_at(slices)
    n = worker_at(nic)
    error = 0
    if n.context != m.context:
        error = call_c(m.enter, m.context, 0, 0, 0)
        n.context = m.context if error == 0 else 0
    m.number += 1
    st32(m.shared, bytes_for(n.active_count, n.near_bytes))
    if error == 0:
        error = call_c(m.launch, m.config, m.function, m.parameters, 0)
    if error != 0:
        m.failure = error
    else:
        st_release64(slices + SLICES.given, m.given + 1)  # only now: a call of the program may have held it up


@engine_function
def _turns_on_gpu(nic, slices):
    """Have a GPU make turns until the host is wanted: return how much was done.

    Half a slice after one has begun, the next one is put into the stream behind it.
    """
    m = slices_at(slices)
    before = m.done
    _launch(nic, slices)
    began = asked = clock_ns()
    seen = ld_acquire64(slices + SLICES.ended)
    while m.failure == 0:
        ended = ld_acquire64(slices + SLICES.ended)
        now = clock_ns()
        if ended != seen:
            seen, began = ended, now
        if ended == m.given:
            if ld_relaxed64(slices + SLICES.wanted) != 0:
                break
            _launch(nic, slices)
        elif m.given - ended == 1 and now - began > worker_at(nic).slice_ns >> 1:
            _launch(nic, slices)
        if ld_relaxed64(nic + WORKER.awaited) != 0:
            wake_poster(nic)
        if now - asked > _QUERY_NS:
            asked = now
            error = call_c(m.query, m.stream, 0, 0, 0)
            if error != 0 and error != _NOT_READY:
                m.failure = error
        futex_wait(slices + SLICES.ended, ended & _FUTEX_BITS, _LOOK_NS)
    m.wanted = 0
    return m.done - before


@engine_function
def turn(nic):
    """Make one turn, or a slice of turns where the NIC's engine is on a GPU: return how much was done."""
    n = worker_at(nic)
    if n.slices != 0:
        return _turns_on_gpu(nic, n.slices) if slices_at(n.slices).failure == 0 else 0
    if n.twin == 0:
        return step(nic)
    count_user(n.twin, 1)
    done = call_c(n.twin_slice, nic, 0, 0, 0)
    count_user(n.twin, -1)
    return done


@engine_function
def scan(nic):
    """Scan doorbell records for missed rings (`scan_records`). On a GPU, slices do."""
    n = worker_at(nic)
    if n.slices == 0:
        if n.twin != 0:
            count_user(n.twin, 1)
        scan_records(nic)
        if n.twin != 0:
            count_user(n.twin, -1)
