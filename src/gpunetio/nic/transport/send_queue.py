"""What the send queues of all QPs have in common: a turn begins with the doorbell, and in ERR everything is flushed."""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.events import EventType
from ...jit.compile import device_function, engine_function
from ..queues.doorbells import leave_sqd, poll_doorbell
from ..queues.events import raise_qp_event
from ..queues.wqes import flush_next
from ..state.counters import CounterSet
from ..state.qp import QpRow
from ..state.work_queue import WorkQueue
from ..state.worker import WorkerState
from .execution import flush_receives
from .moving import is_still


@engine_function
def begin_turn(worker: WorkerState, queue: WorkQueue) -> int:
    """Take what the doorbell announced. In ERR, flush it: return how many WQEs and receives were flushed."""
    qp = QpRow(queue.row)
    poll_doorbell(worker, qp)
    return _flush(worker, qp) if qp.state == QpState.ERR else 0


@device_function
def may_send(queue: WorkQueue) -> bool:
    """Return whether announced WQEs wait in a QP that may execute them."""
    qp = QpRow(queue.row)
    return qp.sq_ci != qp.sq_pi and qp.state == QpState.RTS


@engine_function
def budget(worker: WorkerState) -> int:
    """Return how many WQEs may be executed before the next work queue's turn, or before the NIC pauses."""
    if worker.pause_at >= 0:
        return min(worker.budget, worker.pause_at - CounterSet(worker.counters).sq_wqes)
    return worker.budget


@device_function
def end_turn(worker: WorkerState, queue: WorkQueue) -> None:
    """Raise SQ_DRAINED if that is due, and mark the queue idle if no work is left.

    In ERR it is never idle: receives may still be posted.
    """
    qp = QpRow(queue.row)
    if qp.drain and qp.sq_drained == 0 and qp.sq_ci == qp.sq_pi and qp.state == QpState.RTS:  # (IBTA 11.6.3)
        qp.sq_drained = 1
        raise_qp_event(worker, QpRow(queue.row), EventType.SQ_DRAINED)
    queue.seen = qp.db_seen
    queue.awake = 1 if qp.sq_ci != qp.sq_pi or qp.state == QpState.ERR else 0


@engine_function
def _flush(worker: WorkerState, qp: QpRow) -> int:
    """Complete everything posted to a QP in ERR with a flush error: return how many."""
    if worker.stream_count != 0 and not is_still(worker, qp):
        return 0
    if qp.drain:
        leave_sqd(worker, qp)
    done = flush_receives(worker, qp)
    while qp.sq_ci != qp.sq_pi:
        flush_next(worker, qp)
        done += 1
    return done


@device_function
def waits(qp: QpRow) -> bool:
    """Return whether an announced WQE is not complete: the engine must not sleep."""
    return qp.sq_ci != qp.sq_pi and qp.state >= QpState.RTS


@device_function
def in_flight(qp: QpRow) -> bool:
    """Return whether a started WQE waits for its peer."""
    return qp.sq_ci != qp.sq_sent and qp.state == QpState.RTS
