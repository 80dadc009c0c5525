"""Rings of posters on the CPU, while a worker's rows are near its turns: they are passed on to doorbell lines there.

Such posters ring in host memory, which is far from a GPU: in doorbell lines of their own or, as drivers do, in a UAR's
registers. On a GPU, the warp that watches the host looks at both, so that the one that makes turns need not.
"""

from __future__ import annotations

from ...formats.doorbell import PI_MASK, UAR_NO_DBR_OFFSET, UAR_REG_HALF, UAR_REG_OFFSET
from ...jit.compile import device_function, engine_function
from ...jit.ops import be64, exchange_gpu64, lane_or_0, lanes_here, ld_relaxed64, st_release64
from ..queues.doorbells import HALF_RANGE, announced, forward_ring
from ..state.near import near_queue, near_work_queue_at, near_worker_at
from ..state.qp import QpRow
from ..state.work_queue import WORK_QUEUE, QueueKind, WorkQueue, entry
from ..state.worker import WorkerState
from ..turn.step import named_by


@device_function
def forward_rings(worker: WorkerState) -> None:
    """Forward what was rung in doorbell lines in host memory. All lanes call this. `worker` may be near the turns."""
    if worker.lines_away != 0:
        for i in range(lane_or_0(), worker.active_count, lanes_here()):
            queue = WorkQueue(entry(worker, i))
            line = queue.doorbell
            if line != 0 and queue.kind != QueueKind.ETHERNET_SEND:
                forward_ring(worker, line)


@device_function
def _is_newer(worker: WorkerState, queue: int, line: int, raw: int) -> bool:
    """Return whether a ring announces more than its queue's doorbell line. A line that was looked at says nothing.

    Drivers use both halves of a register in turn, and whoever looks at them may find the older ring last. `queue` is
    the place of the queue in the list near the turns.
    """
    there = ld_relaxed64(line)
    if there == near_work_queue_at(near_queue(worker, queue)).seen:
        return True
    return (announced(be64(raw)) - announced(be64(there))) & PI_MASK < HALF_RANGE


@device_function
def _forward_register(worker: WorkerState, near: int, register: int) -> None:
    """Consume what was rung in a register."""
    raw = exchange_gpu64(register, 0)
    qp = QpRow(named_by(worker, raw))
    if qp == 0:
        return
    line, queue = qp.doorbell, qp.work_queue - worker.active
    if line != 0 and (qp.worker != worker or _is_newer(near, queue // WORK_QUEUE.size, line, raw)):
        st_release64(line, raw)


@engine_function
def forward_registers(worker: WorkerState, near: int) -> None:
    """Forward what was rung in registers of UAR pages, while the rows are borrowed. All lanes call this.

    Pages that have come since then have to wait until the rows are borrowed anew.
    """
    n = near_worker_at(near)
    for i in range(lane_or_0(), n.uar_count, lanes_here()):
        page = ld_relaxed64(n.uars + 8 * i)
        one, other = ld_relaxed64(page + UAR_REG_OFFSET), ld_relaxed64(page + UAR_REG_OFFSET + UAR_REG_HALF)
        without_record = ld_relaxed64(page + UAR_NO_DBR_OFFSET)  # no load waits for another
        if one != 0:
            _forward_register(worker, near, page + UAR_REG_OFFSET)
        if other != 0:
            _forward_register(worker, near, page + UAR_REG_OFFSET + UAR_REG_HALF)
        if without_record != 0:
            _forward_register(worker, near, page + UAR_NO_DBR_OFFSET)
