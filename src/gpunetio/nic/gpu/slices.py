"""Slices: a worker's turns where queues and payload are in memory of a GPU, which threads of the CPU do not reach.

A slice is short, so that whatever waits for running kernels gets its turn. Between two of them, the worker's thread
does what takes system calls: it wakes threads and other NICs, and rings event channels. It touches no ring, record or
payload.

On a GPU, a slice is a block of one warp that makes turns, one that watches the host, and some that copy. A slice ends
after `slice_ns` only if another one waits in the stream. So a call of the program that blocks all launches, and waits
for a kernel that waits for the NIC, does not stop the NIC: the slice goes on until nothing is left to do.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    ALL_LANES, block_dim, clock_ns, dynamic_shared_bytes, fence_sys, first_lane, from_lane, lane_or_0, lanes_here,
    lanes_where, ld_acquire_cta64, ld_relaxed64, on_host, pause, st64, st_release64, st_release_cta64, sync_lanes,
    thread_idx,
)
from ..memory.copies import first_list, help_copying
from ..queues.reach import NOTHING, OTHER, PACKETS, answer_withdrawals
from ..state.board import BOARD
from ..state.near import NEAR, near_at, near_qp_at, near_queue, near_work_queue_at, near_worker_at, put_in, queues_in
from ..state.slices import SLICES, Slices
from ..state.work_queue import WorkQueue
from ..state.worker import WORKER, WorkerState
from ..transport import direct
from ..transport.wire_kinds import is_any_to_wake
from ..turn.step import (
    is_register_rung, read_clock, scan_queues, scan_records, select_first, serve_host, serve_peers, serve_queues, step,
)
from .borrowed import bars_of, borrow, give_back, is_recalled, may_keep, near_of
from .forwarding import forward_registers, forward_rings
from .runs import find_ready, serve_run

SLICE_NS = 1_000_000
_IDLE_TURNS = 64  # after so many, the thread decides what is next
_NEAR_TURNS = 256  # on borrowed rows, before commands have their turn
_BARRED = 32  # turns on the rows themselves, after some that could not be made on borrowed ones
_LULL_NS = 50_000_000  # how long a lull is, at most
_REST_NS, _MOST_REST_NS = 5_000_000, 2_000_000_000  # without a lull, after one in vain
_POLLS = 16  # of a GPU, before it looks at anything but doorbells
_SCAN_EVERY = 32  # idle turns between scans of the doorbell records
_UNKNOWN = -1  # of NEAR.recalled: nobody has looked yet
_IN_VAIN = 1  # what `_near_turns` returns if nothing was done, and something takes packets
_GO_ON, _TIME_IS_UP, _HOST_IS_WANTED = 0, 1, 2


# --- turns -----------------------------------------------------------------------------------------------------------


@device_function
def _is_told(worker: WorkerState) -> bool:
    """Return whether the worker's thread has to tell others what a turn has done."""
    return worker.error_event + worker.ringing_count + worker.waking != 0


@device_function
def _has_successor(worker: WorkerState) -> bool:
    """Return whether a slice waits behind this one, so that this one may end."""
    slices = Slices(worker.slices)
    return slices == 0 or ld_relaxed64(slices + SLICES.given) - slices.ended > 1


@device_function
def _await_rings(worker: WorkerState, i: int, polls: int) -> tuple[int, int]:
    """Look at the doorbell of work queue `i`, each lane at another one, until one has work, `polls` times at most.

    Return the load, and the lanes whose queues have work.
    """
    w = near_work_queue_at(near_queue(worker, i))
    there = i < near_worker_at(worker).active_count
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
def _serve_near(worker: WorkerState) -> int:
    """Serve the work queues: in runs, and what is none by one thread. Return twice how much was done.

    That and 1 if a queue pair has to send packets, which takes the rows themselves.
    """
    done = 0
    rest = 0
    sends = 0
    count = near_worker_at(worker).active_count
    polls = 1 if on_host() or count > lanes_here() else _POLLS
    for base in range(0, count, lanes_here()):
        alone = 0
        rung, ringing = _await_rings(worker, base + lane_or_0(), polls)
        while ringing != 0:
            lane = first_lane(ringing)
            ringing &= ringing - 1
            ran = serve_run(worker, base + lane, from_lane(rung, lane))
            done += ran
            if ran == 0 and near_qp_at(near_work_queue_at(near_queue(worker, base + lane)).row).wire != 0:
                served = 0
                if lane_or_0() == 0:
                    served = direct.serve(worker, WorkQueue(near_queue(worker, base + lane)))
                served = from_lane(served, 0)
                done += served >> 1
                sends |= served & 1
            elif ran == 0:
                alone |= 1 << lane
        if lane_or_0() == 0:
            put_in(worker + NEAR.rest, base, alone)
        rest |= alone
    if rest != 0:
        served = 0
        if lane_or_0() == 0:
            served = serve_queues(worker, worker + NEAR.rest)
            select_first(worker)
        done += from_lane(served, 0)
        find_ready(worker)
    return done << 1 | sends


@device_function
def _near_turns(worker: WorkerState, near: int, end: int) -> int:
    """Make turns on borrowed rows, as long as that is all that is to do: return what `_serve_near` does."""
    done = 0
    idle = 0
    turns = 0
    busy_at = end - near_worker_at(near).slice_ns
    sends = 0
    over = False
    while not over:
        if lane_or_0() == 0:
            read_clock(near)
        if on_host():
            forward_rings(near)
            forward_registers(worker, near)
        sync_lanes(ALL_LANES)
        now = near_worker_at(near).now
        did = _serve_near(near)
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
                    scan_queues(near)
                find_ready(near)
        stop = 0
        if lane_or_0() == 0:
            if sends or _is_told(near):
                stop = 1
            elif on_host():
                if idle == _IDLE_TURNS or turns == _NEAR_TURNS or not may_keep(worker) or now >= end:
                    stop = 1
                elif idle != 0:
                    pause()
            elif ld_acquire_cta64(near + NEAR.recalled) != 0 or now - busy_at > near_worker_at(near).slice_ns:
                stop = 1
            elif near_worker_at(near).asleep != 0 and idle != 0:  # the thread has only looked whether there is anything
                stop = 1
            elif now >= end and _has_successor(near):
                stop = 1
        over = from_lane(stop, 0) != 0
    return done << 1 | sends


# A queue pair whose requests go as packets would send more of them for as long as its program posts: at no time are all
# of them acknowledged, so rows cannot be borrowed, on which requests need no packets. So there are lulls, in which no
# such request begins. One begins with the first packets, before many are on their way. A lull is in vain if rows cannot
# be borrowed in spite of it, or if what comes next has to go as packets again. The next one then comes later.


@device_function
def _rest(worker: WorkerState) -> None:
    """End a lull that was in vain."""
    worker.lull_rest = min(max(2 * worker.lull_rest, _REST_NS), _MOST_REST_NS)
    worker.lull, worker.lull_after = 0, clock_ns() + worker.lull_rest


@engine_function
def _begin_lull(worker: WorkerState, moving: int) -> int:
    """Begin a lull, or look whether one is over. Return whether one is on. One lane calls this.

    `moving`: rows cannot be borrowed, only because packets are on their way.
    """
    if worker.lull != 0 and clock_ns() >= worker.lull:
        _rest(worker)
    elif worker.lull == 0 and moving and clock_ns() >= worker.lull_after:
        worker.lull = clock_ns() + _LULL_NS
    return 1 if worker.lull != 0 else 0


@engine_function
def _end_lull(worker: WorkerState, ran: int) -> bool:
    """End a lull, as rows were borrowed, or as they cannot be. Return whether another may begin. One lane calls this.

    `ran` is what `_near_turns` returned.
    """
    if worker.lull != 0 and ran == _IN_VAIN:
        _rest(worker)
    else:
        worker.lull = 0
        if ran >> 1 != 0:
            worker.lull_after, worker.lull_rest = 0, 0
    return clock_ns() >= worker.lull_after


@engine_function
def _begin_turn(worker: WorkerState, barred: int) -> int:
    """Make a turn on the rows themselves, unless they may be borrowed. Return twice how much was done, and 1 if so.

    `barred`: they may not. One lane calls this.
    """
    if on_host() and worker.stream_count != 0:  # the twin has DMA streams for memory of GPUs
        return step(worker) << 1
    # All of these load from host memory, which is far from a GPU. So what has nothing to do is left out.
    read_clock(worker)
    done = serve_host(worker) if is_recalled(worker) or is_register_rung(worker) else 0
    if done < 0:
        answer_withdrawals(worker)
        return -1 - done << 1
    bars = OTHER if barred else bars_of(worker)
    if bars == NOTHING:
        return done << 1 | 1
    if bars == OTHER:
        answer_withdrawals(worker)
    _begin_lull(worker, bars == PACKETS)
    return done + serve_peers(worker) << 1


@device_function
def _is_left_alone(near: int) -> bool:
    """Return whether the warp that watches the host has seen that rows may be borrowed."""
    seen = ld_acquire_cta64(near + NEAR.recalled)
    while seen == _UNKNOWN:
        seen = ld_acquire_cta64(near + NEAR.recalled)
    return seen == 0


@device_function
def _what_is_next(worker: WorkerState, sent: int, idle: int, end: int) -> int:
    """Return what a slice has to do after a turn. `sent`: it may have sent frames."""
    if sent and worker.wire_count != 0 and is_any_to_wake(worker):
        return _HOST_IS_WANTED
    if _is_told(worker) or ld_relaxed64(worker + WORKER.stop) != 0:
        return _HOST_IS_WANTED
    if on_host() and ld_relaxed64(worker + WORKER.awaited) != 0:
        return _HOST_IS_WANTED
    if idle >= _IDLE_TURNS:
        return _HOST_IS_WANTED
    return _TIME_IS_UP if clock_ns() >= end and _has_successor(worker) else _GO_ON


@engine_function
def take_slice(worker: WorkerState) -> int:
    """Make turns until the slice is over, there is nothing to do, or the host is wanted: return how much was done.

    All lanes of a warp call this; on the host, one thread.
    """
    near = WorkerState(near_of(worker))
    end = from_lane(clock_ns() + worker.slice_ns, 0)
    done = 0
    idle = 0
    barred = 0  # turns until rows are borrowed again
    following = _GO_ON
    if not on_host() and worker.asleep != 0 and lane_or_0() == 0:
        scan_records(worker)
    while following == _GO_ON:
        begun = 0
        # Whoever watches the host may not see yet that the NIC has paused in the turn before.
        if not on_host() and barred == 0 and lane_or_0() == 0 and _is_left_alone(near) and worker.paused == 0:
            begun = 1
        if from_lane(begun, 0) == 0:
            forward_rings(worker)
            sync_lanes(ALL_LANES)
            if lane_or_0() == 0:
                begun = _begin_turn(worker, barred != 0)
        begun = from_lane(begun, 0)
        sync_lanes(ALL_LANES)
        did = begun >> 1
        sent = did != 0
        barred = max(barred - 1, 0)
        if begun & 1:
            borrowed = borrow(worker, near)
            if borrowed > 0:
                if not on_host() and lane_or_0() == 0:
                    st_release_cta64(near + NEAR.recalled, 0)  # it was 1 if the turn before was on the rows
                find_ready(near)
                ran = _near_turns(worker, near, end)
                give_back(worker, near)
                soon = 0
                if lane_or_0() == 0:
                    soon = 1 if _end_lull(worker, ran) else 0
                did += ran >> 1
                if ran & 1:  # the turn that sends is followed by a lull, if one may begin
                    barred = 1 if from_lane(soon, 0) else _BARRED
                elif not on_host() and did == 0:
                    idle = _IDLE_TURNS  # for as long as a slice
            else:
                alone = 0
                lull = 0
                if lane_or_0() == 0:
                    if borrowed < 0:
                        lull = _begin_lull(worker, True)
                    else:
                        _end_lull(worker, _IN_VAIN)
                    alone = serve_peers(worker)
                did += from_lane(alone, 0)
                sent = did != 0
                barred = 0 if from_lane(lull, 0) else _BARRED
        done += did
        if did != 0:
            idle = 0
        else:
            idle += 1
            pause()
        if lane_or_0() == 0:
            following = _what_is_next(worker, sent, idle, end)
        following = from_lane(following, 0)
    if worker.slices != 0 and lane_or_0() == 0:
        Slices(worker.slices).wanted = 1 if following == _HOST_IS_WANTED else 0
    return done


# --- on a GPU --------------------------------------------------------------------------------------------------------


@engine_function
def prepare_slice(near: int, number: int) -> None:
    """Set up what the warps of a slice tell each other, and the list of work queues. All threads call this."""
    if thread_idx() == 0:
        n = near_at(near)
        n.list = first_list(number)
        n.owner, n.asked, n.answers, n.recalled, n.over = 0, 0, 0, _UNKNOWN, 0
    for at in range(8 * thread_idx(), NEAR.counters, 8 * block_dim()):
        st64(near + at, 0)
    list_begins, list_ends = near_queue(near, 0), near_queue(near, queues_in(dynamic_shared_bytes()))
    for at in range(list_begins + 8 * thread_idx(), list_ends, 8 * block_dim()):
        st64(at, 0)


@engine_function
def make_turns(worker: WorkerState, near: int, number: int) -> None:
    """Be the warp that makes the turns of a slice. If the slice before wants the host, this one is over at once."""
    slices = Slices(worker.slices)
    if ld_relaxed64(slices + SLICES.wanted) == 0:
        done = take_slice(worker)
        if lane_or_0() == 0:
            slices.done += done
    if lane_or_0() == 0:
        st_release_cta64(near + NEAR.over, 1)
        if worker.board != 0:
            st_release64(worker.board + BOARD.over, number)
        fence_sys()
        st_release64(slices + SLICES.ended, slices.ended + 1)


@engine_function
def watch_host(worker: WorkerState, near: int) -> None:
    """Be the warp that looks at host memory, so that the one that makes turns need not wait for the bus."""
    while ld_acquire_cta64(near + NEAR.over) == 0:
        borrowed = near_at(near).owner == worker
        if borrowed:
            forward_rings(near)
            forward_registers(worker, near)
        if lane_or_0() == 0:
            keeps = may_keep(worker) and (borrowed or is_register_rung(worker) == 0)
            st_release_cta64(near + NEAR.recalled, 0 if keeps else 1)
        sync_lanes(ALL_LANES)


@engine_function
def take_part(worker: WorkerState, near: int, number: int, warp: int) -> None:
    """Be one of the warps of slice `number`."""
    if warp == 0:
        make_turns(worker, near, number)
    elif warp == 1:
        watch_host(worker, near)
    else:
        help_copying(near, warp - 2)
