"""The queue pairs that are served. One with nothing to do costs a turn a look at its entry here and at its doorbell."""

from __future__ import annotations

from ..device.compile import device_function, engine_function
from ..device.ops import ld_relaxed64
from ..formats.commands import QpState
from .tables import WATCH, nic_at, qp_row_at, watch_at

_ERR = int(QpState.ERR)


@device_function
def entry(nic, index):
    """Address of an entry; the first `active_count` are in use."""
    return nic_at(nic).active + index * WATCH.size


@device_function
def wake(row):
    """The QP must be served, though its doorbell was not rung."""
    watch_at(qp_row_at(row).watch).awake = 1


@device_function
def has_work(watch):
    """Whether the QP must be served."""
    w = watch_at(watch)
    return w.awake != 0 or ld_relaxed64(w.doorbell) != w.seen


@device_function
def settle(watch):
    """The QP was served: it may be idle now. In ERR it never is, as receives may still be posted."""
    w = watch_at(watch)
    q = qp_row_at(w.row)
    w.seen = q.db_seen
    w.awake = 1 if q.sq_ci != q.sq_pi or q.state == _ERR else 0


@engine_function
def add(nic, row):
    """Serve a QP from now on."""
    n = nic_at(nic)
    q = qp_row_at(row)
    q.watch = entry(nic, n.active_count)
    w = watch_at(q.watch)
    w.row, w.doorbell, w.seen, w.awake = row, q.doorbell, 0, 1
    n.active_count += 1


@engine_function
def remove(nic, row):
    """Serve it no more: the last one takes its place."""
    n = nic_at(nic)
    n.active_count -= 1
    w = watch_at(qp_row_at(row).watch)
    last = watch_at(entry(nic, n.active_count))
    w.row, w.doorbell, w.seen, w.awake = last.row, last.doorbell, last.seen, last.awake
    qp_row_at(w.row).watch = qp_row_at(row).watch
