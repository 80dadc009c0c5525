"""Copies of payload inside one NIC: by one thread on the host, by many lanes and warps on a GPU.

A slice on a GPU has warps that only copy (`run_copy_warp`). Copies are posted to them in the block's shared memory,
where a round trip takes a tenth of a microsecond. Copies are cut into chunks. A warp has eight loads and stores per
lane in flight for a chunk, and the warps take chunks in turn.

A slice may have more blocks, on other SMs, that only copy (PortConfig.copiers). Large copies are posted to them on a
board in global memory, where a round trip takes microseconds. All warps, including those of the slice's first block,
take units from the board. So a block that starts late, because kernels of the program fill the GPU, delays no copy.
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
from ..state.slice_shared import SLICE_SHARED, shared_at
from ..state.worker import WorkerState

COPY_WARPS = 12  # warps of a slice that only copy
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
    """Copy every chunk that belongs to warp `warp` of `warps`."""
    for at in range(warp * CHUNK, nbytes, warps * CHUNK):
        copy_chunk(target + at, source + at, min(CHUNK, nbytes - at))


@engine_function
def _copy_by_lane(target: int, source: int, nbytes: int) -> None:
    """Copy as `copy` does, out of line, so that the common case stays small."""
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
def _add_job(shared: int, job: int, target: int, source: int, nbytes: int, end: int) -> None:
    """Add a copy to the list. `end` counts the chunks of all copies up to this one."""
    at = shared + 8 * job
    st64(at + SLICE_SHARED.targets, target)
    st64(at + SLICE_SHARED.sources, source)
    st64(at + SLICE_SHARED.sizes, nbytes)
    st64(at + SLICE_SHARED.ends, end)


@engine_function
def _copy_share(worker: WorkerState, jobs: int, warp: int, warps: int) -> None:
    """Copy the chunks of all copies in the list that belong to one warp."""
    begin = 0
    chunk = warp
    for job in range(jobs):
        at = worker + 8 * job
        end = ld64(at + SLICE_SHARED.ends)
        while chunk < end:
            offset = (chunk - begin) * CHUNK
            nbytes = min(CHUNK, ld64(at + SLICE_SHARED.sizes) - offset)
            copy_chunk(ld64(at + SLICE_SHARED.targets) + offset, ld64(at + SLICE_SHARED.sources) + offset, nbytes)
            chunk += warps
        begin = end


@device_function
def _post_copies(shared: int, jobs: int, first: int, warps: int) -> int:
    """Post the list of copies to the copy warps. Return the value of `finished` once the list is copied."""
    n = shared_at(shared)
    posted = n.posted + 1
    n.jobs, n.first, n.warps = jobs, first, warps
    st_release_cta64(shared + SLICE_SHARED.posted, posted)
    return posted * COPY_WARPS


@device_function
def _await_copy_warps(shared: int, finished: int) -> None:
    while ld_acquire_cta64(shared + SLICE_SHARED.finished) != finished:
        pass


# --- by all SMs of a worker ------------------------------------------------------------------------------------------


@device_function
def first_list(number: int) -> int:
    """Return the number of the list before the first one of a slice."""
    return (number & _SLICES) << _LIST_BITS


@engine_function
def _take_units(board: int, number: int) -> int:
    """Copy units of list `number`, and of lists posted meanwhile, until none is left. Return the last list's number.

    Each lane holds one row of the list.
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
    """Copy a unit of the list whose rows the lanes hold."""
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
    shared = shared_at(worker)
    number = shared.list + 1
    finished = 0
    sync_lanes(ALL_LANES)
    if lane == 0:
        shared.list, board.total, board.done = number, total, 0
        exchange_gpu64(board + BOARD.next, number << _UNIT_BITS)
        exchange_gpu64(board + BOARD.posted, number)
        finished = _post_copies(worker, _ON_BOARD, 0, 0)
    _take_units(board, number)
    if lane == 0:
        while ld_acquire64(board + BOARD.done) != total:
            pass
        _await_copy_warps(worker, finished)
    sync_lanes(ALL_LANES)


@engine_function
def copy_from_board(board: int, number: int) -> None:
    """Run a warp of a block that only copies, until slice `number` is over."""
    finished = 0
    over = False
    while not over:
        posted = from_lane(ld_acquire64(board + BOARD.posted), 0)
        if posted >> _LIST_BITS == number & _SLICES and posted != finished:
            finished = _take_units(board, posted)
        else:
            over = from_lane(ld_acquire64(board + BOARD.over), 0) == number
            pause()


# --- for all lanes ---------------------------------------------------------------------------------------------------


@engine_function
def copy_together(worker: WorkerState, mine: int, target: int, source: int, nbytes: int) -> None:
    """Make the copies of all lanes where `mine`, by all lanes of this warp and the copy warps together."""
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
            _add_job(worker, rank_among(lanes), target, source, nbytes, end)
        sync_lanes(ALL_LANES)
        jobs = count_lanes(lanes)
        if from_lane(end, 31) == 1:
            _copy_share(worker, jobs, 0, 1)
        else:
            finished = 0
            if lane_or_0() == 0:
                finished = _post_copies(worker, jobs, 1, 1 + COPY_WARPS)
            _copy_share(worker, jobs, 0, 1 + COPY_WARPS)
            if lane_or_0() == 0:
                _await_copy_warps(worker, finished)
        sync_lanes(ALL_LANES)


@engine_function
def _copy_on_gpu(worker: WorkerState, target: int, source: int, nbytes: int) -> None:
    """Copy on a GPU, by one thread, or by the copy warps if there are any and the copy is large."""
    if worker.slices == 0 or nbytes <= _ALONE:
        copy(target, source, nbytes)
    else:
        shared = dynamic_shared()
        _add_job(shared, 0, target, source, nbytes, (nbytes + CHUNK - 1) // CHUNK)
        _await_copy_warps(shared, _post_copies(shared, 1, 0, COPY_WARPS))


@device_function
def copy_payload(worker: WorkerState, target: int, source: int, nbytes: int) -> None:
    """Copy payload. One thread calls this."""
    if on_host():
        copy(target, source, nbytes)
    else:
        _copy_on_gpu(worker, target, source, nbytes)


@engine_function
def run_copy_warp(worker: WorkerState, warp: int) -> None:
    """Run a copy warp: copy its share of posted copies, until the slice is over. All lanes call this."""
    served = 0
    over = False
    while not over:
        if ld_acquire_cta64(worker + SLICE_SHARED.posted) == served:
            over = ld_acquire_cta64(worker + SLICE_SHARED.over) != 0
            pause()
        else:
            served += 1
            n = shared_at(worker)
            if n.jobs == _ON_BOARD:
                _take_units(worker.board, n.list)
            else:
                _copy_share(worker, n.jobs, n.first + warp, n.warps)
            sync_lanes(ALL_LANES)
            if lane_or_0() == 0:
                fetch_add_acq_rel_cta64(worker + SLICE_SHARED.finished, 1)
