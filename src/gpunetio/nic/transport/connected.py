"""The send queue of an RC or UC QP: its peer is across a wire, or a QP of the same NIC."""

from __future__ import annotations

from ...jit.compile import engine_function
from ..state.qp import QpRow
from ..state.work_queue import WorkQueue
from ..state.worker import WorkerState
from .loopback import serve as serve_loopback
from .requester import serve as serve_requester
from .send_queue import begin_turn, budget, end_turn, may_send


@engine_function
def serve(worker: WorkerState, queue: WorkQueue) -> int:
    """Execute or send what the doorbell announced, up to the engine's budget: return how much was done."""
    qp = QpRow(queue.row)
    done = begin_turn(worker, queue)
    if may_send(queue):
        if qp.wire != 0:
            done += serve_requester(worker, qp)
        else:
            done += serve_loopback(worker, qp, budget(worker))
    end_turn(worker, queue)
    return done
