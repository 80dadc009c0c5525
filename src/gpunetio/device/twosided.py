"""Two-sided operations in thread scope: SENDs, and the receives that they need at the other end.

A receive queue has no locks: one thread at a time posts receives and waits for them. Tickets count receives.
"""

from __future__ import annotations

from ..formats.cqe import CI_MASK, CQE64, CQE_SHIFT, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ..formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from ..formats.doorbell import PI_MASK
from ..formats.wqe import INVALID_LKEY, MAX_TRANSFER, SEGMENT
from .compile import device_function
from .cq import timeout_of
from .modes import DEFAULT, GPU
from .ops import (
    be32, be64, fence_acquire_sys, fence_release_sys, ld8, ld32, ld64, ld_fixed32, ld_fixed64, ld_relaxed32, pack64,
    st64, st128, st_relaxed32,
)  # fmt: skip
from .qp import post, prepare_send, reserve
from .status import EINVAL, EIO, ENOBUFS, ETIMEDOUT, OK
from .waiting import patience

_PI, _NUM, _SIZE = DEV_SIDE.rq_wqe_pi, DEV_SIDE.rq_wqe_num, DEV_SIDE.rq_wqe_size
_CI, _RSVD = DEV_SIDE.cq_rq + DEV_CQ.cqe_ci, DEV_SIDE.cq_rq + DEV_CQ.cqe_rsvd
_CQE_NUM, _CQE_DADDR = DEV_SIDE.cq_rq + DEV_CQ.cqe_num, DEV_SIDE.cq_rq + DEV_CQ.cqe_daddr
_CQ_DBREC = DEV_SIDE.cq_rq + DEV_CQ.dbrec
_RESP_ERR, _INVALID = int(CqeOpcode.RESP_ERR), INIT_OP_OWN >> OPCODE_SHIFT


@device_function
def send(qp, laddr, lkey, nbytes, sharing=GPU, code_opt=DEFAULT):
    """Send `nbytes`, at least 1, from `laddr` to the peer's next receive (`doca_gpu_dev_verbs_send`)."""
    if nbytes < 1 or nbytes > MAX_TRANSFER:
        return EINVAL
    index = reserve(qp, 1, sharing, code_opt)
    if index < 0:
        return index
    prepare_send(qp, index, laddr, lkey, nbytes)
    return post(qp, index, index, sharing, code_opt)


@device_function
def recv(qp, laddr, lkey, nbytes):
    """Post a receive of up to `nbytes` to `laddr`: a ticket for `recv_wait` (`doca_gpu_dev_verbs_recv`).

    0 bytes for what brings no data here: a WRITE with immediate. ENOBUFS when all receives are posted; EINVAL for a
    queue without receives.
    """
    side = ld_fixed64(qp + DEV_QP.side)
    slots = ld_fixed32(side + _NUM)
    if slots == 0 or nbytes < 0 or nbytes > MAX_TRANSFER:
        return EINVAL
    index = ld64(side + _PI)
    if index - ld64(side + _CI) == slots:
        return ENOBUFS
    size = ld_fixed32(side + _SIZE)
    wqe = ld_fixed64(side + DEV_SIDE.rq_wqe_daddr) + (index & (slots - 1)) * size
    used = 0
    if nbytes > 0:
        st128(wqe, pack64(be32(nbytes), be32(lkey)), be64(laddr))
        used = SEGMENT
    if used < size:
        st128(wqe + used, pack64(0, be32(INVALID_LKEY)), 0)  # ends the list
    st64(side + _PI, index + 1)
    fence_release_sys()
    st_relaxed32(ld_fixed64(side + DEV_SIDE.rq_dbrec), be32((index + 1) & PI_MASK))
    return index


@device_function
def _cqe(side, index):
    position = index + ld64(side + _RSVD)
    return ld_fixed64(side + _CQE_DADDR) + ((position & (ld_fixed32(side + _CQE_NUM) - 1)) << CQE_SHIFT)


@device_function
def _await_next(qp, side, index):
    """Wait for the CQE of receive `index`, the next one: OK or a negative status."""
    cqe = _cqe(side, index)
    lap = ((index + ld64(side + _RSVD)) & ld_fixed32(side + _CQE_NUM)) != 0
    timeout_ns = timeout_of(qp)
    polls = 0
    start = 0
    while True:
        word = be32(ld_relaxed32(cqe + CQE64.wqe_counter))  # with op_own, and written last
        opcode = (word & 0xFF) >> OPCODE_SHIFT
        if (word & OWNER_MASK) == lap and opcode != _INVALID and word >> 16 == index & 0xFFFF:
            break
        start = patience(polls, start, timeout_ns)
        if start < 0:
            return ETIMEDOUT
        polls += 1
    fence_acquire_sys()
    if opcode == _RESP_ERR:
        if ld64(side + DEV_SIDE.err_syndrome) == 0:
            st64(side + DEV_SIDE.err_index, index)
            st64(side + DEV_SIDE.err_vendor, ld8(cqe + ERR_CQE64.vendor_err_synd))
            st64(side + DEV_SIDE.err_syndrome, ld8(cqe + ERR_CQE64.syndrome))
        return EIO
    st64(side + _CI, index + 1)
    st_relaxed32(ld_fixed64(side + _CQ_DBREC), be32((index + 1 + ld64(side + _RSVD)) & CI_MASK))
    return OK


@device_function
def recv_wait(qp, ticket):
    """Wait for a receive and all before it: the bytes that came, or a negative status (`doca_gpu_dev_verbs_recv_wait`).

    The bytes are told until the ring of completions has gone round.
    """
    if ticket < 0:
        return ticket
    side = ld_fixed64(qp + DEV_QP.side)
    index = ld64(side + _CI)
    while index <= ticket:
        status = _await_next(qp, side, index)
        if status != OK:
            return status
        index += 1
    return be32(ld32(_cqe(side, ticket) + CQE64.byte_cnt))
