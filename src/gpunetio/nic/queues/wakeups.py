"""Wakeups: at the end of a turn, the engine wakes threads of the host that wait for the CQEs that it has written."""

from __future__ import annotations

from ...device.waiting import wake
from ...jit.compile import device_function, engine_function
from ..state.cq import cq_row_at
from ..state.worker import worker_at

_LAST = 1  # CQ_ROW.waking of the last in the list; 0 if a CQ is not in it


@device_function
def wake_later(nic, cq):
    """Have a CQ's thread woken at the end of the turn: once, however many CQEs are written until then."""
    n, c = worker_at(nic), cq_row_at(cq)
    if c.waking == 0:
        c.waking = n.waking if n.waking != 0 else _LAST
        n.waking = cq


@engine_function
def wake_threads(nic):
    """Wake the threads that nap."""
    n = worker_at(nic)
    cq = n.waking
    n.waking = 0
    while cq > _LAST:
        c = cq_row_at(cq)
        cq = c.waking
        c.waking = 0
        if c.wakeup != 0:  # the queue still wants it
            wake(c.wakeup)
