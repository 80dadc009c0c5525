"""The list of QPs with pending acknowledgements or READ data, which are sent at the end of a turn."""

from __future__ import annotations

from ...jit.compile import engine_function
from ...jit.ops import ld64, st64
from ..state.qp import QpRow
from ..state.worker import WorkerState
from .responder import serve_pending


@engine_function
def send_pending(worker: WorkerState) -> None:
    """Send what is pending for peers. A QP whose wire has no room stays on the list."""
    left = 0
    for i in range(worker.pending_count):
        qp = QpRow(ld64(worker.pending + 8 * i))
        if serve_pending(worker, qp):
            qp.pending = 0
        else:
            st64(worker.pending + 8 * left, qp)
            left += 1
    worker.pending_count = left


@engine_function
def forget_pending(worker: WorkerState, qp: QpRow) -> None:
    """Remove a QP from the list of those with something pending."""
    left = 0
    for i in range(worker.pending_count):
        other = ld64(worker.pending + 8 * i)
        if other != qp:
            st64(worker.pending + 8 * left, other)
            left += 1
    worker.pending_count = left
    qp.pending = 0
