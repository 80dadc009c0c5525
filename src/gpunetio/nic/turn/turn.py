"""A turn of a worker's thread: the thread makes it, or a GPU or its twin makes a slice of turns (gpu/slices.py)."""

from __future__ import annotations

from ...jit.compile import engine_function
from ...jit.ops import (
    call_c, clock_ns, exchange64, futex_wait, futex_wake, ld_acquire64, ld_relaxed64, st32, st_release64,
)
from ...jit.twin import count_user
from ..state.slice_shared import bytes_for
from ..state.slices import SLICES, Slices
from ..state.worker import WORKER, WorkerState
from .step import scan_records, step

_LOOK_NS = 20_000  # how long the thread sleeps between two checks of a slice
_QUERY_NS = 100_000_000  # between two queries whether the kernel has failed
_NOT_READY = 600  # CUresult
_FUTEX_BITS = (1 << 32) - 1


@engine_function
def wake_poster(worker: WorkerState) -> None:
    """Wake the thread that sleeps until its command is executed, if the command is executed."""
    if ld_relaxed64(worker + WORKER.command_seq) == ld_acquire64(worker + WORKER.command_done):
        exchange64(worker + WORKER.awaited, 0)
        futex_wake(worker + WORKER.command_done)


@engine_function
def _launch(worker: WorkerState, slices: Slices) -> None:
    """Launch a slice on a GPU."""
    error = 0
    if worker.context != slices.context:
        error = call_c(slices.enter, slices.context, 0, 0, 0)
        worker.context = slices.context if error == 0 else 0
    slices.number += 1
    st32(slices.shared, bytes_for(worker.active_count, worker.shared_bytes))
    if error == 0:
        error = call_c(slices.launch, slices.config, slices.function, slices.parameters, 0)
    if error != 0:
        slices.failure = error
    else:
        st_release64(slices + SLICES.launched, slices.launched + 1)  # once launched: other calls may block it


@engine_function
def _turns_on_gpu(worker: WorkerState, slices: Slices) -> int:
    """Have a GPU make turns until the host is wanted. Return how much was done.

    The next slice is queued in the stream half a slice after the previous one has begun.
    """
    before = slices.done
    _launch(worker, slices)
    began = asked = clock_ns()
    seen = ld_acquire64(slices + SLICES.finished)
    while slices.failure == 0:
        finished = ld_acquire64(slices + SLICES.finished)
        now = clock_ns()
        if finished != seen:
            seen, began = finished, now
        if finished == slices.launched:
            if ld_relaxed64(slices + SLICES.host_wanted) != 0:
                break
            _launch(worker, slices)
        elif slices.launched - finished == 1 and now - began > worker.slice_ns >> 1:
            _launch(worker, slices)
        if ld_relaxed64(worker + WORKER.awaited) != 0:
            wake_poster(worker)
        if now - asked > _QUERY_NS:
            asked = now
            error = call_c(slices.query, slices.stream, 0, 0, 0)
            if error != 0 and error != _NOT_READY:
                slices.failure = error
        futex_wait(slices + SLICES.finished, finished & _FUTEX_BITS, _LOOK_NS)
    slices.host_wanted = 0
    return slices.done - before


@engine_function
def turn(worker: WorkerState) -> int:
    """Make one turn, or a slice of turns if the NIC's engine is on a GPU. Return how much was done."""
    if worker.slices != 0:
        return _turns_on_gpu(worker, Slices(worker.slices)) if Slices(worker.slices).failure == 0 else 0
    if worker.twin == 0:
        return step(worker)
    count_user(worker.twin, 1)
    done = call_c(worker.twin_slice, worker, 0, 0, 0)
    count_user(worker.twin, -1)
    return done


@engine_function
def scan(worker: WorkerState) -> None:
    """Scan doorbell records for missed rings (`scan_records`), unless slices on a GPU do so."""
    if worker.slices == 0:
        if worker.twin != 0:
            count_user(worker.twin, 1)
        scan_records(worker)
        if worker.twin != 0:
            count_user(worker.twin, -1)
