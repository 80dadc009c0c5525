"""WAIT: a WQE that completes when a CQ has a CQE, or at a given time. All later WQEs of its queue wait for it."""

from __future__ import annotations

from ...formats.wqe import (
    REAL_TIME_MASK, SEGMENT, WAIT_MASK, WAIT_SEG, WAIT_VALUE_SEG, WaitMode, WaitOperation, WqeOpcode,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, ld32, ld64
from ..state import refuse
from ..state.cq import CQ_ROW, CqRow
from ..state.slice_shared import cached_cq
from ..state.qp import QpRow
from ..state.worker import WorkerState
from .operations import segments_of

_CQN_MASK, _INDEX_MASK = 0xFF_FFFF, 0xFFFF_FFFF
_INDICES = 1 << 32
_TIME_SEGMENTS = 1 + WAIT_VALUE_SEG.size // SEGMENT
SECOND = 1_000_000_000  # ns
MAX_AHEAD = 4 * SECOND  # half of the range that the mask covers


@engine_function
def wait_for_cq(worker: WorkerState, qp: QpRow, wqe: int, ds: int) -> int:
    """Return 1 if the CQ has the CQE that a WAIT names, 0 if not yet, or minus a reason (PRM, core-direct).

    The WAIT is flushed if an operation that completes into the CQ has failed, at that CQE or before it, since a queue
    of the CQ was last reset. So a ConnectX-7 flushes NCCL's companion queues after an error of the main queue.
    """
    cqn = be32(ld32(wqe + SEGMENT + WAIT_SEG.qpn_cqn)) & _CQN_MASK
    cq = CqRow(cached_cq(worker, worker.cqs + (cqn & worker.cq_mask) * CQ_ROW.size))
    if qp.core_direct == 0 or cqn == 0 or cq.cqn != cqn:
        return -refuse.unsupported_operation(worker)
    if ds != segments_of(WqeOpcode.WAIT, 0):
        return -refuse.malformed_wqe(worker, ds)
    index = _nearest(cq.pi, be32(ld32(wqe + SEGMENT + WAIT_SEG.max_index)))
    if cq.failed_from <= index and (cq.failed or index < cq.failed_to):
        return -refuse.failed_wait(worker, cqn, cq.failed_from)
    if index < cq.pi:
        return 1
    return -refuse.failed_wait(worker, cqn, cq.pi) if cq.error else 0


@device_function
def _nearest(pi: int, index: int) -> int:
    """Return the unwrapped number of the CQE nearest to `pi` whose lower 32 bits are `index`."""
    ahead = (index - pi) & _INDEX_MASK
    return pi + (ahead if ahead <= _INDICES >> 1 else ahead - _INDICES)


@device_function
def real_time(worker: WorkerState) -> int:
    """Return the time of day in ns since 1970."""
    return worker.now + worker.utc_offset


@device_function
def real_time_stamp(worker: WorkerState) -> int:
    """Return the time of day in the format of CQEs and WAITs: seconds in the upper half, nanoseconds in the lower."""
    now = real_time(worker)
    return now // SECOND << 32 | now % SECOND


@device_function
def time_left(worker: WorkerState, wqe: int, real: int) -> int:
    """Return the ns until the time of a WAIT: a time of day if `real`, else a time of the engine's clock."""
    value = be64(ld64(wqe + SEGMENT + WAIT_VALUE_SEG.value))
    if real:
        return (value >> 32 & 0xFFFF_FFFF) * SECOND + (value & 0xFFFF_FFFF) - real_time(worker)
    return value - worker.now


@engine_function
def wait_for_time(worker: WorkerState, wqe: int, ds: int, real: int) -> int:
    """Return 1 if the time of a WAIT has come, 0 if not yet, or minus a reason.

    A device compares only some bits of the time, so it would treat a time too far ahead as one that has passed.
    """
    if worker.wait_on_time == 0:
        return -refuse.wait_mode(worker, WaitMode.TIME, 0)
    if ds != _TIME_SEGMENTS:
        return -refuse.malformed_wqe(worker, ds)
    operation = be32(ld32(wqe + SEGMENT + WAIT_VALUE_SEG.operation))
    mask = be64(ld64(wqe + SEGMENT + WAIT_VALUE_SEG.mask))
    if operation != WaitOperation.CYCLIC_SMALLER or mask != (REAL_TIME_MASK if real else WAIT_MASK):
        return -refuse.wait_mode(worker, WaitMode.TIME, operation)
    left = time_left(worker, wqe, real)
    if left > MAX_AHEAD:
        return -refuse.wait_too_far(worker, left)
    return 1 if left <= 0 else 0
