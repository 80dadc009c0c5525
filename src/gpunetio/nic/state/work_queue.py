"""Work queues: what the engine serves. Something has a ring and a doorbell, and a kind says how it is served.

In each turn, an idle work queue costs a read of its entry here and one of its doorbell.
"""

from __future__ import annotations

from enum import IntEnum

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld_relaxed64
from ...jit.struct_view import View, struct_view
from .qp import qp_row_at
from .record import record
from .worker import worker_at


class QueueKind(IntEnum):
    """A kind of work queue: a row of nic/turn/work_queues.py."""

    CONNECTED_SEND = 1  # the send queue of an RC or UC QP
    DATAGRAM_SEND  = 2  # the send queue of a UD QP
    ETHERNET_SEND  = 3  # an SQ


WORK_QUEUE = record("work_queue", """
    row            i64      engine     address of the row of the object with the queue: a QP_ROW or SQ_ROW
    doorbell       i64      engine     address of the doorbell line
    seen           i64      engine     value of the doorbell when the queue was last served
    kind           i32      engine     QueueKind
    awake          i32      engine     not 0: the queue is served although its doorbell was not rung
""", align=32)
work_queue_at: View = struct_view(WORK_QUEUE)


@device_function
def entry(nic, index):
    """Return the address of an entry. The first `active_count` are in use."""
    return worker_at(nic).active + index * WORK_QUEUE.size


@device_function
def has_work(queue):
    """Return whether the queue must be served."""
    w = work_queue_at(queue)
    return w.awake != 0 or ld_relaxed64(w.doorbell) != w.seen


@device_function
def wake(row):
    """Have the work queue of a QP or SQ served although its doorbell was not rung."""
    work_queue_at(qp_row_at(row).work_queue).awake = 1


@engine_function
def add(nic, row):
    """Serve the work queue of a QP or SQ from now on."""
    n = worker_at(nic)
    q = qp_row_at(row)
    q.worker, q.work_queue = nic, entry(nic, n.active_count)
    w = work_queue_at(q.work_queue)
    w.row, w.doorbell, w.seen, w.kind, w.awake = row, q.doorbell, 0, q.kind, 1
    n.active_count += 1


@engine_function
def remove(nic, row):
    """Stop serving the work queue of a QP or SQ: the last entry takes its place."""
    n = worker_at(nic)
    n.active_count -= 1
    w = work_queue_at(qp_row_at(row).work_queue)
    last = work_queue_at(entry(nic, n.active_count))
    w.row, w.doorbell, w.seen, w.kind, w.awake = last.row, last.doorbell, last.seen, last.kind, last.awake
    qp_row_at(w.row).work_queue = qp_row_at(row).work_queue
