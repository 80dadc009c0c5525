"""The list of QPs with pending acknowledgements or READ data, which are sent at the end of a turn."""

from __future__ import annotations

from ...jit.compile import engine_function
from ...jit.ops import ld64, st64
from .responder import serve_pending
from ..state.worker import worker_at
from ..state.qp import qp_row_at


@engine_function
def send_pending(nic):
    """Send what is pending for peers. A QP whose wire has no room stays on the list."""
    n = worker_at(nic)
    left = 0
    for i in range(n.pending_count):
        row = ld64(n.pending + 8 * i)
        if serve_pending(nic, row):
            qp_row_at(row).pending = 0
        else:
            st64(n.pending + 8 * left, row)
            left += 1
    n.pending_count = left


@engine_function
def forget_pending(nic, row):
    """Remove a QP from the list of those with something pending."""
    n = worker_at(nic)
    left = 0
    for i in range(n.pending_count):
        other = ld64(n.pending + 8 * i)
        if other != row:
            st64(n.pending + 8 * left, other)
            left += 1
    n.pending_count = left
    qp_row_at(row).pending = 0
