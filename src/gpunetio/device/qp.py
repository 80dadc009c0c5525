"""Send queue: reserve slots, fill them, mark them ready, submit.

    cqe_ci  ≤  sq_wqe_pi  ≤  sq_ready_index  ≤  sq_rsvd_index

Four absolute 64-bit indices; the ring position is the low bits, and the NIC only ever sees 16 of them. Whoever
reserved first becomes ready first, so that a doorbell never announces a slot that is not filled.
"""

from __future__ import annotations

from ..formats.device_structs import DEV_QP, DEV_SIDE
from ..formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ..formats.wqe import INLINE_SEG, MAX_INLINE, WQEBB_SHIFT, CtrlFlags, WqeOpcode
from .compile import device_function
from .cq import load_index, poll_at, raise_index, timeout_of
from .modes import (
    CTA, DEFAULT, EXCLUSIVE, GPU, SKIP_AVAILABILITY_CHECK, SKIP_DB_RINGING, SYNC_CTA, SYNC_GPU, SYNC_SYS, SYNC_THREAD,
)  # fmt: skip
from .ops import (
    be32, be64, cas_gpu32, cas_gpu64, copy, fence_acquire_cta, fence_acquire_gpu, fence_release_cta,
    fence_release_doorbell, fence_release_gpu, fence_release_sys, fetch_add_cta64, fetch_add_gpu64, ld64, ld_fixed16,
    ld_fixed32, ld_fixed64, pack64, st64, st128, st_mmio64, st_relaxed32, st_relaxed_gpu64, st_release_gpu32,
)  # fmt: skip
from .status import EINVAL, ENOTRECOVERABLE, ETIMEDOUT, OK
from .waiting import patience

CQ_UPDATE = int(CtrlFlags.CQ_UPDATE)
NOP, RDMA_WRITE, RDMA_WRITE_IMM = int(WqeOpcode.NOP), int(WqeOpcode.RDMA_WRITE), int(WqeOpcode.RDMA_WRITE_IMM)
RDMA_READ, SEND, SEND_IMM = int(WqeOpcode.RDMA_READ), int(WqeOpcode.SEND), int(WqeOpcode.SEND_IMM)
ATOMIC_CS, ATOMIC_FA = int(WqeOpcode.ATOMIC_CS), int(WqeOpcode.ATOMIC_FA)

_RSVD, _READY, _PI, _LOCK = DEV_QP.sq_rsvd_index, DEV_QP.sq_ready_index, DEV_QP.sq_wqe_pi, DEV_QP.sq_lock
_QPN_3DS, _QPN_4DS = DEV_QP.sq_num_shift8_be_3ds, DEV_QP.sq_num_shift8_be_4ds
_INLINE_IN_3DS = 12  # payload bytes that share a segment with the inline header


@device_function
def _broken(qp):
    return ld_fixed64(qp + DEV_QP.side) + DEV_SIDE.broken


# --- reserve -------------------------------------------------------------------------------------------------------


@device_function
def _take(qp, count, sharing):
    if sharing == EXCLUSIVE:
        first = ld64(qp + _RSVD)
        st64(qp + _RSVD, first + count)
        return first
    if sharing == CTA:
        return fetch_add_cta64(qp + _RSVD, count)
    return fetch_add_gpu64(qp + _RSVD, count)


@device_function
def _give_back(qp, first, count, sharing):
    """Undo a reservation. If others have reserved behind it, the hole can never be filled: the queue is broken."""
    if sharing == EXCLUSIVE:
        st64(qp + _RSVD, first)
    elif cas_gpu64(qp + _RSVD, first + count, first) != first + count:
        st64(_broken(qp), 1)


@device_function
def reserve(qp, count, sharing=GPU, code_opt=DEFAULT):
    """Take `count` slots: the index of the first, or a negative status (`doca_gpu_dev_verbs_reserve_wq_slots`).

    Waits until the slots' previous WQEs are complete, unless SKIP_AVAILABILITY_CHECK; so every WQE must be signalled.
    """
    depth = ld_fixed16(qp + DEV_QP.sq_wqe_num)
    if count < 1 or count > depth:
        return EINVAL
    first = _take(qp, count, sharing)
    if code_opt & SKIP_AVAILABILITY_CHECK:
        return first
    previous = first + count - 1 - depth
    if previous >= 0:
        status = poll_at(qp, previous, sharing)
        if status != OK:
            if status == ETIMEDOUT:
                _give_back(qp, first, count, sharing)
            return status
    return first


# --- fill ----------------------------------------------------------------------------------------------------------


@device_function
def wqe_address(qp, index):
    """Address of the slot of `index` (`doca_gpu_dev_verbs_get_wqe_ptr`)."""
    return ld_fixed64(qp + DEV_QP.sq_wqe_daddr) + ((index & ld_fixed16(qp + DEV_QP.sq_wqe_mask)) << WQEBB_SHIFT)


@device_function
def _ctrl(wqe, index, opcode, qpn_ds_be, flags, imm):
    st128(wqe, pack64(be32((index & PI_MASK) << WQE_IDX_SHIFT | opcode), qpn_ds_be), pack64(flags << 24, be32(imm)))


@device_function
def _raddr(segment, raddr, rkey):
    st128(segment, be64(raddr), pack64(be32(rkey), 0))


@device_function
def _data(segment, laddr, lkey, nbytes):
    st128(segment, pack64(be32(nbytes & (INLINE_SEG - 1)), be32(lkey)), be64(laddr))


@device_function
def prepare_nop(qp, index, flags=CQ_UPDATE):
    """NOP (`doca_gpu_dev_verbs_wqe_prepare_nop`)."""
    _ctrl(wqe_address(qp, index), index, NOP, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_1ds), flags, 0)


@device_function
def prepare_write(qp, index, raddr, rkey, laddr, lkey, nbytes, flags=CQ_UPDATE, opcode=RDMA_WRITE, imm=0):
    """RDMA WRITE of one local segment (`doca_gpu_dev_verbs_wqe_prepare_write`)."""
    wqe = wqe_address(qp, index)
    _ctrl(wqe, index, opcode, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_3ds), flags, imm)
    _raddr(wqe + 16, raddr, rkey)
    _data(wqe + 32, laddr, lkey, nbytes)


@device_function
def prepare_write2(
    qp, index, raddr, rkey, laddr0, lkey0, nbytes0, laddr1, lkey1, nbytes1, flags=CQ_UPDATE, opcode=RDMA_WRITE, imm=0
):
    """RDMA WRITE gathered from two local segments (`doca_gpu_dev_verbs_wqe_prepare_write`, second form)."""
    wqe = wqe_address(qp, index)
    _ctrl(wqe, index, opcode, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_4ds), flags, imm)
    _raddr(wqe + 16, raddr, rkey)
    _data(wqe + 32, laddr0, lkey0, nbytes0)
    _data(wqe + 48, laddr1, lkey1, nbytes1)


@device_function
def prepare_write_value(qp, index, raddr, rkey, value, nbytes, flags=CQ_UPDATE):
    """Inline RDMA WRITE of the low `nbytes` (1 to 8) of `value` (`…prepare_inl_rdma_write_wqe_header`, `_data`)."""
    wqe = wqe_address(qp, index)
    _ctrl(wqe, index, RDMA_WRITE, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_3ds), flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, pack64(be32(nbytes | INLINE_SEG), value), value >> 32)


@device_function
def prepare_write_inline(qp, index, raddr, rkey, laddr, nbytes, flags=CQ_UPDATE):
    """Inline RDMA WRITE of at most 28 bytes read from `laddr`, which needs no key (`…wqe_prepare_write_inl`).

    OK, or EINVAL for another length, and then nothing is written.
    """
    if nbytes < 0 or nbytes > MAX_INLINE:
        return EINVAL
    wqe = wqe_address(qp, index)
    qpn_ds = ld_fixed32(qp + (_QPN_3DS if nbytes <= _INLINE_IN_3DS else _QPN_4DS))
    _ctrl(wqe, index, RDMA_WRITE, qpn_ds, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, pack64(be32(nbytes | INLINE_SEG), 0), 0)
    copy(wqe + 36, laddr, nbytes)
    return OK


@device_function
def prepare_read(qp, index, raddr, rkey, laddr, lkey, nbytes, flags=CQ_UPDATE):
    """RDMA READ into one local segment (`doca_gpu_dev_verbs_wqe_prepare_read`)."""
    wqe = wqe_address(qp, index)
    _ctrl(wqe, index, RDMA_READ, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_3ds), flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    _data(wqe + 32, laddr, lkey, nbytes)


@device_function
def prepare_send(qp, index, laddr, lkey, nbytes, flags=CQ_UPDATE, opcode=SEND, imm=0):
    """SEND of one local segment, with immediate when `opcode` is SEND_IMM."""
    wqe = wqe_address(qp, index)
    _ctrl(wqe, index, opcode, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_2ds), flags, imm)
    _data(wqe + 16, laddr, lkey, nbytes)


@device_function
def prepare_atomic(qp, index, opcode, raddr, rkey, laddr, lkey, compare, swap_add, flags=CQ_UPDATE):
    """8-byte ATOMIC_FA (adds `swap_add`) or ATOMIC_CS; the old value lands at `laddr` (`…wqe_prepare_atomic`)."""
    wqe = wqe_address(qp, index)
    _ctrl(wqe, index, opcode, ld_fixed32(qp + DEV_QP.sq_num_shift8_be_4ds), flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, be64(swap_add), be64(compare))
    _data(wqe + 48, laddr, lkey, 8)


# --- ready ---------------------------------------------------------------------------------------------------------


@device_function
def mark_ready(qp, first, last, sharing=GPU):
    """Declare slots first … last filled, in reservation order (`doca_gpu_dev_verbs_mark_wqes_ready`)."""
    if sharing == EXCLUSIVE:
        st64(qp + _READY, last + 1)
        return OK
    if sharing == CTA:
        fence_release_cta()
    else:
        fence_release_gpu()
    polls = 0
    start = 0
    while load_index(qp + _READY, sharing) != first:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            st64(_broken(qp), 1)
            return ETIMEDOUT
        if polls & 0xFF == 0xFF and load_index(_broken(qp), sharing) != 0:
            return ENOTRECOVERABLE
        polls += 1
    st_relaxed_gpu64(qp + _READY, last + 1)
    if sharing == CTA:
        fence_acquire_cta()
    else:
        fence_acquire_gpu()
    return OK


# --- submit --------------------------------------------------------------------------------------------------------


@device_function
def _fence_release(scope):
    if scope == SYNC_SYS:
        fence_release_sys()
    elif scope == SYNC_GPU:
        fence_release_doorbell()
    elif scope == SYNC_CTA:
        fence_release_cta()


@device_function
def update_dbr(qp, producer):
    """Write the doorbell record (`doca_gpu_dev_verbs_update_dbr`, without its fence)."""
    st_relaxed32(ld_fixed64(qp + DEV_QP.sq_dbrec), be32(producer & PI_MASK))


@device_function
def ring_db(qp, producer, scope=SYNC_GPU):
    """Ring the doorbell register after a release fence of `scope` (`doca_gpu_dev_verbs_ring_db`)."""
    _fence_release(scope)
    value = pack64(be32((producer & PI_MASK) << WQE_IDX_SHIFT), ld_fixed32(qp + DEV_QP.sq_num_shift8_be))
    st_mmio64(ld_fixed64(qp + DEV_QP.sq_db), value)


@device_function
def _lock(qp, sharing):
    if sharing == EXCLUSIVE:
        return OK
    polls = 0
    start = 0
    while cas_gpu32(qp + _LOCK, 0, 1) != 0:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1
    return OK


@device_function
def _unlock(qp, sharing):
    if sharing != EXCLUSIVE:
        st_release_gpu32(qp + _LOCK, 0)


@device_function
def submit(qp, producer, sharing=GPU, scope=SYNC_GPU, code_opt=DEFAULT):
    """Tell the NIC that all slots below `producer` may be executed (`doca_gpu_dev_verbs_submit_db`).

    The register is rung before the record, for latency, and again after it, because a NIC that missed the first ring
    looks at the record. A caller whose slots are already covered by another's doorbell does nothing.
    """
    if code_opt & SKIP_DB_RINGING:
        return OK
    status = _lock(qp, sharing)
    if status != OK:
        return status
    if raise_index(qp + _PI, producer, sharing) < producer:
        ring_db(qp, producer, scope)
        update_dbr(qp, producer)
        ring_db(qp, producer, scope if scope < SYNC_GPU else SYNC_GPU)
    _unlock(qp, sharing)
    return OK


@device_function
def post(qp, first, last, sharing=GPU, code_opt=DEFAULT):
    """Mark first … last ready and submit them: `last` as the ticket, or a negative status."""
    status = mark_ready(qp, first, last, sharing)
    if status == OK:
        # mark_ready of a GPU-shared queue has just fenced at GPU scope.
        scope = SYNC_THREAD if sharing == GPU else SYNC_GPU
        status = submit(qp, last + 1, sharing, scope, code_opt)
    return last if status == OK else status
