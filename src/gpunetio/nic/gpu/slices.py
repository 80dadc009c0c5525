"""Slices: the turns of a worker whose queues and payload are in GPU memory, which CPU threads cannot access.

A slice is short, so that anything that waits for running kernels can proceed. Between two slices, the worker's thread
makes the system calls: it wakes threads and other NICs, and signals event channels. It touches no ring, record or
payload.

On a GPU, a slice is a block of one warp that makes turns, one that watches the host, and several that copy. A slice
ends after `slice_ns` only if another slice is queued in the stream. So a CUDA call that blocks all launches, and waits
for a kernel that waits for the NIC, does not stop the NIC: the slice continues until nothing is left to do.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    ALL_LANES, block_dim, clock_ns, dynamic_shared_bytes, fence_sys, first_lane, from_lane, lane_or_0, lanes_here,
    lanes_where, ld_acquire_cta64, ld_relaxed64, on_host, pause, st64, st_release64, st_release_cta64, sync_lanes,
    thread_idx,
)
from ..memory.copies import first_list, run_copy_warp
from ..queues.reach import NOTHING, OTHER, PACKETS, answer_withdrawals
from ..state.board import BOARD
from ..state.slice_shared import (
    SLICE_SHARED, queues_in, set_bits, shared_at, shared_qp_at, shared_queue, shared_work_queue_at, shared_worker_at,
)
from ..state.slices import SLICES, Slices
from ..state.work_queue import WorkQueue
from ..state.worker import WORKER, WorkerState
from ..transport import direct
from ..transport.wire_kinds import is_any_to_wake
from ..turn.step import (
    is_register_rung, read_clock, scan_queues, scan_records, select_first, serve_host, serve_peers, serve_queues, step,
)
from .row_cache import cache_rows, caching_obstacle, is_recalled, may_stay_cached, shared_of, write_back_rows
from .forwarding import forward_registers, forward_rings
from .warp_batches import execute_batch, find_batchable

SLICE_NS = 1_000_000
_IDLE_TURNS = 64  # before the slice ends and the worker's thread takes over
_CACHED_TURNS = 256  # on cached rows, before commands are served
_UNCACHED_TURNS = 32  # on the rows themselves, after turns on cached rows were not possible
_QUIESCE_NS = 50_000_000  # how long the worker quiesces, at most
_BACKOFF_NS, _MAX_BACKOFF_NS = 5_000_000, 2_000_000_000  # until the worker quiesces again, after it did in vain
_POLLS = 16  # of doorbells on a GPU, before anything else is checked
_SCAN_EVERY = 32  # idle turns between scans of the doorbell records
_UNKNOWN = -1  # SLICE_SHARED.recalled before the first check
_IN_VAIN = 1  # what `_cached_turns` returns if nothing was done, and a request needs packets
_CONTINUE, _TIME_IS_UP, _HOST_IS_WANTED = 0, 1, 2


# --- turns -----------------------------------------------------------------------------------------------------------


@device_function
def _wants_host(worker: WorkerState) -> bool:
    """Return whether the worker's thread has to report a failure, signal a channel or wake a thread after a turn."""
    return worker.error_event + worker.ringing_count + worker.waking != 0


@device_function
def _has_successor(worker: WorkerState) -> bool:
    """Return whether another slice is queued after this one, so that this one may end."""
    slices = Slices(worker.slices)
    return slices == 0 or ld_relaxed64(slices + SLICES.launched) - slices.finished > 1


@device_function
def _poll_doorbells(worker: WorkerState, i: int, polls: int) -> tuple[int, int]:
    """Poll the doorbell of work queue `i`, a different one per lane, until one has work, at most `polls` times.

    Return the value of the doorbell, and the lanes whose queues have work.
    """
    w = shared_work_queue_at(shared_queue(worker, i))
    there = i < shared_worker_at(worker).active_count
    line, seen, awake = w.doorbell, w.seen, w.awake
    rung, ringing = 0, 0
    while ringing == 0 and polls != 0:
        polls -= 1
        rings = 0
        if there:
            rung = ld_relaxed64(line)
            rings = 1 if rung != seen or awake != 0 else 0
        ringing = lanes_where(rings)
    return rung, ringing


@device_function
def _serve_cached(worker: WorkerState) -> int:
    """Serve the work queues: in warp batches where possible, otherwise by one thread.

    Return twice how much was done, plus 1 if a queue pair has to send packets, which needs the rows themselves.
    """
    done = 0
    single = 0
    sends = 0
    count = shared_worker_at(worker).active_count
    polls = 1 if on_host() or count > lanes_here() else _POLLS
    for base in range(0, count, lanes_here()):
        alone = 0
        rung, ringing = _poll_doorbells(worker, base + lane_or_0(), polls)
        while ringing != 0:
            lane = first_lane(ringing)
            ringing &= ringing - 1
            executed = execute_batch(worker, base + lane, from_lane(rung, lane))
            done += executed
            if executed == 0 and shared_qp_at(shared_work_queue_at(shared_queue(worker, base + lane)).row).wire != 0:
                served = 0
                if lane_or_0() == 0:
                    served = direct.serve(worker, WorkQueue(shared_queue(worker, base + lane)))
                served = from_lane(served, 0)
                done += served >> 1
                sends |= served & 1
            elif executed == 0:
                alone |= 1 << lane
        if lane_or_0() == 0:
            set_bits(worker + SLICE_SHARED.single, base, alone)
        single |= alone
    if single != 0:
        served = 0
        if lane_or_0() == 0:
            served = serve_queues(worker, worker + SLICE_SHARED.single)
            select_first(worker)
        done += from_lane(served, 0)
        find_batchable(worker)
    return done << 1 | sends


@device_function
def _cached_turns(worker: WorkerState, shared: int, end: int) -> int:
    """Make turns on cached rows, as long as nothing needs the rows themselves. Return what `_serve_cached` returns."""
    done = 0
    idle = 0
    turns = 0
    busy_at = end - shared_worker_at(shared).slice_ns
    sends = 0
    over = False
    while not over:
        if lane_or_0() == 0:
            read_clock(shared)
        if on_host():
            forward_rings(shared)
            forward_registers(worker, shared)
        sync_lanes(ALL_LANES)
        now = shared_worker_at(shared).now
        did = _serve_cached(shared)
        sends = did & 1
        did >>= 1
        done += did
        turns += 1
        if did != 0:
            idle = 0
            busy_at = now
        else:
            idle += 1
            if idle & (_SCAN_EVERY - 1) == 0:
                if lane_or_0() == 0:
                    scan_queues(shared)
                find_batchable(shared)
        stop = 0
        if lane_or_0() == 0:
            if sends or _wants_host(shared):
                stop = 1
            elif on_host():
                if idle == _IDLE_TURNS or turns == _CACHED_TURNS or not may_stay_cached(worker) or now >= end:
                    stop = 1
                elif idle != 0:
                    pause()
            elif (
                ld_acquire_cta64(shared + SLICE_SHARED.recalled) != 0
                or now - busy_at > shared_worker_at(shared).slice_ns
            ):
                stop = 1
            elif shared_worker_at(shared).asleep != 0 and idle != 0:  # the worker sleeps, and only checks for work
                stop = 1
            elif now >= end and _has_successor(shared):
                stop = 1
        over = from_lane(stop, 0) != 0
    return done << 1 | sends


# Requests need no packets while rows are cached. But rows cannot be cached while packets are unacknowledged, and a
# queue pair that sends packets keeps sending as long as its program posts. So the worker quiesces: for a time, no such
# request starts. It quiesces with the first packets, before many are in flight. It does so in vain if rows cannot be
# cached in spite of it, or if the next request needs packets again. Then it waits longer before it quiesces again.


@device_function
def _back_off(worker: WorkerState) -> None:
    """Stop quiescing in vain, and double the time until the worker quiesces again."""
    worker.quiesce_backoff = min(max(2 * worker.quiesce_backoff, _BACKOFF_NS), _MAX_BACKOFF_NS)
    worker.quiesce_until, worker.next_quiesce_at = 0, clock_ns() + worker.quiesce_backoff


@engine_function
def _quiesce(worker: WorkerState, moving: int) -> int:
    """Start to quiesce, or stop if the time is over. Return whether the worker quiesces. One lane calls this.

    `moving`: only packets in flight keep the worker from caching its rows.
    """
    if worker.quiesce_until != 0 and clock_ns() >= worker.quiesce_until:
        _back_off(worker)
    elif worker.quiesce_until == 0 and moving and clock_ns() >= worker.next_quiesce_at:
        worker.quiesce_until = clock_ns() + _QUIESCE_NS
    return 1 if worker.quiesce_until != 0 else 0


@engine_function
def _end_quiesce(worker: WorkerState, executed: int) -> bool:
    """Stop quiescing, because rows were cached or cannot be. Return whether it may start again. One lane calls this.

    `served` is what `_cached_turns` returned.
    """
    if worker.quiesce_until != 0 and executed == _IN_VAIN:
        _back_off(worker)
    else:
        worker.quiesce_until = 0
        if executed >> 1 != 0:
            worker.next_quiesce_at, worker.quiesce_backoff = 0, 0
    return clock_ns() >= worker.next_quiesce_at


@engine_function
def _begin_turn(worker: WorkerState, uncached: int) -> int:
    """Make a turn on the rows themselves, unless they may be cached. One lane calls this.

    Return twice how much was done, plus 1 if the rows may be cached. `uncached`: they may not.
    """
    if on_host() and worker.stream_count != 0:  # the twin has DMA streams for memory of GPUs
        return step(worker) << 1
    # Each of these loads from host memory, which is slow from a GPU. So functions with nothing to do are not called.
    read_clock(worker)
    done = serve_host(worker) if is_recalled(worker) or is_register_rung(worker) else 0
    if done < 0:
        answer_withdrawals(worker)
        return -1 - done << 1
    obstacle = OTHER if uncached else caching_obstacle(worker)
    if obstacle == NOTHING:
        return done << 1 | 1
    if obstacle == OTHER:
        answer_withdrawals(worker)
    _quiesce(worker, obstacle == PACKETS)
    return done + serve_peers(worker) << 1


@device_function
def _may_cache(shared: int) -> bool:
    """Return whether the warp that watches the host has found that rows may be cached."""
    seen = ld_acquire_cta64(shared + SLICE_SHARED.recalled)
    while seen == _UNKNOWN:
        seen = ld_acquire_cta64(shared + SLICE_SHARED.recalled)
    return seen == 0


@device_function
def _next_action(worker: WorkerState, sent: int, idle: int, end: int) -> int:
    """Return what a slice does after a turn. `sent`: the turn may have sent frames."""
    if sent and worker.wire_count != 0 and is_any_to_wake(worker):
        return _HOST_IS_WANTED
    if _wants_host(worker) or ld_relaxed64(worker + WORKER.stop) != 0:
        return _HOST_IS_WANTED
    if on_host() and ld_relaxed64(worker + WORKER.awaited) != 0:
        return _HOST_IS_WANTED
    if idle >= _IDLE_TURNS:
        return _HOST_IS_WANTED
    return _TIME_IS_UP if clock_ns() >= end and _has_successor(worker) else _CONTINUE


@engine_function
def take_slice(worker: WorkerState) -> int:
    """Make turns until the slice is over, nothing is left to do, or the host is wanted. Return how much was done.

    All lanes of a warp call this; on the host, one thread.
    """
    shared = WorkerState(shared_of(worker))
    end = from_lane(clock_ns() + worker.slice_ns, 0)
    done = 0
    idle = 0
    uncached = 0  # turns until rows are cached again
    action = _CONTINUE
    if not on_host() and worker.asleep != 0 and lane_or_0() == 0:
        scan_records(worker)
    while action == _CONTINUE:
        begun = 0
        # The warp that watches the host may not have seen yet that the NIC paused in the previous turn.
        if not on_host() and uncached == 0 and lane_or_0() == 0 and _may_cache(shared) and worker.paused == 0:
            begun = 1
        if from_lane(begun, 0) == 0:
            forward_rings(worker)
            sync_lanes(ALL_LANES)
            if lane_or_0() == 0:
                begun = _begin_turn(worker, uncached != 0)
        begun = from_lane(begun, 0)
        sync_lanes(ALL_LANES)
        did = begun >> 1
        sent = did != 0
        uncached = max(uncached - 1, 0)
        if begun & 1:
            cached = cache_rows(worker, shared)
            if cached > 0:
                if not on_host() and lane_or_0() == 0:
                    st_release_cta64(shared + SLICE_SHARED.recalled, 0)  # it was 1 if the turn before was on the rows
                find_batchable(shared)
                executed = _cached_turns(worker, shared, end)
                write_back_rows(worker, shared)
                soon = 0
                if lane_or_0() == 0:
                    soon = 1 if _end_quiesce(worker, executed) else 0
                did += executed >> 1
                if executed & 1:  # the worker quiesces after the turn that sends, if it may
                    uncached = 1 if from_lane(soon, 0) else _UNCACHED_TURNS
                elif not on_host() and did == 0:
                    idle = _IDLE_TURNS  # it was idle for a whole slice
            else:
                alone = 0
                quiescing = 0
                if lane_or_0() == 0:
                    if cached < 0:
                        quiescing = _quiesce(worker, True)
                    else:
                        _end_quiesce(worker, _IN_VAIN)
                    alone = serve_peers(worker)
                did += from_lane(alone, 0)
                sent = did != 0
                uncached = 0 if from_lane(quiescing, 0) else _UNCACHED_TURNS
        done += did
        if did != 0:
            idle = 0
        else:
            idle += 1
            pause()
        if lane_or_0() == 0:
            action = _next_action(worker, sent, idle, end)
        action = from_lane(action, 0)
    if worker.slices != 0 and lane_or_0() == 0:
        Slices(worker.slices).host_wanted = 1 if action == _HOST_IS_WANTED else 0
    return done


# --- on a GPU --------------------------------------------------------------------------------------------------------


@engine_function
def prepare_slice(shared: int, number: int) -> None:
    """Set up the words that the warps of a slice share, and the list of work queues. All threads call this."""
    if thread_idx() == 0:
        n = shared_at(shared)
        n.list = first_list(number)
        n.owner, n.posted, n.finished, n.recalled, n.over = 0, 0, 0, _UNKNOWN, 0
    for at in range(8 * thread_idx(), SLICE_SHARED.counters, 8 * block_dim()):
        st64(shared + at, 0)
    list_begins, list_ends = shared_queue(shared, 0), shared_queue(shared, queues_in(dynamic_shared_bytes()))
    for at in range(list_begins + 8 * thread_idx(), list_ends, 8 * block_dim()):
        st64(at, 0)


@engine_function
def make_turns(worker: WorkerState, shared: int, number: int) -> None:
    """Run the warp that makes turns. If the previous slice wants the host, this slice ends at once."""
    slices = Slices(worker.slices)
    if ld_relaxed64(slices + SLICES.host_wanted) == 0:
        done = take_slice(worker)
        if lane_or_0() == 0:
            slices.done += done
    if lane_or_0() == 0:
        st_release_cta64(shared + SLICE_SHARED.over, 1)
        if worker.board != 0:
            st_release64(worker.board + BOARD.over, number)
        fence_sys()
        st_release64(slices + SLICES.finished, slices.finished + 1)


@engine_function
def watch_host(worker: WorkerState, shared: int) -> None:
    """Run the warp that polls host memory, so that the warp that makes turns never waits for the bus."""
    while ld_acquire_cta64(shared + SLICE_SHARED.over) == 0:
        cached = shared_at(shared).owner == worker
        if cached:
            forward_rings(shared)
            forward_registers(worker, shared)
        if lane_or_0() == 0:
            keeps = may_stay_cached(worker) and (cached or is_register_rung(worker) == 0)
            st_release_cta64(shared + SLICE_SHARED.recalled, 0 if keeps else 1)
        sync_lanes(ALL_LANES)


@engine_function
def take_part(worker: WorkerState, shared: int, number: int, warp: int) -> None:
    """Run one of the warps of slice `number`."""
    if warp == 0:
        make_turns(worker, shared, number)
    elif warp == 1:
        watch_host(worker, shared)
    else:
        run_copy_warp(shared, warp - 2)
