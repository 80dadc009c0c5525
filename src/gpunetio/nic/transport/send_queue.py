"""What the send queues of all QPs have in common: a turn begins with the doorbell, and in ERR everything is flushed."""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.events import EventType
from ...jit.compile import device_function, engine_function
from ..queues.doorbells import go_on, poll_doorbell
from ..queues.events import tell
from ..queues.wqes import flush_next
from ..state.counters import counters_at
from ..state.qp import qp_row_at
from ..state.work_queue import work_queue_at
from ..state.worker import worker_at
from .execution import flush_receives
from .moving import is_still


@engine_function
def begin_turn(nic, queue):
    """Take what the doorbell announced. In ERR, flush it: return how many WQEs and receives were flushed."""
    row = work_queue_at(queue).row
    poll_doorbell(nic, row)
    return _flush(nic, row) if qp_row_at(row).state == QpState.ERR else 0


@device_function
def may_send(queue):
    """Return whether announced WQEs wait in a QP that may execute them."""
    q = qp_row_at(work_queue_at(queue).row)
    return q.sq_ci != q.sq_pi and q.state == QpState.RTS


@engine_function
def budget(nic):
    """Return how many WQEs may be executed before the next work queue's turn, or before the NIC pauses."""
    n = worker_at(nic)
    if n.pause_at >= 0:
        return min(n.budget, n.pause_at - counters_at(n.counters).sq_wqes)
    return n.budget


@device_function
def end_turn(nic, queue):
    """Raise SQ_DRAINED if that is due, and mark the queue idle if no work is left.

    In ERR it is never idle: receives may still be posted.
    """
    w = work_queue_at(queue)
    q = qp_row_at(w.row)
    if q.drain and q.sq_drained == 0 and q.sq_ci == q.sq_pi and q.state == QpState.RTS:  # (IBTA 11.6.3)
        q.sq_drained = 1
        tell(nic, w.row, EventType.SQ_DRAINED)
    w.seen = q.db_seen
    w.awake = 1 if q.sq_ci != q.sq_pi or q.state == QpState.ERR else 0


@engine_function
def _flush(nic, row):
    """Complete everything posted to a QP in ERR with a flush error: return how many."""
    q = qp_row_at(row)
    if worker_at(nic).stream_count != 0 and not is_still(nic, row):
        return 0
    if q.drain:
        go_on(nic, row)
    done = flush_receives(nic, row)
    while q.sq_ci != q.sq_pi:
        flush_next(nic, row)
        done += 1
    return done


@device_function
def waits(row):
    """Return whether an announced WQE is not complete: the engine must not sleep."""
    q = qp_row_at(row)
    return q.sq_ci != q.sq_pi and q.state >= QpState.RTS


@device_function
def in_flight(row):
    """Return whether a started WQE waits for its peer."""
    q = qp_row_at(row)
    return q.sq_ci != q.sq_sent and q.state == QpState.RTS
