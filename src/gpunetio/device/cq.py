"""Completion queue: is the WQE with this index complete, and how did it end.

Indices are absolute 64-bit WQE indices; the ring holds the low bits. A CQE is new when its owner bit equals the lap's
parity and it names the WQE asked for.
"""

from __future__ import annotations

from ..formats.cqe import CQE64, CQE_SHIFT, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ..formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from .compile import device_function
from .modes import CTA, EXCLUSIVE, GPU
from .ops import (
    be32, fence_acquire_sys, fetch_max_cta64, fetch_max_gpu64, ld8, ld64, ld_relaxed32, ld_relaxed_gpu64, st64,
)  # fmt: skip
from .status import EBUSY, EIO, ETIMEDOUT, OK
from .views import cq_at, qp_at, side_at
from .waiting import patience

_CQ = DEV_QP.cq_sq
_CI = DEV_QP.cq_sq + DEV_CQ.cqe_ci
_WQE_COUNTER = CQE64.wqe_counter  # with op_own in one aligned 32-bit word, written last
_SYNDROME, _VENDOR = ERR_CQE64.syndrome, ERR_CQE64.vendor_err_synd
_ERR_INDEX, _ERR_SYNDROME, _ERR_VENDOR = DEV_SIDE.err_index, DEV_SIDE.err_syndrome, DEV_SIDE.err_vendor
_REQ_ERR, _INVALID = int(CqeOpcode.REQ_ERR), INIT_OP_OWN >> OPCODE_SHIFT


@device_function
def load_index(address, sharing=GPU):
    """A queue index that other threads may move, unless the queue is EXCLUSIVE."""
    if sharing == EXCLUSIVE:
        return ld64(address)
    return ld_relaxed_gpu64(address)


@device_function
def raise_index(address, value, sharing=GPU):
    """`index = max(index, value)`, acquire; returns the old one (`doca_gpu_dev_verbs_atomic_max`)."""
    if sharing == EXCLUSIVE:
        old = ld64(address)
        if old < value:
            st64(address, value)
        return old
    if sharing == CTA:
        return fetch_max_cta64(address, value)
    return fetch_max_gpu64(address, value)


@device_function
def _note_error(qp, index):
    """Keep the first error CQE up to `index` for the host: later ones are mere flushes."""
    cq = cq_at(qp + _CQ)
    side = qp_at(qp).side
    if side == 0 or ld64(side + _ERR_SYNDROME) != 0:
        return
    for i in range(cq.cqe_ci, index + 1):
        cqe = cq.cqe_daddr + (((i + cq.cqe_rsvd) & cq.cqe_mask) << CQE_SHIFT)
        if ld8(cqe + CQE64.op_own) >> OPCODE_SHIFT == _REQ_ERR:
            st64(side + _ERR_INDEX, i)
            st64(side + _ERR_VENDOR, ld8(cqe + _VENDOR))
            st64(side + _ERR_SYNDROME, ld8(cqe + _SYNDROME))
            return


@device_function
def poll_one(qp, index, sharing=GPU):
    """Whether WQE `index` is complete: OK, EBUSY (not yet), or EIO (`doca_gpu_dev_verbs_poll_one_cq_at`).

    Completion of an index means completion of all before it. After EIO, `gpu.ExportedQp.last_error` has the syndrome.
    """
    cq = cq_at(qp + _CQ)
    ci = load_index(qp + _CI, sharing)
    if index < ci:
        return OK
    if index >= ci + cq.cqe_num:
        return EBUSY  # its slot still belongs to the lap before
    position = index + cq.cqe_rsvd
    word = be32(ld_relaxed32(cq.cqe_daddr + ((position & cq.cqe_mask) << CQE_SHIFT) + _WQE_COUNTER))
    new = (word & OWNER_MASK) == ((position & cq.cqe_num) != 0) and word >> 16 == index & 0xFFFF
    opcode = (word & 0xFF) >> OPCODE_SHIFT
    if not new or opcode == _INVALID:
        return EBUSY
    fence_acquire_sys()
    if opcode == _REQ_ERR:
        _note_error(qp, index)
        return EIO
    raise_index(qp + _CI, index + 1, sharing)
    return OK


@device_function
def poll_at(qp, index, sharing=GPU):
    """Wait until WQE `index` is complete: OK, EIO, or ETIMEDOUT (`doca_gpu_dev_verbs_poll_cq_at`)."""
    status = poll_one(qp, index, sharing)
    polls = 0
    start = 0
    while status == EBUSY:
        start = patience(polls, start, side_at(qp_at(qp).side).timeout_ns)
        if start < 0:
            st64(qp_at(qp).side + DEV_SIDE.stalled_index, index)
            return ETIMEDOUT
        polls += 1
        status = poll_one(qp, index, sharing)
    return status
