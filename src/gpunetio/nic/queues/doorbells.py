"""Doorbells: producer indices that the owner of a queue announces in a doorbell register or doorbell record."""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.doorbell import PI_MASK, QP_DBREC, REGISTER_BYTES, WQE_IDX_SHIFT
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, fence_acquire_sys, ld64, ld_acquire32, ld_relaxed64, st64, st_release64
from ..state import refuse
from ..state.qp import QpRow
from ..state.work_queue import wake
from ..state.worker import WorkerState
from .completion import REQUESTER, fail_qp, fail_send, record_error
from .wqes import ds_in, index_in, wqe_slot

HALF_RANGE = (PI_MASK + 1) // 2


@device_function
def announced(value: int) -> int:
    """Return the producer index in the 8 bytes of a doorbell, or the index after a WQE written by BlueFlame.

    Such a WQE begins with its own index. Its ds, which is 0 in a doorbell, says where the next WQE starts. The WQE
    itself is read from the ring, where it must be in any case.
    """
    return ((value >> 32 + WQE_IDX_SHIFT) + (ds_in(value) + 3 >> 2)) & PI_MASK


@engine_function
def announce(worker: WorkerState, qp: QpRow, producer16: int) -> None:
    """Move `sq_pi` to `producer16`, which a doorbell or a doorbell record announces, or explain what is wrong.

    With a doorbell record, only one thread rings at a time, and an old index is at most the ring's depth behind.
    Without a record, all threads and the watchdog of the `Gpu` ring independently. Then a doorbell may be late by as
    many WQEs as other threads have posted since: any index outside the ring is old.
    """
    if qp.state == QpState.RST or qp.sq_addr == 0:  # in RST the counts stay 0, though the record may hold old ones
        return
    depth = 1 << qp.sq_log
    ahead = (producer16 - qp.sq_ci) & PI_MASK
    if qp.drain and qp.state == QpState.RTS:
        if (qp.late - 1 - qp.sq_ci) & PI_MASK < ahead <= depth:
            qp.late = producer16 + 1
        return
    if ahead <= depth:
        if qp.sq_ci + ahead <= qp.sq_pi:
            return
        qp.sq_pi = qp.sq_ci + ahead
        wake(qp)
        if qp.state < QpState.RTS and qp.failed == 0:
            record_error(worker, REQUESTER, qp.qpn, qp.sq_ci, WqeOpcode.NOP, refuse.not_sending(worker, qp.state), 0)
    elif qp.no_dbr == 0 and PI_MASK + 1 - ahead > depth:  # not an old index either
        reason = refuse.doorbell_range(worker, depth, producer16, qp.sq_ci & PI_MASK)
        if qp.state == QpState.RTS and qp.sq_pi == qp.sq_ci:
            fail_send(worker, qp, qp.sq_ci, WqeOpcode.NOP, 0, reason)
        elif qp.state == QpState.RTS:  # each posted WQE completes once: with a flush error
            fail_qp(worker, qp, qp.sq_ci, WqeOpcode.NOP, reason, REQUESTER)


@engine_function
def leave_sqd(worker: WorkerState, qp: QpRow) -> None:
    """Leave SQD. Doorbells that were rung in SQD take effect now."""
    late = qp.late
    qp.drain, qp.sq_drained, qp.late = 0, 0, 0
    if late != 0:
        announce(worker, qp, late - 1)


@device_function
def poll_doorbell(worker: WorkerState, qp: QpRow) -> None:
    """Check the QP's own doorbell register."""
    raw = ld_relaxed64(qp.doorbell)
    if raw != qp.db_seen:
        qp.db_seen = raw
        fence_acquire_sys()
        announce(worker, qp, announced(be64(raw)))


# If the engine is on a GPU, QPs have doorbell lines in GPU memory, and others in host memory for posters on the CPU.
# After the lines in GPU memory comes a word per line in host memory: the last value that was forwarded from it.


@device_function
def _last_forwarded(worker: WorkerState, line: int) -> int:
    """Return the address of the last value forwarded to `line` from its line in host memory."""
    return line + (worker.qp_mask + 1) * REGISTER_BYTES


@device_function
def forward_ring(worker: WorkerState, line: int) -> None:
    """Forward a ring in host memory to the QP's doorbell line."""
    rung = ld_relaxed64(line - worker.lines_away)
    if rung != ld64(_last_forwarded(worker, line)):
        st64(_last_forwarded(worker, line), rung)
        st_release64(line, rung)


@device_function
def clear_line(worker: WorkerState, line: int) -> None:
    """Clear a doorbell line."""
    st64(line, 0)
    if worker.lines_away != 0:
        st64(_last_forwarded(worker, line), 0)
        st64(line - worker.lines_away, 0)


@engine_function
def scan_record(worker: WorkerState, qp: QpRow) -> int:
    """Check the doorbell record for a missed doorbell. An index before the NIC's consumer index is old. Return 0."""
    if qp.no_dbr or qp.sq_addr == 0:
        return 0
    producer16 = be32(ld_acquire32(qp.dbrec + QP_DBREC.snd)) & PI_MASK
    ahead = (producer16 - qp.sq_ci) & PI_MASK
    if ahead == HALF_RANGE:
        # Either a full ring of 2^15 ahead, or as much behind: the index of the WQE in the next slot decides.
        if index_in(wqe_slot(qp, qp.sq_ci)) != qp.sq_ci & PI_MASK:
            return 0
    if ahead <= 1 << qp.sq_log:
        announce(worker, qp, producer16)
    return 0
