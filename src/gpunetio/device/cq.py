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
    be32, fence_acquire_sys, fetch_max_cta64, fetch_max_gpu64, ld8, ld64, ld_fixed32, ld_fixed64, ld_relaxed32,
    ld_relaxed_gpu64, st64,
)  # fmt: skip
from .status import EBUSY, EIO, ETIMEDOUT, OK
from .waiting import patience

# Fields that stay as the host wrote them.
_RING = DEV_QP.cq_sq + DEV_CQ.cqe_daddr
_NUM, _MASK = DEV_QP.cq_sq + DEV_CQ.cqe_num, DEV_QP.cq_sq + DEV_CQ.cqe_mask
_RSVD = DEV_QP.cq_sq + DEV_CQ.cqe_rsvd
_CI = DEV_QP.cq_sq + DEV_CQ.cqe_ci
_WQE_COUNTER = CQE64.wqe_counter  # with op_own in one aligned 32-bit word, written last
_SYNDROME, _VENDOR = ERR_CQE64.syndrome, ERR_CQE64.vendor_err_synd
_ERR_INDEX, _ERR_SYNDROME, _ERR_VENDOR = DEV_SIDE.err_index, DEV_SIDE.err_syndrome, DEV_SIDE.err_vendor
_REQ_ERR, _INVALID = int(CqeOpcode.REQ_ERR), INIT_OP_OWN >> OPCODE_SHIFT


@device_function
def timeout_of(qp):
    """How long a wait on this queue may last, in ns."""
    return ld_fixed64(ld_fixed64(qp + DEV_QP.side) + DEV_SIDE.timeout_ns)


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
def _cqe(qp, position):
    return ld_fixed64(qp + _RING) + ((position & ld_fixed32(qp + _MASK)) << CQE_SHIFT)


@device_function
def _note_error(qp, index):
    """Keep the first error CQE up to `index` for the host: later ones are mere flushes."""
    side = ld_fixed64(qp + DEV_QP.side)
    if ld64(side + _ERR_SYNDROME) != 0:
        return
    i = ld64(qp + _CI)
    while i <= index:
        cqe = _cqe(qp, i + ld_fixed64(qp + _RSVD))
        if ld8(cqe + CQE64.op_own) >> OPCODE_SHIFT == _REQ_ERR:
            st64(side + _ERR_INDEX, i)
            st64(side + _ERR_VENDOR, ld8(cqe + _VENDOR))
            st64(side + _ERR_SYNDROME, ld8(cqe + _SYNDROME))
            return
        i += 1


@device_function
def poll_one(qp, index, sharing=GPU):
    """Whether WQE `index` is complete: OK, EBUSY (not yet), or EIO (`doca_gpu_dev_verbs_poll_one_cq_at`).

    Completion of an index means completion of all before it. After EIO, `gpu.ExportedQp.last_error` has the syndrome.
    """
    entries = ld_fixed32(qp + _NUM)
    ci = load_index(qp + _CI, sharing)
    if index < ci:
        return OK
    if index >= ci + entries:
        return EBUSY  # its slot still belongs to the lap before
    position = index + ld_fixed64(qp + _RSVD)
    word = be32(ld_relaxed32(_cqe(qp, position) + _WQE_COUNTER))
    new = (word & OWNER_MASK) == ((position & entries) != 0) and word >> 16 == index & 0xFFFF
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
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1
        status = poll_one(qp, index, sharing)
    return status
