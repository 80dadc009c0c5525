"""The list of QPs that owe their peers acknowledgements or READ data, which are sent at the end of a turn."""

from __future__ import annotations

from ...jit.compile import engine_function
from ...jit.ops import ld64, st64
from .receiver import serve_due
from ..state.nic import nic_at
from ..state.qp import qp_row_at


@engine_function
def send_due(nic):
    """Send what QPs owe their peers. A QP whose wire has no room stays on the list."""
    n = nic_at(nic)
    left = 0
    for i in range(n.due_count):
        row = ld64(n.due + 8 * i)
        if serve_due(nic, row):
            qp_row_at(row).due = 0
        else:
            st64(n.due + 8 * left, row)
            left += 1
    n.due_count = left


@engine_function
def forget_due(nic, row):
    """Remove a QP from the list of those that owe their peers something."""
    n = nic_at(nic)
    left = 0
    for i in range(n.due_count):
        other = ld64(n.due + 8 * i)
        if other != row:
            st64(n.due + 8 * left, other)
            left += 1
    n.due_count = left
    qp_row_at(row).due = 0
