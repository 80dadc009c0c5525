"""Work queues, which the engine serves. A work queue has a ring, a doorbell, and a kind that selects how it is served.

In each turn, an idle work queue costs a read of its entry here and one of its doorbell.
"""

from __future__ import annotations

from enum import IntEnum

from ...formats.layout import I32, I64
from ...jit.compile import device_function, engine_function
from ...jit.ops import ld_relaxed64
from .qp import QpRow
from .record import State, engine
from .worker import WorkerState


class QueueKind(IntEnum):
    """A kind of work queue: a row of nic/turn/work_queues.py."""

    CONNECTED_SEND = 1  # the send queue of an RC or UC QP
    DATAGRAM_SEND  = 2  # the send queue of a UD QP
    ETHERNET_SEND  = 3  # an SQ


class WorkQueue(State, align=32):
    """An entry of the list of work queues that a worker serves."""

    row: I64 = engine("address of the row of the object with the queue: a QP_ROW or SQ_ROW")
    doorbell: I64 = engine("address of the doorbell line")
    seen: I64 = engine("value of the doorbell when the queue was last served")
    kind: I32 = engine("QueueKind")
    awake: I32 = engine("not 0: the queue is served although its doorbell was not rung")


WORK_QUEUE = WorkQueue.entry


@device_function
def entry(worker: WorkerState, index: int) -> WorkQueue:
    """Return an entry. The first `active_count` are in use."""
    return WorkQueue(worker.active + index * WORK_QUEUE.size)


@device_function
def has_work(queue: WorkQueue) -> bool:
    """Return whether the queue must be served."""
    return queue.awake != 0 or ld_relaxed64(queue.doorbell) != queue.seen


@device_function
def wake(qp: QpRow) -> None:
    """Have the work queue of a QP or SQ served although its doorbell was not rung."""
    WorkQueue(qp.work_queue).awake = 1


@engine_function
def add(worker: WorkerState, qp: QpRow) -> None:
    """Serve the work queue of a QP or SQ from now on."""
    qp.worker, qp.work_queue = worker, entry(worker, worker.active_count)
    queue = WorkQueue(qp.work_queue)
    queue.row, queue.doorbell, queue.seen, queue.kind, queue.awake = qp, qp.doorbell, 0, qp.kind, 1
    worker.active_count += 1


@engine_function
def remove(worker: WorkerState, qp: QpRow) -> None:
    """Stop serving the work queue of a QP or SQ: the last entry takes its place."""
    worker.active_count -= 1
    queue = WorkQueue(qp.work_queue)
    last = entry(worker, worker.active_count)
    queue.row, queue.doorbell, queue.seen = last.row, last.doorbell, last.seen
    queue.kind, queue.awake = last.kind, last.awake
    QpRow(queue.row).work_queue = qp.work_queue
