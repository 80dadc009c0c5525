"""Payload inside one NIC: copied by one thread on the host, and on a GPU by as many lanes and warps as are worth it.

A slice on a GPU has warps that do nothing but copy (`help_copying`). They wait for copies in the block's shared memory,
where a question and its answer take a tenth of a microsecond. Copies are cut into chunks, which a warp moves with one
load and one store of each lane in flight eight times; the warps take chunks in turn.

A slice may have more blocks, on other SMs, that only copy (PortConfig.copiers). They find large copies on a board in
global memory, where a question and its answer take microseconds. All warps, those of the slice's first block too, take
units from there. So a block that runs late, because kernels of the program fill the GPU, holds nobody up.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    ALL_LANES, copy, count_lanes, dynamic_shared, exchange_gpu64, fence_gpu, fetch_add_acq_rel_cta64,
    fetch_add_acq_rel_gpu64, fetch_add_gpu64, from_lane, lane_or_0, lanes_here, lanes_where, ld64, ld8, ld_acquire64,
    ld_acquire_cta64, ld_relaxed64, move_4_lines, move_8_lines, on_host, pause, rank_among, st64, st8,
    st_release_cta64, sum_up_to, sync_lanes,
)
from ..state.board import BOARD, Board
from ..state.near import NEAR, near_at
from ..state.worker import WorkerState

HELPERS = 12  # warps of a slice that copy
SMALL = 64  # bytes that one lane copies
_LINE = 16
CHUNK = 32 * 8 * _LINE  # bytes
UNIT = 4 * CHUNK  # of a list on the board
_WORTH_IT = 8  # units
_UNIT_BITS = 32
_LIST_BITS, _SLICES = 16, (1 << 15) - 1  # in the number of a list: lists of a slice, and the number of the slice
_ON_BOARD = -1  # in place of the number of copies in the list of this block
_ALONE = 128  # bytes that one thread copies while the rest of its warp waits


# --- by one warp -----------------------------------------------------------------------------------------------------


@device_function
def copy_chunk(target: int, source: int, nbytes: int) -> None:
    """Copy up to CHUNK bytes, all lanes together: lines of 16 bytes if both addresses allow, else words or bytes."""
    lane, lanes = lane_or_0(), lanes_here()
    both = target | source
    done = 0
    if both & (_LINE - 1) == 0:
        done = nbytes & -_LINE
        move_8_lines(target + lane * _LINE, source + lane * _LINE, lanes * _LINE, source + done)
    elif both & 7 == 0:
        done = nbytes & -8
        for at in range(8 * lane, done, 8 * lanes):
            st64(target + at, ld64(source + at))
    for at in range(done + lane, nbytes, lanes):
        st8(target + at, ld8(source + at))


@device_function
def copy_part(target: int, source: int, nbytes: int, warp: int, warps: int) -> None:
    """Copy the chunks of one warp of so many."""
    for at in range(warp * CHUNK, nbytes, warps * CHUNK):
        copy_chunk(target + at, source + at, min(CHUNK, nbytes - at))


@engine_function
def _copy_by_lane(target: int, source: int, nbytes: int) -> None:
    """Copy as `copy` does, out of the way of what runs most often."""
    copy(target, source, nbytes)


@device_function
def copy_by_lane(target: int, source: int, nbytes: int) -> None:
    """Copy at most SMALL bytes, by this lane."""
    if nbytes == 8 and (target | source) & 7 == 0:
        st64(target, ld64(source))
    elif not on_host() and nbytes == SMALL and (target | source) & (_LINE - 1) == 0:
        move_4_lines(target, source, _LINE)
    else:
        _copy_by_lane(target, source, nbytes)


# --- by all warps of a slice -----------------------------------------------------------------------------------------


@device_function
def _put_job(near: int, job: int, target: int, source: int, nbytes: int, end: int) -> None:
    """Enter a copy into the list. `end` counts the chunks of all up to this one."""
    at = near + 8 * job
    st64(at + NEAR.targets, target)
    st64(at + NEAR.sources, source)
    st64(at + NEAR.sizes, nbytes)
    st64(at + NEAR.ends, end)


@engine_function
def _make_part(worker: WorkerState, jobs: int, warp: int, warps: int) -> None:
    """Copy the chunks of one warp, of all copies in the list."""
    begin = 0
    chunk = warp
    for job in range(jobs):
        at = worker + 8 * job
        end = ld64(at + NEAR.ends)
        while chunk < end:
            offset = (chunk - begin) * CHUNK
            nbytes = min(CHUNK, ld64(at + NEAR.sizes) - offset)
            copy_chunk(ld64(at + NEAR.targets) + offset, ld64(at + NEAR.sources) + offset, nbytes)
            chunk += warps
        begin = end


@device_function
def _ask(near: int, jobs: int, first: int, warps: int) -> int:
    """Ask the helpers for the copies in the list. Return how many answers there will have been when they are made."""
    n = near_at(near)
    asked = n.asked + 1
    n.jobs, n.first, n.warps = jobs, first, warps
    st_release_cta64(near + NEAR.asked, asked)
    return asked * HELPERS


@device_function
def _await_helpers(near: int, answers: int) -> None:
    while ld_acquire_cta64(near + NEAR.answers) != answers:
        pass


# --- by all SMs of a worker ------------------------------------------------------------------------------------------


@device_function
def first_list(number: int) -> int:
    """Return the number of the list before the first one of a slice."""
    return (number & _SLICES) << _LIST_BITS


@engine_function
def _take_units(board: int, number: int) -> int:
    """Copy units of list `number`, and of those that follow it meanwhile, until none is left. Return the last number.

    Each lane keeps a row of the list.
    """
    lane = 8 * lane_or_0()
    end = target = source = nbytes = total = 0
    known = -1
    taken = number << _UNIT_BITS
    while True:
        if taken >> _UNIT_BITS != known:
            known = taken >> _UNIT_BITS
            fence_gpu()
            end, nbytes = ld_relaxed64(board + BOARD.ends + lane), ld_relaxed64(board + BOARD.sizes + lane)
            target, source = ld_relaxed64(board + BOARD.targets + lane), ld_relaxed64(board + BOARD.sources + lane)
            total = ld_relaxed64(board + BOARD.total)
        if lane == 0:
            taken = fetch_add_gpu64(board + BOARD.next, 1)
        taken = from_lane(taken, 0)
        if taken >> _UNIT_BITS == known:
            unit = taken & (1 << _UNIT_BITS) - 1
            if unit >= total:
                break
            _copy_unit(unit, end, target, source, nbytes)
            if lane == 0:
                fetch_add_acq_rel_gpu64(board + BOARD.done, 1)
    return known


@device_function
def _copy_unit(unit: int, end: int, target: int, source: int, nbytes: int) -> None:
    """Copy a unit of the list whose rows the lanes have."""
    job = count_lanes(lanes_where(1 if end <= unit else 0))
    before, target, source = from_lane(end, max(job - 1, 0)), from_lane(target, job), from_lane(source, job)
    offset = (unit - (before if job != 0 else 0)) * UNIT
    size = min(UNIT, from_lane(nbytes, job) - offset)
    for at in range(offset, offset + size, CHUNK):
        copy_chunk(target + at, source + at, min(CHUNK, offset + size - at))
    sync_lanes(ALL_LANES)


@engine_function
def _copy_by_board(
    worker: WorkerState, board: Board, mine: int, target: int, source: int, nbytes: int, end: int
) -> None:
    """Make the copies of all lanes where `mine`. `end` counts the units of all lanes up to this one."""
    lane = 8 * lane_or_0()
    st64(board + BOARD.targets + lane, target)
    st64(board + BOARD.sources + lane, source)
    st64(board + BOARD.sizes + lane, nbytes)
    st64(board + BOARD.ends + lane, end)
    total = from_lane(end, lanes_here() - 1)
    near = near_at(worker)
    number = near.list + 1
    answers = 0
    sync_lanes(ALL_LANES)
    if lane == 0:
        near.list, board.total, board.done = number, total, 0
        exchange_gpu64(board + BOARD.next, number << _UNIT_BITS)
        exchange_gpu64(board + BOARD.asked, number)
        answers = _ask(worker, _ON_BOARD, 0, 0)
    _take_units(board, number)
    if lane == 0:
        while ld_acquire64(board + BOARD.done) != total:
            pass
        _await_helpers(worker, answers)
    sync_lanes(ALL_LANES)


@engine_function
def copy_from_board(board: int, number: int) -> None:
    """Be a warp of a block that only copies, until slice `number` is over."""
    finished = 0
    over = False
    while not over:
        asked = from_lane(ld_acquire64(board + BOARD.asked), 0)
        if asked >> _LIST_BITS == number & _SLICES and asked != finished:
            finished = _take_units(board, asked)
        else:
            over = from_lane(ld_acquire64(board + BOARD.over), 0) == number
            pause()


# --- for all lanes ---------------------------------------------------------------------------------------------------


@engine_function
def copy_together(worker: WorkerState, mine: int, target: int, source: int, nbytes: int) -> None:
    """Make the copies of all lanes where `mine`, all lanes and those that help together."""
    board = Board(worker.board)
    units = sum_up_to((nbytes + UNIT - 1) // UNIT if mine else 0)
    if on_host():
        if mine:
            copy(target, source, nbytes)
    elif board != 0 and from_lane(units, lanes_here() - 1) >= _WORTH_IT:
        _copy_by_board(worker, board, mine, target, source, nbytes, units)
    else:
        lanes = lanes_where(mine)
        chunks = (nbytes + CHUNK - 1) // CHUNK if mine else 0
        end = sum_up_to(chunks)
        if mine:
            _put_job(worker, rank_among(lanes), target, source, nbytes, end)
        sync_lanes(ALL_LANES)
        jobs = count_lanes(lanes)
        if from_lane(end, 31) == 1:
            _make_part(worker, jobs, 0, 1)
        else:
            answers = 0
            if lane_or_0() == 0:
                answers = _ask(worker, jobs, 1, 1 + HELPERS)
            _make_part(worker, jobs, 0, 1 + HELPERS)
            if lane_or_0() == 0:
                _await_helpers(worker, answers)
        sync_lanes(ALL_LANES)


@engine_function
def _copy_with_help(worker: WorkerState, target: int, source: int, nbytes: int) -> None:
    """Copy on a GPU, by one thread, or by helpers if there are any."""
    if worker.slices == 0 or nbytes <= _ALONE:
        copy(target, source, nbytes)
    else:
        near = dynamic_shared()
        _put_job(near, 0, target, source, nbytes, (nbytes + CHUNK - 1) // CHUNK)
        _await_helpers(near, _ask(near, 1, 0, HELPERS))


@device_function
def copy_payload(worker: WorkerState, target: int, source: int, nbytes: int) -> None:
    """Copy payload. One thread calls this."""
    if on_host():
        copy(target, source, nbytes)
    else:
        _copy_with_help(worker, target, source, nbytes)


@engine_function
def help_copying(worker: WorkerState, helper: int) -> None:
    """Make the parts of copies that are this warp's, until the slice is over. All lanes call this."""
    answered = 0
    over = False
    while not over:
        if ld_acquire_cta64(worker + NEAR.asked) == answered:
            over = ld_acquire_cta64(worker + NEAR.over) != 0
            pause()
        else:
            answered += 1
            n = near_at(worker)
            if n.jobs == _ON_BOARD:
                _take_units(worker.board, n.list)
            else:
                _make_part(worker, n.jobs, n.first + helper, n.warps)
            sync_lanes(ALL_LANES)
            if lane_or_0() == 0:
                fetch_add_acq_rel_cta64(worker + NEAR.answers, 1)
