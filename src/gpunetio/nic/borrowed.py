"""Rows of a worker near its turns: a slice borrows them, and gives them back.

State is in host memory, which is far from a GPU: a load takes a microsecond. So a slice copies the rows of its worker's
queues to where it works, makes turns on the copies, and copies back what turns change. Between two slices, everybody
finds the rows as if they had never been away. Commands are executed on the rows themselves.

A copy is at a fixed distance from its row, one distance for each table, so a sum makes the address of the copy from
that of the row. A worker borrows all its rows or none: queues share completion queues, and peers write each other's
rows.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import copy, ld_relaxed64
from .state.counters import COUNTERS
from .state.cq import CQ_ROW, cq_row_at
from .state.objects import MKEY_ROW
from .state.qp import QP_ROW, QP_SETUP_BYTES, qp_row_at
from .state.srq import SRQ_ROW, srq_row_at
from .state.work_queue import WORK_QUEUE, QueueKind, entry, work_queue_at
from .state.worker import WORKER, worker_at

MOST = 64  # queues of a worker that borrows: the copies of more would take too much of a slice


@engine_function
def is_recalled(nic):
    """Return whether the host asks for what is done on the rows themselves."""
    n = worker_at(nic)
    asked = ld_relaxed64(nic + WORKER.command_seq) != n.command_done or ld_relaxed64(nic + WORKER.pause_at) >= 0
    return asked or ld_relaxed64(nic + WORKER.hold) + ld_relaxed64(nic + WORKER.stop) + n.paused != 0


@device_function
def _naps(cq):
    """Return whether a thread of the host is to be woken for CQEs of a CQ, if there is one."""
    return cq != 0 and cq_row_at(cq).wakeup != 0


@engine_function
def may_borrow(nic):
    """Return whether all that the worker has to do is requests between queue pairs of this NIC."""
    n = worker_at(nic)
    if n.control_away == 0 or n.active_count == 0 or n.active_count > MOST or is_recalled(nic):
        return False
    if n.wire_count + n.stream_count + n.pending_count + n.capture + n.virtual_time + n.waking != 0:
        return False
    for i in range(n.active_count):
        w = work_queue_at(entry(nic, i))
        if w.kind != QueueKind.CONNECTED_SEND:
            return False
        q = qp_row_at(w.row)
        if q.wire + q.core_direct != 0 or _naps(q.send_cq) or _naps(q.recv_cq):
            return False
    return True


@device_function
def _borrow_cq(nic, cq):
    """Copy a CQ, if there is one. Return the address of the copy, or 0."""
    if cq == 0:
        return 0
    n = worker_at(nic)
    near = cq + n.cqs_away
    copy(near, cq, CQ_ROW.size)
    cq_row_at(near).worker = nic + n.control_away
    return near


@device_function
def _borrow_srq(nic, srq):
    """Copy an SRQ, if there is one. Return the address of the copy, or 0."""
    if srq == 0:
        return 0
    near = srq + worker_at(nic).srqs_away
    copy(near, srq, SRQ_ROW.size)
    return near


@engine_function
def _borrow_qp(nic, row):
    """Copy a QP and its queues."""
    n = worker_at(nic)
    near = row + n.qps_away
    copy(near, row, QP_ROW.size)
    q = qp_row_at(near)
    q.worker = nic + n.control_away
    q.work_queue += n.control_away
    q.send_cq = _borrow_cq(nic, q.send_cq)
    q.recv_cq = _borrow_cq(nic, q.recv_cq)
    q.srq = _borrow_srq(nic, q.srq)
    if q.remote_row != 0:
        q.remote_row += n.qps_away


@engine_function
def borrow(nic):
    """Copy what belongs to a worker. Return the address of the copy of its record."""
    n = worker_at(nic)
    near = nic + n.control_away
    copy(near, nic, WORKER.size)
    h = worker_at(near)
    h.counters += n.control_away
    h.active += n.control_away
    h.message += n.control_away
    h.scratch += n.control_away
    h.mkeys += n.mkeys_away
    copy(h.counters, n.counters, COUNTERS.size)
    for i in range(n.active_count):
        w = work_queue_at(entry(nic, i))
        copy(entry(near, i), entry(nic, i), WORK_QUEUE.size)
        work_queue_at(entry(near, i)).row = w.row + n.qps_away
        _borrow_qp(nic, w.row)
        peer = qp_row_at(w.row).remote_row
        if peer != 0:  # which may be a row that nobody has any more
            _borrow_qp(nic, peer)
    return near


@device_function
def _give_back_cq(nic, cq):
    if cq != 0:
        copy(cq + CQ_ROW.pi, cq + worker_at(nic).cqs_away + CQ_ROW.pi, CQ_ROW.size - CQ_ROW.pi)


@engine_function
def _give_back_qp(nic, row):
    """Copy back what turns change of a QP and its queues."""
    n = worker_at(nic)
    near = row + n.qps_away
    q, changed = qp_row_at(row), qp_row_at(near)
    q.state, q.drain = changed.state, changed.drain
    copy(row + QP_SETUP_BYTES, near + QP_SETUP_BYTES, QP_ROW.size - QP_SETUP_BYTES)
    _give_back_cq(nic, q.send_cq)
    _give_back_cq(nic, q.recv_cq)
    if q.srq != 0:
        srq = q.srq + n.srqs_away
        srq_row_at(q.srq).limit = srq_row_at(srq).limit
        copy(q.srq + SRQ_ROW.taken, srq + SRQ_ROW.taken, SRQ_ROW.size - SRQ_ROW.taken)


@engine_function
def give_back(nic):
    """Copy back what turns have changed."""
    n = worker_at(nic)
    near = nic + n.control_away
    h = worker_at(near)
    n.now, n.served_first, n.ringing_count, n.error_event = h.now, h.served_first, h.ringing_count, h.error_event
    copy(n.counters, h.counters, COUNTERS.size)
    for i in range(n.active_count):
        w, changed = work_queue_at(entry(nic, i)), work_queue_at(entry(near, i))
        w.seen, w.awake = changed.seen, changed.awake
        _give_back_qp(nic, w.row)


@device_function
def write_key(nic, row, source, nbytes):
    """Write what a command writes to the table of keys to the copies, too."""
    n = worker_at(nic)
    if n.mkeys_away != 0 and 0 <= row - n.mkeys <= n.mkey_mask * MKEY_ROW.size:
        copy(row + n.mkeys_away, source, nbytes)
