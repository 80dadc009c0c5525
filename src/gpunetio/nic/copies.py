"""Payload inside one NIC: copied by one thread on the host, and on a GPU by as many lanes and warps as are worth it.

A slice on a GPU has warps that do nothing but copy (`help_copying`). They wait for copies in the block's shared memory,
where a question and its answer take a tenth of a microsecond. Copies are cut into chunks, which a warp moves with one
load and one store of each lane in flight eight times; the warps take chunks in turn.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import (
    ALL_LANES, copy, count_lanes, dynamic_shared, fetch_add_acq_rel_cta64, from_lane, lane_or_0, lanes_here,
    lanes_where, ld8, ld64, ld_acquire_cta64, move_4_lines, move_8_lines, on_host, pause, rank_among, st8, st64,
    st_release_cta64, sum_up_to, sync_lanes,
)  # fmt: skip
from .state.near import NEAR, near_at
from .state.worker import worker_at

HELPERS = 12  # warps of a slice that copy
SMALL = 64  # bytes that one lane copies
_LINE = 16
CHUNK = 32 * 8 * _LINE  # bytes
_ALONE = 128  # bytes that one thread copies while the rest of its warp waits


# --- by one warp -----------------------------------------------------------------------------------------------------


@device_function
def copy_chunk(target, source, nbytes):
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
def copy_part(target, source, nbytes, warp, warps):
    """Copy the chunks of one warp of so many."""
    for at in range(warp * CHUNK, nbytes, warps * CHUNK):
        copy_chunk(target + at, source + at, min(CHUNK, nbytes - at))


@engine_function
def _copy_by_lane(target, source, nbytes):
    """Copy as `copy` does, out of the way of what runs most often."""
    copy(target, source, nbytes)


@device_function
def copy_by_lane(target, source, nbytes):
    """Copy at most SMALL bytes, by this lane."""
    if nbytes == 8 and (target | source) & 7 == 0:
        st64(target, ld64(source))
    elif not on_host() and nbytes == SMALL and (target | source) & (_LINE - 1) == 0:
        move_4_lines(target, source, _LINE)
    else:
        _copy_by_lane(target, source, nbytes)


# --- by all warps of a slice -----------------------------------------------------------------------------------------


@device_function
def _put_job(near, job, target, source, nbytes, end):
    """Enter a copy into the list. `end` counts the chunks of all up to this one."""
    at = near + 8 * job
    st64(at + NEAR.targets, target)
    st64(at + NEAR.sources, source)
    st64(at + NEAR.sizes, nbytes)
    st64(at + NEAR.ends, end)


@engine_function
def _make_part(near, jobs, warp, warps):
    """Copy the chunks of one warp, of all copies in the list."""
    begin = 0
    chunk = warp
    for job in range(jobs):
        at = near + 8 * job
        end = ld64(at + NEAR.ends)
        while chunk < end:
            offset = (chunk - begin) * CHUNK
            nbytes = min(CHUNK, ld64(at + NEAR.sizes) - offset)
            copy_chunk(ld64(at + NEAR.targets) + offset, ld64(at + NEAR.sources) + offset, nbytes)
            chunk += warps
        begin = end


@device_function
def _ask(near, jobs, first, warps):
    """Ask the helpers for the copies in the list. Return how many answers there will have been when they are made."""
    n = near_at(near)
    asked = n.asked + 1
    n.jobs, n.first, n.warps = jobs, first, warps
    st_release_cta64(near + NEAR.asked, asked)
    return asked * HELPERS


@device_function
def _await_helpers(near, answers):
    while ld_acquire_cta64(near + NEAR.answers) != answers:
        pass


@engine_function
def copy_together(near, mine, target, source, nbytes):
    """Make the copies of all lanes where `mine`, all lanes and the helpers together."""
    if on_host():
        if mine:
            copy(target, source, nbytes)
    else:
        lanes = lanes_where(mine)
        chunks = (nbytes + CHUNK - 1) // CHUNK if mine else 0
        end = sum_up_to(chunks)
        if mine:
            _put_job(near, rank_among(lanes), target, source, nbytes, end)
        sync_lanes(ALL_LANES)
        jobs = count_lanes(lanes)
        if from_lane(end, 31) == 1:
            _make_part(near, jobs, 0, 1)
        else:
            answers = 0
            if lane_or_0() == 0:
                answers = _ask(near, jobs, 1, 1 + HELPERS)
            _make_part(near, jobs, 0, 1 + HELPERS)
            if lane_or_0() == 0:
                _await_helpers(near, answers)
        sync_lanes(ALL_LANES)


@engine_function
def _copy_with_help(nic, target, source, nbytes):
    """Copy on a GPU, by one thread, or by helpers if there are any."""
    if worker_at(nic).slices == 0 or nbytes <= _ALONE:
        copy(target, source, nbytes)
    else:
        near = dynamic_shared()
        _put_job(near, 0, target, source, nbytes, (nbytes + CHUNK - 1) // CHUNK)
        _await_helpers(near, _ask(near, 1, 0, HELPERS))


@device_function
def copy_payload(nic, target, source, nbytes):
    """Copy payload. One thread calls this."""
    if on_host():
        copy(target, source, nbytes)
    else:
        _copy_with_help(nic, target, source, nbytes)


@engine_function
def help_copying(near, helper):
    """Make the parts of copies that are this warp's, until the slice is over. All lanes call this."""
    answered = 0
    over = False
    while not over:
        if ld_acquire_cta64(near + NEAR.asked) == answered:
            over = ld_acquire_cta64(near + NEAR.over) != 0
            pause()
        else:
            answered += 1
            n = near_at(near)
            _make_part(near, n.jobs, n.first + helper, n.warps)
            sync_lanes(ALL_LANES)
            if lane_or_0() == 0:
                fetch_add_acq_rel_cta64(near + NEAR.answers, 1)
