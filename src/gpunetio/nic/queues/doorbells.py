"""Doorbells: how a queue's owner announces WQEs, by a doorbell register or by the doorbell record."""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.doorbell import PI_MASK, QP_DBREC, REGISTER_BYTES, WQE_IDX_SHIFT
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, fence_acquire_sys, ld64, ld_acquire32, ld_relaxed64, st64, st_release64
from ..state import refuse
from ..state.nic import nic_at
from ..state.qp import qp_row_at
from ..state.work_queue import wake
from .completion import REQUESTER, fail_qp, fail_send, record_error
from .wqes import ds_in, index_in, wqe_slot

HALF_RANGE = (PI_MASK + 1) // 2


@device_function
def announced(value):
    """Return the producer index in the 8 bytes of a doorbell, or the index after a WQE written by BlueFlame.

    Such a WQE begins with its own index. Its ds, which is 0 in a doorbell, says where the next WQE starts. The WQE
    itself is read from the ring, where it must be in any case.
    """
    return ((value >> 32 + WQE_IDX_SHIFT) + (ds_in(value) + 3 >> 2)) & PI_MASK


@engine_function
def announce(nic, row, producer16):
    """Move `sq_pi` to `producer16`, which a doorbell or a doorbell record announces, or explain what is wrong.

    With a doorbell record, only one thread rings at a time, and an old index is at most the ring's depth behind.
    Without a record, all threads ring independently, and the watchdog of the `Gpu` too. Then a doorbell may be late by
    as many WQEs as others have posted meanwhile: whatever is not within the ring is old.
    """
    q = qp_row_at(row)
    if q.state == QpState.RST or q.sq_addr == 0:  # in RST the counts stay 0, though the record may hold old ones
        return
    depth = 1 << q.sq_log
    ahead = (producer16 - q.sq_ci) & PI_MASK
    if q.drain and q.state == QpState.RTS:
        if (q.late - 1 - q.sq_ci) & PI_MASK < ahead <= depth:
            q.late = producer16 + 1
        return
    if ahead <= depth:
        if q.sq_ci + ahead <= q.sq_pi:
            return
        q.sq_pi = q.sq_ci + ahead
        wake(row)
        if q.state < QpState.RTS and q.failed == 0:
            record_error(nic, REQUESTER, q.qpn, q.sq_ci, WqeOpcode.NOP, refuse.not_sending(nic, q.state), 0)
    elif q.no_dbr == 0 and PI_MASK + 1 - ahead > depth:  # not an old index either
        reason = refuse.doorbell_range(nic, depth, producer16, q.sq_ci & PI_MASK)
        if q.state == QpState.RTS and q.sq_pi == q.sq_ci:
            fail_send(nic, row, q.sq_ci, WqeOpcode.NOP, 0, reason)
        elif q.state == QpState.RTS:  # each posted WQE completes once: with a flush error
            fail_qp(nic, row, q.sq_ci, WqeOpcode.NOP, reason, REQUESTER)


@engine_function
def go_on(nic, row):
    """Take a QP out of SQD. Doorbells that were rung in SQD take effect now."""
    q = qp_row_at(row)
    late = q.late
    q.drain, q.sq_drained, q.late = 0, 0, 0
    if late != 0:
        announce(nic, row, late - 1)


@device_function
def poll_doorbell(nic, row):
    """Check the QP's own doorbell register."""
    q = qp_row_at(row)
    raw = ld_relaxed64(q.doorbell)
    if raw != q.db_seen:
        q.db_seen = raw
        fence_acquire_sys()
        announce(nic, row, announced(be64(raw)))


# Where the engine is on a GPU, QPs have doorbell lines there, and others in host memory for posters on the CPU. Behind
# the former is a word for each of the latter: what it had when it was looked at last.


@device_function
def _heard(nic, line):
    """Return the address of the word for the line in host memory that belongs to `line`."""
    return line + (nic_at(nic).qp_mask + 1) * REGISTER_BYTES


@device_function
def forward_ring(nic, line):
    """Announce in a QP's doorbell line what has been rung in host memory."""
    rung = ld_relaxed64(line - nic_at(nic).lines_away)
    if rung != ld64(_heard(nic, line)):
        st64(_heard(nic, line), rung)
        st_release64(line, rung)


@device_function
def clear_line(nic, line):
    """Forget what was rung."""
    st64(line, 0)
    if nic_at(nic).lines_away != 0:
        st64(_heard(nic, line), 0)
        st64(line - nic_at(nic).lines_away, 0)


@engine_function
def scan_record(nic, row):
    """Check the doorbell record, for doorbells that were missed. An index behind the NIC's is an old one. Return 0."""
    q = qp_row_at(row)
    if q.no_dbr or q.sq_addr == 0:
        return 0
    producer16 = be32(ld_acquire32(q.dbrec + QP_DBREC.snd)) & PI_MASK
    ahead = (producer16 - q.sq_ci) & PI_MASK
    if ahead == HALF_RANGE:
        # Either a full ring of 2^15 ahead, or as much behind: the index of the WQE in the next slot decides.
        if index_in(wqe_slot(row, q.sq_ci)) != q.sq_ci & PI_MASK:
            return 0
    if ahead <= 1 << q.sq_log:
        announce(nic, row, producer16)
    return 0
