"""The list of served queue pairs. In each turn, an idle one costs a read of its entry here and one of its doorbell."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld_relaxed64
from ...formats.commands import QpState
from .worker import worker_at
from .qp import WATCH, qp_row_at, watch_at



@device_function
def entry(nic, index):
    """Return the address of an entry. The first `active_count` are in use."""
    return worker_at(nic).active + index * WATCH.size


@device_function
def wake(row):
    """Have the QP served although its doorbell was not rung."""
    watch_at(qp_row_at(row).watch).awake = 1


@device_function
def has_work(watch):
    """Return whether the QP must be served."""
    w = watch_at(watch)
    return w.awake != 0 or ld_relaxed64(w.doorbell) != w.seen


@device_function
def settle(watch):
    """Mark a served QP idle if no work is left. In ERR it is never idle: receives may still be posted."""
    w = watch_at(watch)
    q = qp_row_at(w.row)
    w.seen = q.db_seen
    w.awake = 1 if q.sq_ci != q.sq_pi or q.state == QpState.ERR else 0


@engine_function
def add(nic, row):
    """Serve a QP from now on."""
    n = worker_at(nic)
    q = qp_row_at(row)
    q.watch = entry(nic, n.active_count)
    w = watch_at(q.watch)
    w.row, w.doorbell, w.seen, w.awake = row, q.doorbell, 0, 1
    n.active_count += 1


@engine_function
def remove(nic, row):
    """Stop serving a QP: the last entry takes its place."""
    n = worker_at(nic)
    n.active_count -= 1
    w = watch_at(qp_row_at(row).watch)
    last = watch_at(entry(nic, n.active_count))
    w.row, w.doorbell, w.seen, w.awake = last.row, last.doorbell, last.seen, last.awake
    qp_row_at(w.row).watch = qp_row_at(row).watch
