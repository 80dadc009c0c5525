"""The row cache: a slice copies the rows of its worker's queues to shared memory, and writes them back.

State is in host memory, where a load from a GPU takes a microsecond. So a slice copies the rows of its worker's queues
to its SLICE_SHARED, makes turns on the copies, and writes back what the turns have changed. On a GPU, SLICE_SHARED is
the block's shared memory. Between two slices, the rows themselves are up to date. Commands are executed on the rows
themselves.

A worker caches all its rows or none: queues share completion queues, and peers write each other's rows. All lanes of a
warp call these functions together; on the host, a thread is one lane.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    ALL_LANES, await_fetched, dynamic_shared, dynamic_shared_bytes, fetch_line, first_lane, from_lane, lane_or_0,
    lanes_here, lanes_where, ld64, ld_relaxed64, on_host, st64, sync_lanes,
)
from ..queues.reach import NOTHING, OTHER, PACKETS, is_acknowledged, needs_no_packets, wires_obstacle
from ..state.counters import COUNTERS
from ..state.cq import CQ_ROW, CqRow
from ..state.objects import MKEY_ROW
from ..state.qp import QP_CACHED_BYTES, QP_SETUP_BYTES, QpRow
from ..state.slice_shared import (
    CQ_COPY, KEYS, QP_COPY, SLICE_SHARED, cq_copy, qp_copy, queues_in, shared_at, shared_queue, srq_copy,
)
from ..state.srq import SRQ_ROW, SrqRow
from ..state.work_queue import WORK_QUEUE, QueueKind, entry
from ..state.worker import WORKER, WorkerState
from ..turn.step import is_arm_register_rung

_LINE = 16


@device_function
def shared_of(worker: WorkerState) -> int:
    """Return the address of the worker's SLICE_SHARED; 0 if there is none."""
    shared = worker.shared
    return shared if on_host() or shared == 0 else dynamic_shared()


@device_function
def _shared_bytes(worker: WorkerState) -> int:
    """Return the size of the SLICE_SHARED, with the room for rows after it."""
    return worker.shared_bytes if on_host() else dynamic_shared_bytes()


@engine_function
def is_recalled(worker: WorkerState) -> bool:
    """Return whether the host requests something that needs the rows themselves. No load depends on another.

    That is everything `serve_host` does, except serving the registers of queues: rings there are forwarded
    (forwarding.py).
    """
    asked = ld_relaxed64(worker + WORKER.command_seq) ^ ld_relaxed64(worker + WORKER.command_done)
    asked |= ld_relaxed64(worker + WORKER.hold) | ld_relaxed64(worker + WORKER.stop)
    asked |= ld_relaxed64(worker + WORKER.paused)
    return (asked | is_arm_register_rung(worker)) != 0 or ld_relaxed64(worker + WORKER.pause_at) >= 0


@engine_function
def caching_obstacle(worker: WorkerState) -> int:
    """Return what keeps a worker from caching its rows: NOTHING, PACKETS on their way, or something OTHER.

    Requests of the host are checked separately (`is_recalled`). One lane calls this.
    """
    queues = ld_relaxed64(worker + WORKER.active_count)
    pending = ld_relaxed64(worker + WORKER.pending_count)
    other = ld_relaxed64(worker + WORKER.virtual_time) | ld_relaxed64(worker + WORKER.waking)
    other |= ld_relaxed64(worker + WORKER.stream_count) | worker.capture
    counts = ld_relaxed64(worker + WORKER.pause_at) >= 0  # WQEs, one by one
    if other != 0 or counts or worker.shared == 0 or not 0 < queues <= queues_in(_shared_bytes(worker)):
        return OTHER
    return max(wires_obstacle(worker), PACKETS if pending != 0 else NOTHING)


@device_function
def may_stay_cached(worker: WorkerState) -> bool:
    """Return whether cached rows may stay cached. One lane calls this."""
    return caching_obstacle(worker) == NOTHING and not is_recalled(worker)


# --- copies of all lanes ---------------------------------------------------------------------------------------------


@device_function
def _fetch(target: int, source: int, nbytes: int) -> None:
    """Start to copy whole lines of 16 bytes to shared memory."""
    for at in range(_LINE * lane_or_0(), nbytes, _LINE * lanes_here()):
        fetch_line(target + at, source + at)


@device_function
def _fetched() -> None:
    """Wait until the fetches of all lanes are complete."""
    await_fetched()
    sync_lanes(ALL_LANES)


@device_function
def _put(target: int, source: int, nbytes: int) -> None:
    """Copy words from shared memory to a row."""
    for at in range(8 * lane_or_0(), nbytes, 8 * lanes_here()):
        st64(target + at, ld64(source + at))


@device_function
def _place_of(row: int, source: int, step: int, count: int) -> int:
    """Return the index of a row's copy among `count` copies, or `count` if the row has no copy.

    The word at `source` is the address of the first copy's row. The word for the next copy is `step` bytes further.
    """
    for base in range(0, count, lanes_here()):
        i = base + lane_or_0()
        here = 0
        if i < count and ld64(source + step * i) == row:
            here = 1
        found = lanes_where(here)
        if found != 0:
            return base + first_lane(found)
    return count


# --- filling the cache -----------------------------------------------------------------------------------------------


@device_function
def _cache_row(worker: WorkerState, row: int, nbytes: int, first: int, step: int, counter: int) -> int:
    """Start to copy a row unless it is cached already. Return the address of the copy, or 0 if `row` is 0.

    Return -1 if there is no room. `first` is the address of the first copy of such rows, the next copy is `step` bytes
    further, and `counter` is the offset of their count in SLICE_SHARED.
    """
    if row == 0:
        return 0
    count = ld64(worker + counter)
    full = cq_copy(worker, shared_at(worker).cq_count) > srq_copy(worker, shared_at(worker).srq_count)
    sync_lanes(ALL_LANES)  # before one of them counts another
    at = _place_of(row, first + nbytes, step, count)
    copy = first + at * step
    if at == count:
        if full:
            return -1
        _fetch(copy, row, nbytes)
        if lane_or_0() == 0:
            st64(copy + nbytes, row)
            st64(worker + counter, count + 1)
        sync_lanes(ALL_LANES)
    return copy


@engine_function
def _cache_cq(worker: WorkerState, cq: CqRow) -> int:
    return _cache_row(worker, cq, CQ_ROW.size, cq_copy(worker, 0), CQ_COPY, SLICE_SHARED.cq_count)


@engine_function
def _cache_srq(worker: WorkerState, srq: SrqRow) -> int:
    return _cache_row(worker, srq, SRQ_ROW.size, srq_copy(worker, 0), -CQ_COPY, SLICE_SHARED.srq_count)


@engine_function
def _cache_worker(worker: WorkerState, h: WorkerState) -> None:
    """Copy the worker and the list of its work queues. The copy's addresses lead to SLICE_SHARED, except its lists."""
    _fetch(h, worker, WORKER.size)
    _fetch(h + SLICE_SHARED.counters, worker.counters, COUNTERS.size)
    _fetch(shared_queue(h, 0), worker.active, worker.active_count * WORK_QUEUE.size)
    for at in range(8 * lane_or_0(), KEYS * MKEY_ROW.size, 8 * lanes_here()):
        st64(h + SLICE_SHARED.keys + at, 0)  # whole rows: with only the key cleared, a row would be that of key 0
    _fetched()
    if lane_or_0() == 0:
        h.counters, h.active = h + SLICE_SHARED.counters, shared_queue(h, 0)
        h.message, h.scratch, h.shared = h + SLICE_SHARED.message, h + SLICE_SHARED.scratch, h
        a = shared_at(h)
        nbytes = _shared_bytes(worker)
        a.qps = shared_queue(h, queues_in(nbytes))  # where the list ends at the latest
        a.cqs = a.qps + worker.active_count * QP_COPY
        a.srqs = h + nbytes - CQ_COPY
        a.cq_count, a.srq_count = 0, 0
    sync_lanes(ALL_LANES)


@engine_function
def _set_up_qp(worker: WorkerState, i: int) -> int:
    """Point the copy of a QP to the copies of its CQs, SRQ and peer. Return what `cache_rows` returns, for this QP."""
    qp = QpRow(qp_copy(worker, i))
    send, receive, srq, remote = qp.send_cq, qp.recv_cq, qp.srq, qp.remote_row
    plain = 1 if qp.wire == 0 or needs_no_packets(qp) else 0
    if plain and qp.wire != 0 and not is_acknowledged(qp):
        plain = -1
    sync_lanes(ALL_LANES)
    send, receive, srq = _cache_cq(worker, send), _cache_cq(worker, receive), _cache_srq(worker, srq)
    count = worker.active_count
    peer = _place_of(remote, qp_copy(worker, 0) + QP_CACHED_BYTES, QP_COPY, count)
    if lane_or_0() == 0:
        qp.worker, qp.work_queue = worker, entry(worker, i)
        qp.send_cq, qp.recv_cq, qp.srq = send, receive, srq
        if qp.wire == 0:
            # A peer's row that no copy belongs to counts as no peer.
            there = 0 if remote == 0 or peer == count else qp_copy(worker, peer)
            qp.remote_row, qp.peer_keys, qp.peer_tag = there, 0, 0
            if there != 0:
                p = QpRow(there)
                qp.peer_keys, qp.peer_pdn, qp.peer_rights, qp.peer_max = worker.mkeys, p.pdn, p.rights, p.msg_max
    return plain if send >= 0 and receive >= 0 and srq >= 0 else 0


@engine_function
def cache_rows(nic: WorkerState, worker: WorkerState) -> int:
    """Copy the rows of a worker's queues. Return 1, or 0 if the queues need something that cached rows don't support.

    Return -1 if only packets in flight prevent it.
    """
    _cache_worker(nic, worker)
    count = worker.active_count
    for i in range(count):
        row = entry(worker, i).row
        if entry(worker, i).kind != QueueKind.CONNECTED_SEND:
            return 0
        _fetch(qp_copy(worker, i), row, QP_CACHED_BYTES)
        if lane_or_0() == 0:
            st64(qp_copy(worker, i) + QP_CACHED_BYTES, row)
    _fetched()
    plain, moving = 1, 0
    for i in range(count):
        outcome = _set_up_qp(worker, i)
        plain &= outcome  # -1 has all bits
        moving |= 1 if outcome < 0 else 0
    _fetched()
    for i in range(lane_or_0(), count, lanes_here()):
        entry(worker, i).row = qp_copy(worker, i)
    naps = 0
    for i in range(lane_or_0(), shared_at(worker).cq_count, lanes_here()):
        cq = CqRow(cq_copy(worker, i))
        cq.worker = worker
        naps |= cq.wakeup  # a host thread sleeps until CQEs arrive
    naps = lanes_where(1 if naps != 0 else 0)
    plain, moving = from_lane(plain, 0), from_lane(moving, 0)  # a peer may write meanwhile, so lanes may differ
    if plain == 0 or naps != 0:
        return 0
    if moving:
        return -1
    if lane_or_0() == 0:
        shared_at(worker).owner = nic
    sync_lanes(ALL_LANES)
    return 1


# --- writing back ----------------------------------------------------------------------------------------------------


@engine_function
def write_back_rows(worker: WorkerState, h: WorkerState) -> None:
    """Write back what turns have changed."""
    sync_lanes(ALL_LANES)
    if lane_or_0() == 0:
        shared_at(h).owner = 0
        worker.now, worker.served_first = h.now, h.served_first
        worker.ringing_count, worker.error_event = h.ringing_count, h.error_event
    _put(worker.counters, h + SLICE_SHARED.counters, COUNTERS.size)
    for i in range(h.active_count):
        copy = qp_copy(h, i)
        row = ld64(copy + QP_CACHED_BYTES)
        if lane_or_0() == 0:
            q, changed = QpRow(row), QpRow(copy)
            q.state, q.drain = changed.state, changed.drain
            w, seen = entry(worker, i), entry(h, i)
            w.seen, w.awake = seen.seen, seen.awake
        _put(row + QP_SETUP_BYTES, copy + QP_SETUP_BYTES, QP_CACHED_BYTES - QP_SETUP_BYTES)
    for i in range(shared_at(h).cq_count):
        copy = cq_copy(h, i)
        row = ld64(copy + CQ_ROW.size)
        _put(row + CQ_ROW.pi, copy + CQ_ROW.pi, CQ_ROW.size - CQ_ROW.pi)
    for i in range(shared_at(h).srq_count):
        copy = srq_copy(h, i)
        row = ld64(copy + SRQ_ROW.size)
        if lane_or_0() == 0:
            SrqRow(row).limit = SrqRow(copy).limit
        _put(row + SRQ_ROW.taken, copy + SRQ_ROW.taken, SRQ_ROW.size - SRQ_ROW.taken)
    sync_lanes(ALL_LANES)
