"""Forward doorbells that the CPU rings while a worker's rows are cached: from host memory to doorbell lines on the GPU.

Posters on the CPU ring in host memory, which a GPU reads slowly: in doorbell lines of their own or, as drivers do, in
the registers of a UAR. On a GPU, the warp that watches the host polls both, so the warp that makes turns need not.
"""

from __future__ import annotations

from ...formats.doorbell import PI_MASK, UAR_NO_DBR_OFFSET, UAR_REG_HALF, UAR_REG_OFFSET
from ...jit.compile import device_function, engine_function
from ...jit.ops import be64, exchange_gpu64, lane_or_0, lanes_here, ld_relaxed64, st_release64
from ..queues.doorbells import HALF_RANGE, announced, forward_ring
from ..state.slice_shared import shared_queue, shared_work_queue_at, shared_worker_at
from ..state.work_queue import WORK_QUEUE, QueueKind, entry
from ..state.worker import WorkerState
from ..turn.step import row_of_ring


@device_function
def forward_rings(worker: WorkerState) -> None:
    """Forward rings in doorbell lines in host memory. All lanes call this. `worker` may be a copy in shared memory."""
    if worker.lines_away != 0:
        for i in range(lane_or_0(), worker.active_count, lanes_here()):
            queue = entry(worker, i)
            line = queue.doorbell
            if line != 0 and queue.kind != QueueKind.ETHERNET_SEND:
                forward_ring(worker, line)


@device_function
def _is_newer(worker: WorkerState, queue: int, line: int, raw: int) -> bool:
    """Return whether a ring announces more than its queue's doorbell line. A line that was already read does not count.

    Drivers use both halves of a register in turn, so a reader may find the older ring last. `queue` is the index of the
    queue in the cached list of work queues.
    """
    there = ld_relaxed64(line)
    if there == shared_work_queue_at(shared_queue(worker, queue)).seen:
        return True
    return (announced(be64(raw)) - announced(be64(there))) & PI_MASK < HALF_RANGE


@device_function
def _forward_register(worker: WorkerState, shared: int, register: int) -> None:
    """Consume and forward a ring in a register."""
    raw = exchange_gpu64(register, 0)
    qp = row_of_ring(worker, raw)
    if qp == 0:
        return
    line, queue = qp.doorbell, qp.work_queue - worker.active
    if line != 0 and (qp.worker != worker or _is_newer(shared, queue // WORK_QUEUE.size, line, raw)):
        st_release64(line, raw)


@engine_function
def forward_registers(worker: WorkerState, shared: int) -> None:
    """Forward rings in registers of UAR pages, while the rows are cached. All lanes call this.

    Pages allocated since then wait until the rows are cached again.
    """
    n = shared_worker_at(shared)
    for i in range(lane_or_0(), n.uar_count, lanes_here()):
        page = ld_relaxed64(n.uars + 8 * i)
        one, other = ld_relaxed64(page + UAR_REG_OFFSET), ld_relaxed64(page + UAR_REG_OFFSET + UAR_REG_HALF)
        without_record = ld_relaxed64(page + UAR_NO_DBR_OFFSET)  # no load depends on another
        if one != 0:
            _forward_register(worker, shared, page + UAR_REG_OFFSET)
        if other != 0:
            _forward_register(worker, shared, page + UAR_REG_OFFSET + UAR_REG_HALF)
        if without_record != 0:
            _forward_register(worker, shared, page + UAR_NO_DBR_OFFSET)
