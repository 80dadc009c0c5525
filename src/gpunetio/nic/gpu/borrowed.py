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
)  # fmt: skip
from ..queues.reach import NOTHING, OTHER, PACKETS, bars_of_wires, is_acknowledged, reaches
from ..state.counters import COUNTERS
from ..state.cq import CQ_ROW, cq_row_at
from ..state.near import CQ_COPY, KEYS, NEAR, QP_COPY, cq_copy, near_at, near_queue, qp_copy, queues_in, srq_copy
from ..state.nic import nic_at
from ..state.objects import MKEY_ROW
from ..state.qp import QP_BORROWED_BYTES, QP_SETUP_BYTES, qp_row_at
from ..state.srq import SRQ_ROW, srq_row_at
from ..state.work_queue import WORK_QUEUE, QueueKind, entry, work_queue_at
from ..state.worker import WORKER, worker_at
from ..turn.step import is_arm_register_rung

_LINE = 16


@device_function
def near_of(nic):
    """Return the address of the worker's NEAR; 0 if there is none."""
    near = worker_at(nic).near
    return near if on_host() or near == 0 else dynamic_shared()


@device_function
def _near_bytes(nic):
    """Return the size of NEAR, with the room behind it."""
    return worker_at(nic).near_bytes if on_host() else dynamic_shared_bytes()


@engine_function
def is_recalled(nic):
    """Return whether the host asks for what takes the rows themselves. No load waits for another.

    Of what `serve_host` does, that is all but to serve queues' registers, which are forwarded (forwarding.py).
    """
    asked = ld_relaxed64(nic + WORKER.command_seq) ^ ld_relaxed64(nic + WORKER.command_done)
    asked |= ld_relaxed64(nic + WORKER.hold) | ld_relaxed64(nic + WORKER.stop) | ld_relaxed64(nic + WORKER.paused)
    return (asked | is_arm_register_rung(nic)) != 0 or ld_relaxed64(nic + WORKER.pause_at) >= 0


@engine_function
def bars_of(nic):
    """Return what a worker has to do but requests that need no packets: NOTHING, to deal with PACKETS, or OTHER.

    What the host asks for comes on top (`is_recalled`). One lane calls this.
    """
    n = worker_at(nic)
    queues = ld_relaxed64(nic + WORKER.active_count)
    pending = ld_relaxed64(nic + WORKER.pending_count)
    other = ld_relaxed64(nic + WORKER.virtual_time) | ld_relaxed64(nic + WORKER.waking)
    other |= ld_relaxed64(nic + WORKER.stream_count) | n.capture
    counts = ld_relaxed64(nic + WORKER.pause_at) >= 0  # WQEs, one by one
    if other != 0 or counts or n.near == 0 or not 0 < queues <= queues_in(_near_bytes(nic)):
        return OTHER
    return max(bars_of_wires(nic), PACKETS if pending != 0 else NOTHING)


@device_function
def may_keep(nic):
    """Return whether rows that are borrowed may stay so. One lane calls this."""
    return bars_of(nic) == NOTHING and not is_recalled(nic)


# --- copies of all lanes ---------------------------------------------------------------------------------------------


@device_function
def _fetch(target, source, nbytes):
    """Begin to copy whole lines of 16 bytes to NEAR."""
    for at in range(_LINE * lane_or_0(), nbytes, _LINE * lanes_here()):
        fetch_line(target + at, source + at)


@device_function
def _fetched():
    """Wait until all lanes have fetched what they were to."""
    await_fetched()
    sync_lanes(ALL_LANES)


@device_function
def _put(target, source, nbytes):
    """Copy words from NEAR."""
    for at in range(8 * lane_or_0(), nbytes, 8 * lanes_here()):
        st64(target + at, ld64(source + at))


@device_function
def _place_of(row, source, step, count):
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
def _borrow_row(near, row, nbytes, first, step, counter):
    """Begin to copy a row, if there is one, unless its copy is there. Return the address of the copy, or 0.

    Return -1 if there is no room. `first` is the address of the first copy of such rows, the next one is `step` bytes
    further, and `counter` is the offset of their number in NEAR.
    """
    if row == 0:
        return 0
    count = ld64(near + counter)
    full = cq_copy(near, near_at(near).cq_count) > srq_copy(near, near_at(near).srq_count)
    sync_lanes(ALL_LANES)  # before one of them counts another
    at = _place_of(row, first + nbytes, step, count)
    copy = first + at * step
    if at == count:
        if full:
            return -1
        _fetch(copy, row, nbytes)
        if lane_or_0() == 0:
            st64(copy + nbytes, row)
            st64(near + counter, count + 1)
        sync_lanes(ALL_LANES)
    return copy


@engine_function
def _borrow_cq(near, cq):
    return _borrow_row(near, cq, CQ_ROW.size, cq_copy(near, 0), CQ_COPY, NEAR.cq_count)


@engine_function
def _borrow_srq(near, srq):
    return _borrow_row(near, srq, SRQ_ROW.size, srq_copy(near, 0), -CQ_COPY, NEAR.srq_count)


@engine_function
def _borrow_worker(nic, near):
    """Copy the worker, and the list of its work queues. What the worker's copy names is in NEAR, but for its lists."""
    n = worker_at(nic)
    _fetch(near, nic, WORKER.size)
    _fetch(near + NEAR.counters, n.counters, COUNTERS.size)
    _fetch(near_queue(near, 0), n.active, n.active_count * WORK_QUEUE.size)
    for at in range(8 * lane_or_0(), KEYS * MKEY_ROW.size, 8 * lanes_here()):
        st64(near + NEAR.keys + at, 0)  # all of each row: a row with nothing but its key gone would be that of key 0
    _fetched()
    if lane_or_0() == 0:
        h = worker_at(near)
        h.counters, h.active = near + NEAR.counters, near_queue(near, 0)
        h.message, h.scratch, h.near = near + NEAR.message, near + NEAR.scratch, near
        a = near_at(near)
        nbytes = _near_bytes(nic)
        a.qps = near_queue(near, queues_in(nbytes))  # where the list ends at the latest
        a.cqs = a.qps + n.active_count * QP_COPY
        a.srqs = near + nbytes - CQ_COPY
        a.cq_count, a.srq_count = 0, 0
    sync_lanes(ALL_LANES)


@engine_function
def _set_up_qp(near, i):
    """Have the copy of a QP name the copies of what belongs to it. Return what `borrow` returns, for this QP."""
    row = qp_copy(near, i)
    q = qp_row_at(row)
    send, receive, srq, remote = q.send_cq, q.recv_cq, q.srq, q.remote_row
    plain = 1 if q.wire == 0 or reaches(row) else 0
    if plain and q.wire != 0 and not is_acknowledged(row):
        plain = -1
    sync_lanes(ALL_LANES)
    send, receive, srq = _borrow_cq(near, send), _borrow_cq(near, receive), _borrow_srq(near, srq)
    count = worker_at(near).active_count
    peer = _place_of(remote, qp_copy(near, 0) + QP_BORROWED_BYTES, QP_COPY, count)
    if lane_or_0() == 0:
        q.worker, q.work_queue = near, entry(near, i)
        q.send_cq, q.recv_cq, q.srq = send, receive, srq
        if q.wire == 0:
            # A row that nobody has any more is as good as none.
            there = 0 if remote == 0 or peer == count else qp_copy(near, peer)
            q.remote_row, q.peer_keys, q.peer_tag = there, 0, 0
            if there != 0:
                p = qp_row_at(there)
                q.peer_keys, q.peer_pdn, q.peer_rights, q.peer_max = nic_at(near).mkeys, p.pdn, p.rights, p.msg_max
    return plain if send >= 0 and receive >= 0 and srq >= 0 else 0


@engine_function
def borrow(nic, near):
    """Copy what belongs to a worker. Return 1, or 0 if its queues do more than what is done on borrowed rows.

    Return -1 if that is only because packets are on their way.
    """
    _borrow_worker(nic, near)
    count = worker_at(near).active_count
    for i in range(count):
        row = work_queue_at(entry(near, i)).row
        if work_queue_at(entry(near, i)).kind != QueueKind.CONNECTED_SEND:
            return 0
        _fetch(qp_copy(near, i), row, QP_BORROWED_BYTES)
        if lane_or_0() == 0:
            st64(qp_copy(near, i) + QP_BORROWED_BYTES, row)
    _fetched()
    plain, moving = 1, 0
    for i in range(count):
        outcome = _set_up_qp(near, i)
        plain &= outcome  # -1 has all bits
        moving |= 1 if outcome < 0 else 0
    _fetched()
    for i in range(lane_or_0(), count, lanes_here()):
        work_queue_at(entry(near, i)).row = qp_copy(near, i)
    naps = 0
    for i in range(lane_or_0(), near_at(near).cq_count, lanes_here()):
        c = cq_row_at(cq_copy(near, i))
        c.worker = near
        naps |= c.wakeup  # a thread of the host is to be woken for CQEs
    naps = lanes_where(1 if naps != 0 else 0)
    plain, moving = from_lane(plain, 0), from_lane(moving, 0)  # what a peer writes meanwhile, lanes may see differently
    if plain == 0 or naps != 0:
        return 0
    if moving:
        return -1
    if lane_or_0() == 0:
        near_at(near).owner = nic
    sync_lanes(ALL_LANES)
    return 1


# --- giving back -----------------------------------------------------------------------------------------------------


@engine_function
def give_back(nic, near):
    """Copy back what turns have changed."""
    sync_lanes(ALL_LANES)
    n, h = worker_at(nic), worker_at(near)
    if lane_or_0() == 0:
        near_at(near).owner = 0
        n.now, n.served_first, n.ringing_count, n.error_event = h.now, h.served_first, h.ringing_count, h.error_event
    _put(n.counters, near + NEAR.counters, COUNTERS.size)
    for i in range(h.active_count):
        copy = qp_copy(near, i)
        row = ld64(copy + QP_BORROWED_BYTES)
        if lane_or_0() == 0:
            q, changed = qp_row_at(row), qp_row_at(copy)
            q.state, q.drain = changed.state, changed.drain
            w, seen = work_queue_at(entry(nic, i)), work_queue_at(entry(near, i))
            w.seen, w.awake = seen.seen, seen.awake
        _put(row + QP_SETUP_BYTES, copy + QP_SETUP_BYTES, QP_BORROWED_BYTES - QP_SETUP_BYTES)
    for i in range(near_at(near).cq_count):
        copy = cq_copy(near, i)
        row = ld64(copy + CQ_ROW.size)
        _put(row + CQ_ROW.pi, copy + CQ_ROW.pi, CQ_ROW.size - CQ_ROW.pi)
    for i in range(near_at(near).srq_count):
        copy = srq_copy(near, i)
        row = ld64(copy + SRQ_ROW.size)
        if lane_or_0() == 0:
            srq_row_at(row).limit = srq_row_at(copy).limit
        _put(row + SRQ_ROW.taken, copy + SRQ_ROW.taken, SRQ_ROW.size - SRQ_ROW.taken)
    sync_lanes(ALL_LANES)
