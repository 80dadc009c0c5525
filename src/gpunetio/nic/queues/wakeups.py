"""Wakeups: at the end of a turn, the engine wakes host threads that wait for CQEs which the turn has written."""

from __future__ import annotations

from ...device.waiting import wake
from ...jit.compile import device_function, engine_function
from ..state.cq import CqRow
from ..state.worker import WorkerState

_LAST = 1  # CQ_ROW.waking of the last in the list; 0 if a CQ is not in it


@device_function
def wake_later(worker: WorkerState, cq: CqRow) -> None:
    """Have a CQ's thread woken at the end of the turn: once, however many CQEs are written until then."""
    if cq.waking == 0:
        cq.waking = worker.waking if worker.waking != 0 else _LAST
        worker.waking = cq


@engine_function
def wake_threads(worker: WorkerState) -> None:
    """Wake the threads of all CQs in the list."""
    cq = worker.waking
    worker.waking = 0
    while cq > _LAST:
        c = CqRow(cq)
        cq = c.waking
        c.waking = 0
        if c.wakeup != 0:  # the queue still wants it
            wake(c.wakeup)
