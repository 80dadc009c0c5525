"""The send queue of an RC or UC QP: its peer is across a wire, or a QP of the same NIC."""

from __future__ import annotations

from ...jit.compile import engine_function
from ..state.qp import qp_row_at
from ..state.work_queue import work_queue_at
from .loopback import serve as serve_loopback
from .requester import serve as serve_requester
from .send_queue import begin_turn, budget, end_turn, may_send


@engine_function
def serve(nic, queue):
    """Execute or send what the doorbell announced, up to the engine's budget: return how much was done."""
    row = work_queue_at(queue).row
    done = begin_turn(nic, queue)
    if may_send(queue):
        if qp_row_at(row).wire != 0:
            done += serve_requester(nic, row)
        else:
            done += serve_loopback(nic, row, budget(nic))
    end_turn(nic, queue)
    return done
