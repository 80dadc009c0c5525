"""Rows of a worker near its turns: a slice borrows them, and gives them back.

State is in host memory, which is far from a GPU: a load takes a microsecond. So a slice copies the rows of its worker's
queues to where it works (NEAR), makes turns on the copies, and copies back what turns change. On a GPU, that is the
block's shared memory. Between two slices, everybody finds the rows as if they had never been away. Commands are
executed on the rows themselves.

A worker borrows all its rows or none: queues share completion queues, and peers write each other's rows. All lanes of a
warp call these functions together; on the host, a thread is one lane.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    ALL_LANES, await_fetched, dynamic_shared, dynamic_shared_bytes, fetch_line, first_lane, from_lane, lane_or_0,
    lanes_here, lanes_where, ld64, ld_relaxed64, on_host, st64, sync_lanes,
)
from ..queues.reach import NOTHING, OTHER, PACKETS, bars_of_wires, is_acknowledged, reaches
from ..state.counters import COUNTERS
from ..state.cq import CQ_ROW, CqRow
from ..state.near import CQ_COPY, KEYS, NEAR, QP_COPY, cq_copy, near_at, near_queue, qp_copy, queues_in, srq_copy
from ..state.objects import MKEY_ROW
from ..state.qp import QP_BORROWED_BYTES, QP_SETUP_BYTES, QpRow
from ..state.srq import SRQ_ROW, SrqRow
from ..state.work_queue import WORK_QUEUE, QueueKind, WorkQueue, entry
from ..state.worker import WORKER, WorkerState
from ..turn.step import is_arm_register_rung

_LINE = 16


@device_function
def near_of(worker: WorkerState) -> int:
    """Return the address of the worker's NEAR; 0 if there is none."""
    near = worker.near
    return near if on_host() or near == 0 else dynamic_shared()


@device_function
def _near_bytes(worker: WorkerState) -> int:
    """Return the size of NEAR, with the room behind it."""
    return worker.near_bytes if on_host() else dynamic_shared_bytes()


@engine_function
def is_recalled(worker: WorkerState) -> bool:
    """Return whether the host asks for what takes the rows themselves. No load waits for another.

    Of what `serve_host` does, that is all but to serve queues' registers, which are forwarded (forwarding.py).
    """
    asked = ld_relaxed64(worker + WORKER.command_seq) ^ ld_relaxed64(worker + WORKER.command_done)
    asked |= ld_relaxed64(worker + WORKER.hold) | ld_relaxed64(worker + WORKER.stop)
    asked |= ld_relaxed64(worker + WORKER.paused)
    return (asked | is_arm_register_rung(worker)) != 0 or ld_relaxed64(worker + WORKER.pause_at) >= 0


@engine_function
def bars_of(worker: WorkerState) -> int:
    """Return what a worker has to do but requests that need no packets: NOTHING, to deal with PACKETS, or OTHER.

    What the host asks for comes on top (`is_recalled`). One lane calls this.
    """
    queues = ld_relaxed64(worker + WORKER.active_count)
    pending = ld_relaxed64(worker + WORKER.pending_count)
    other = ld_relaxed64(worker + WORKER.virtual_time) | ld_relaxed64(worker + WORKER.waking)
    other |= ld_relaxed64(worker + WORKER.stream_count) | worker.capture
    counts = ld_relaxed64(worker + WORKER.pause_at) >= 0  # WQEs, one by one
    if other != 0 or counts or worker.near == 0 or not 0 < queues <= queues_in(_near_bytes(worker)):
        return OTHER
    return max(bars_of_wires(worker), PACKETS if pending != 0 else NOTHING)


@device_function
def may_keep(worker: WorkerState) -> bool:
    """Return whether rows that are borrowed may stay so. One lane calls this."""
    return bars_of(worker) == NOTHING and not is_recalled(worker)


# --- copies of all lanes ---------------------------------------------------------------------------------------------


@device_function
def _fetch(target: int, source: int, nbytes: int) -> None:
    """Begin to copy whole lines of 16 bytes to NEAR."""
    for at in range(_LINE * lane_or_0(), nbytes, _LINE * lanes_here()):
        fetch_line(target + at, source + at)


@device_function
def _fetched() -> None:
    """Wait until all lanes have fetched what they were to."""
    await_fetched()
    sync_lanes(ALL_LANES)


@device_function
def _put(target: int, source: int, nbytes: int) -> None:
    """Copy words from NEAR."""
    for at in range(8 * lane_or_0(), nbytes, 8 * lanes_here()):
        st64(target + at, ld64(source + at))


@device_function
def _place_of(row: int, source: int, step: int, count: int) -> int:
    """Return the place of a row among `count` copies; `count`, behind their end, if it is not there.

    At `source` is the address of the row of the first copy, and `step` bytes further that of the next one.
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


# --- borrowing -------------------------------------------------------------------------------------------------------


@device_function
def _borrow_row(worker: WorkerState, row: int, nbytes: int, first: int, step: int, counter: int) -> int:
    """Begin to copy a row, if there is one, unless its copy is there. Return the address of the copy, or 0.

    Return -1 if there is no room. `first` is the address of the first copy of such rows, the next one is `step` bytes
    further, and `counter` is the offset of their number in NEAR.
    """
    if row == 0:
        return 0
    count = ld64(worker + counter)
    full = cq_copy(worker, near_at(worker).cq_count) > srq_copy(worker, near_at(worker).srq_count)
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
def _borrow_cq(worker: WorkerState, cq: CqRow) -> int:
    return _borrow_row(worker, cq, CQ_ROW.size, cq_copy(worker, 0), CQ_COPY, NEAR.cq_count)


@engine_function
def _borrow_srq(worker: WorkerState, srq: SrqRow) -> int:
    return _borrow_row(worker, srq, SRQ_ROW.size, srq_copy(worker, 0), -CQ_COPY, NEAR.srq_count)


@engine_function
def _borrow_worker(worker: WorkerState, h: WorkerState) -> None:
    """Copy the worker, and the list of its work queues. What the worker's copy names is in NEAR, but for its lists."""
    _fetch(h, worker, WORKER.size)
    _fetch(h + NEAR.counters, worker.counters, COUNTERS.size)
    _fetch(near_queue(h, 0), worker.active, worker.active_count * WORK_QUEUE.size)
    for at in range(8 * lane_or_0(), KEYS * MKEY_ROW.size, 8 * lanes_here()):
        st64(h + NEAR.keys + at, 0)  # all of each row: a row with nothing but its key gone would be that of key 0
    _fetched()
    if lane_or_0() == 0:
        h.counters, h.active = h + NEAR.counters, near_queue(h, 0)
        h.message, h.scratch, h.near = h + NEAR.message, h + NEAR.scratch, h
        a = near_at(h)
        nbytes = _near_bytes(worker)
        a.qps = near_queue(h, queues_in(nbytes))  # where the list ends at the latest
        a.cqs = a.qps + worker.active_count * QP_COPY
        a.srqs = h + nbytes - CQ_COPY
        a.cq_count, a.srq_count = 0, 0
    sync_lanes(ALL_LANES)


@engine_function
def _set_up_qp(worker: WorkerState, i: int) -> int:
    """Have the copy of a QP name the copies of what belongs to it. Return what `borrow` returns, for this QP."""
    qp = QpRow(qp_copy(worker, i))
    send, receive, srq, remote = qp.send_cq, qp.recv_cq, qp.srq, qp.remote_row
    plain = 1 if qp.wire == 0 or reaches(qp) else 0
    if plain and qp.wire != 0 and not is_acknowledged(qp):
        plain = -1
    sync_lanes(ALL_LANES)
    send, receive, srq = _borrow_cq(worker, send), _borrow_cq(worker, receive), _borrow_srq(worker, srq)
    count = worker.active_count
    peer = _place_of(remote, qp_copy(worker, 0) + QP_BORROWED_BYTES, QP_COPY, count)
    if lane_or_0() == 0:
        qp.worker, qp.work_queue = worker, entry(worker, i)
        qp.send_cq, qp.recv_cq, qp.srq = send, receive, srq
        if qp.wire == 0:
            # A row that nobody has any more is as good as none.
            there = 0 if remote == 0 or peer == count else qp_copy(worker, peer)
            qp.remote_row, qp.peer_keys, qp.peer_tag = there, 0, 0
            if there != 0:
                p = QpRow(there)
                qp.peer_keys, qp.peer_pdn, qp.peer_rights, qp.peer_max = worker.mkeys, p.pdn, p.rights, p.msg_max
    return plain if send >= 0 and receive >= 0 and srq >= 0 else 0


@engine_function
def borrow(nic: WorkerState, worker: WorkerState) -> int:
    """Copy what belongs to a worker. Return 1, or 0 if its queues do more than what is done on borrowed rows.

    Return -1 if that is only because packets are on their way.
    """
    _borrow_worker(nic, worker)
    count = worker.active_count
    for i in range(count):
        row = WorkQueue(entry(worker, i)).row
        if WorkQueue(entry(worker, i)).kind != QueueKind.CONNECTED_SEND:
            return 0
        _fetch(qp_copy(worker, i), row, QP_BORROWED_BYTES)
        if lane_or_0() == 0:
            st64(qp_copy(worker, i) + QP_BORROWED_BYTES, row)
    _fetched()
    plain, moving = 1, 0
    for i in range(count):
        outcome = _set_up_qp(worker, i)
        plain &= outcome  # -1 has all bits
        moving |= 1 if outcome < 0 else 0
    _fetched()
    for i in range(lane_or_0(), count, lanes_here()):
        WorkQueue(entry(worker, i)).row = qp_copy(worker, i)
    naps = 0
    for i in range(lane_or_0(), near_at(worker).cq_count, lanes_here()):
        cq = CqRow(cq_copy(worker, i))
        cq.worker = worker
        naps |= cq.wakeup  # a thread of the host is to be woken for CQEs
    naps = lanes_where(1 if naps != 0 else 0)
    plain, moving = from_lane(plain, 0), from_lane(moving, 0)  # what a peer writes meanwhile, lanes may see differently
    if plain == 0 or naps != 0:
        return 0
    if moving:
        return -1
    if lane_or_0() == 0:
        near_at(worker).owner = nic
    sync_lanes(ALL_LANES)
    return 1


# --- giving back -----------------------------------------------------------------------------------------------------


@engine_function
def give_back(worker: WorkerState, h: WorkerState) -> None:
    """Copy back what turns have changed."""
    sync_lanes(ALL_LANES)
    if lane_or_0() == 0:
        near_at(h).owner = 0
        worker.now, worker.served_first = h.now, h.served_first
        worker.ringing_count, worker.error_event = h.ringing_count, h.error_event
    _put(worker.counters, h + NEAR.counters, COUNTERS.size)
    for i in range(h.active_count):
        copy = qp_copy(h, i)
        row = ld64(copy + QP_BORROWED_BYTES)
        if lane_or_0() == 0:
            q, changed = QpRow(row), QpRow(copy)
            q.state, q.drain = changed.state, changed.drain
            w, seen = WorkQueue(entry(worker, i)), WorkQueue(entry(h, i))
            w.seen, w.awake = seen.seen, seen.awake
        _put(row + QP_SETUP_BYTES, copy + QP_SETUP_BYTES, QP_BORROWED_BYTES - QP_SETUP_BYTES)
    for i in range(near_at(h).cq_count):
        copy = cq_copy(h, i)
        row = ld64(copy + CQ_ROW.size)
        _put(row + CQ_ROW.pi, copy + CQ_ROW.pi, CQ_ROW.size - CQ_ROW.pi)
    for i in range(near_at(h).srq_count):
        copy = srq_copy(h, i)
        row = ld64(copy + SRQ_ROW.size)
        if lane_or_0() == 0:
            SrqRow(row).limit = SrqRow(copy).limit
        _put(row + SRQ_ROW.taken, copy + SRQ_ROW.taken, SRQ_ROW.size - SRQ_ROW.taken)
    sync_lanes(ALL_LANES)
