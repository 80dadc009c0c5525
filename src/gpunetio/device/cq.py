"""Completion queues: find out whether the WQE with an index is complete, and whether it succeeded.

Indices are absolute 64-bit WQE indices. Their low bits are the position in the ring. A CQE is new when its owner bit
equals the parity of the lap and it names the requested WQE. A collapsed queue (`cqe_mask` 0) has one entry, which names
the last WQE.
"""

from __future__ import annotations

from ..formats.cqe import CI_MASK, CQE64, CQE_SHIFT, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ..formats.device_structs import VerbsCq, VerbsQp, VerbsSide
from ..jit.compile import device_function
from .modes import CTA, EXCLUSIVE, GPU
from ..jit.ops import (
    be32, fence_acquire_gpu, fence_acquire_sys, fence_sc_gpu, fetch_max_cta64, fetch_max_gpu64, ld8, ld64, ld_fixed16,
    ld_fixed32, ld_fixed64, ld_relaxed32, ld_relaxed_gpu64, raise_gpu64, st64, st_relaxed32,
)
from .status import EBUSY, EINVAL, EIO, ETIMEDOUT, OK
from .waiting import patience

CI = VerbsQp.cq_sq + VerbsCq.cqe_ci
_WQE_COUNTER = CQE64.wqe_counter  # in one aligned 32-bit word with op_own, which is written last
_COUNTER_MASK = 0xFFFF
_SYNDROME, _VENDOR = ERR_CQE64.syndrome, ERR_CQE64.vendor_err_synd
_ERR_INDEX, _ERR_SYNDROME, _ERR_VENDOR = VerbsSide.err_index, VerbsSide.err_syndrome, VerbsSide.err_vendor
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT


@device_function
def cq_of(qp: VerbsQp) -> VerbsCq:
    """Return the completion queue of a queue's sends (`doca_gpu_dev_verbs_qp_get_cq_sq`)."""
    return VerbsCq(qp + VerbsQp.cq_sq)


@device_function
def timeout_of(qp: VerbsQp) -> int:
    """Return how long a wait on this queue may last, in ns."""
    return ld_fixed64(ld_fixed64(qp + VerbsQp.side) + VerbsSide.timeout_ns)


@device_function
def load_index(address: int, sharing: int = GPU) -> int:
    """Load an index that other threads may move, unless the queue is EXCLUSIVE (`doca_gpu_dev_verbs_load_relaxed`)."""
    if sharing == EXCLUSIVE:
        return ld64(address)
    return ld_relaxed_gpu64(address)


@device_function
def raise_index(address: int, value: int, sharing: int = GPU) -> int:
    """Set `index = max(index, value)`, acquire, and return the old index (`doca_gpu_dev_verbs_atomic_max`)."""
    if sharing == EXCLUSIVE:
        old = ld64(address)
        if old < value:
            st64(address, value)
        return old
    if sharing == CTA:
        return fetch_max_cta64(address, value)
    return fetch_max_gpu64(address, value)


@device_function
def _advance(address: int, value: int, sharing: int) -> None:
    """Raise an index to `value`, without waiting for the old value."""
    if sharing == EXCLUSIVE:
        st64(address, value)
    else:
        raise_gpu64(address, value)


@device_function
def cqe_address(cq: VerbsCq, position: int) -> int:
    """Return the address of the CQE at a position of the ring."""
    return ld_fixed64(cq + VerbsCq.cqe_daddr) + ((position & ld_fixed32(cq + VerbsCq.cqe_mask)) << CQE_SHIFT)


@device_function
def note_error(side: VerbsSide, cq: VerbsCq, index: int) -> None:
    """Record the first error CQE up to `index` for the host: later ones only report flushed WQEs."""
    if ld64(side + _ERR_SYNDROME) != 0:
        return
    i = ld64(cq + VerbsCq.cqe_ci)
    if ld_fixed32(cq + VerbsCq.cqe_mask) == 0:
        i = index
    while i <= index:
        cqe = cqe_address(cq, i + ld_fixed64(cq + VerbsCq.cqe_rsvd))
        opcode = ld8(cqe + CQE64.op_own) >> OPCODE_SHIFT
        if opcode == CqeOpcode.REQ_ERR or opcode == CqeOpcode.RESP_ERR:
            st64(side + _ERR_INDEX, i)
            st64(side + _ERR_VENDOR, ld8(cqe + _VENDOR))
            st64(side + _ERR_SYNDROME, ld8(cqe + _SYNDROME))
            return
        i += 1


@device_function
def has_failed(qp: VerbsQp) -> bool:
    """Return whether a thread saw an error completion of the queue pair: all incomplete WQEs then end with an error."""
    return ld_relaxed_gpu64(ld_fixed64(qp + VerbsQp.side) + _ERR_SYNDROME) != 0


@device_function
def _seen_by_others(sharing: int) -> int:
    """Return OK for a completion that another thread may have consumed: its data must not come from a stale cache."""
    if sharing == GPU:
        fence_acquire_gpu()
    return OK


@device_function
def poll_ring(side: VerbsSide, cq: VerbsCq, index: int, named: int, sharing: int) -> int:
    """Poll any queue except a collapsed one, like `poll_one`.

    `named`: the CQE must name WQE `index`, and OK consumes it and all before it. Completions of a shared receive queue
    name no index, and the caller counts them.
    """
    entries = ld_fixed32(cq + VerbsCq.cqe_num)
    position = index + ld_fixed64(cq + VerbsCq.cqe_rsvd)
    # Both loads are in flight before either is waited for. The ring may be in host memory.
    word = be32(ld_relaxed32(cqe_address(cq, position) + _WQE_COUNTER))
    ci = load_index(cq + VerbsCq.cqe_ci, sharing)
    if index < ci:
        return _seen_by_others(sharing)
    if index >= ci + entries:
        return EBUSY  # the slot still belongs to the previous lap
    new = (word & OWNER_MASK) == ((position & entries) != 0)
    if named:
        new = new and word >> 16 == index & _COUNTER_MASK
    opcode = (word & 0xFF) >> OPCODE_SHIFT
    if not new or opcode == _INVALID:
        return EBUSY
    fence_acquire_sys()
    if opcode == CqeOpcode.REQ_ERR or opcode == CqeOpcode.RESP_ERR:
        note_error(side, cq, index)
        return EIO
    if named:
        _advance(cq + VerbsCq.cqe_ci, index + 1, sharing)
    return OK


@device_function
def poll_collapsed(qp: VerbsQp, index: int, sharing: int = GPU) -> int:
    """Do `poll_one` for a queue with a collapsed CQ (`doca_gpu_dev_verbs_poll_cq_collapsed_at`, without waiting).

    If the last WQE failed, all WQEs up to it get EIO, except those that a thread has already seen complete.
    """
    cq = cq_of(qp)
    ci = load_index(cq + VerbsCq.cqe_ci, sharing)
    if index < ci:
        return _seen_by_others(sharing)
    if index >= load_index(qp + VerbsQp.sq_wqe_pi, sharing):
        return EBUSY  # the 16 bits of the CQE are ambiguous for a WQE that was not submitted
    word = be32(ld_relaxed32(cqe_address(cq, 0) + _WQE_COUNTER))
    opcode = (word & 0xFF) >> OPCODE_SHIFT
    ahead = ((word >> 16) - index) & _COUNTER_MASK  # distance to the last WQE that completed
    if opcode == _INVALID or ahead >= ld_fixed16(qp + VerbsQp.sq_wqe_num):  # a ring or more: it is before `index`
        return EBUSY
    fence_acquire_sys()
    if opcode == CqeOpcode.REQ_ERR:
        note_error(ld_fixed64(qp + VerbsQp.side), cq, index + ahead)
        return EIO
    _advance(cq + VerbsCq.cqe_ci, index + ahead + 1, sharing)
    return OK


@device_function
def poll_one(qp: VerbsQp, index: int, sharing: int = GPU) -> int:
    """Check once whether WQE `index` is complete: OK, EBUSY (not yet) or EIO (`doca_gpu_dev_verbs_poll_one_cq_at`).

    OK means that all WQEs before it are complete as well. After EIO, `gpu.ExportedQp.last_error` has the syndrome.
    """
    if ld_fixed32(cq_of(qp) + VerbsCq.cqe_mask) == 0:
        return poll_collapsed(qp, index, sharing)
    return poll_ring(ld_fixed64(qp + VerbsQp.side), cq_of(qp), index, True, sharing)


@device_function
def poll_at(qp: VerbsQp, index: int, sharing: int = GPU) -> int:
    """Wait until WQE `index` is complete: OK, EIO, or ETIMEDOUT (`doca_gpu_dev_verbs_poll_cq_at`)."""
    status = poll_one(qp, index, sharing)
    polls = 0
    start = 0
    while status == EBUSY:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1
        failed = polls & 0xFF == 0 and has_failed(qp)
        status = poll_one(qp, index, sharing)
        if failed and status == EBUSY:
            return EIO  # even if the WQE was never posted
    return status


@device_function
def poll(qp: VerbsQp, count: int, sharing: int = GPU) -> int:
    """Wait for the next `count` completions: OK, EIO or ETIMEDOUT (`doca_gpu_dev_verbs_poll_cq`)."""
    if count < 0:
        return EINVAL
    return OK if count == 0 else poll_at(qp, load_index(qp + CI, sharing) + count - 1, sharing)


@device_function
def update_cq_record(cq: VerbsCq, sharing: int = GPU) -> None:
    """Tell the NIC how many completions of a CQ were consumed (`doca_gpu_dev_verbs_cq_update_dbrec`).

    Threads that share the CQ may store out of order, so each thread checks that the index it stored is still current.
    """
    record = ld_fixed64(cq + VerbsCq.dbrec)
    told = -1
    ci = load_index(cq + VerbsCq.cqe_ci, sharing)
    while told != ci:
        st_relaxed32(record, be32((ci + ld_fixed64(cq + VerbsCq.cqe_rsvd)) & CI_MASK))
        told = ci
        if sharing != EXCLUSIVE:
            fence_sc_gpu()  # a record that is still under way could replace a newer one after this look
            ci = load_index(cq + VerbsCq.cqe_ci, sharing)
