"""Send WQEs as the NIC reads them: check that a WQE is due and well formed, and find the bytes that it names."""

from __future__ import annotations

from typing import NamedTuple

from ...enums import Access
from ...formats.commands import ServiceType
from ...formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ...formats.wqe import (
    ATOMIC_SEG, AV_SEG, BASE_AV_BYTES, CE_SHIFT, CTRL_SEG, DATA_SEG, DS_MASK, EXTENDED_ATOMIC_4, EXTENDED_ATOMIC_8,
    EXTENDED_AV, FM_SHIFT, INLINE_SEG, MASKED_CS32_SEG, MASKED_CS64_SEG, MASKED_FA32_SEG, MASKED_FA64_SEG, MAX_DS,
    MAX_TRANSFER, OPMOD_SHIFT, RADDR_SEG, SEGMENT, WQEBB_SHIFT, CtrlFlags, WqeOpcode,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, copy, ld32, ld64, ld8, ld_acquire32, st64
from ..memory.keys import translate
from ..memory.streams import DEVICE_SHIFT
from ..state import refuse
from ..state.message import MAX_SEGMENTS, MESSAGE, Message
from ..state.qp import QpRow
from ..state.reasons import Reason
from ..state.worker import WorkerState
from .completion import fail_send
from .operations import is_atomic, is_masked, is_offered, returns_data, right_of, segments_of

NOT_YET = -1  # from `check_wqe`: the WQE may not have arrived yet, so the queue pair waits
PATIENCE_NS = 2_000_000  # how long it waits; on an H200, the latest WQE arrived within 300 µs
_SEGMENTS = MESSAGE.segments


class Control(NamedTuple):
    """The contents of a control segment. `blocks` is the WQE's length in the ring, in basic blocks."""

    opcode: int
    opmod: int
    ds: int
    blocks: int
    ce: int
    fenced: int
    solicited: int
    imm: int


@device_function
def ds_in(qpn_ds: int) -> int:
    """Return the length in segments of the WQE whose control segment has this dword, or its lower bits."""
    ds = qpn_ds & DS_MASK
    return ds if ds != 0 else qpn_ds & MAX_DS


@device_function
def read_control(wqe: int) -> Control:
    """Read the control segment of a WQE. Fields that the caller does not use cost nothing."""
    word = be32(ld32(wqe))
    ds = ds_in(be32(ld32(wqe + CTRL_SEG.qpn_ds)))
    flags = ld8(wqe + CTRL_SEG.fm_ce_se)
    return Control(
        word & 0xFF, word >> OPMOD_SHIFT, ds, (ds + 3) >> 2, (flags >> CE_SHIFT) & 3, flags >> FM_SHIFT,
        flags & CtrlFlags.SOLICITED, be32(ld32(wqe + CTRL_SEG.imm)),
    )


@device_function
def index_in(wqe: int) -> int:
    """Return the 16 bits of an index that a WQE contains."""
    return (be32(ld_acquire32(wqe)) >> WQE_IDX_SHIFT) & PI_MASK


@device_function
def wqe_slot(qp: QpRow, index: int) -> int:
    """Return the address of the ring slot of WQE `index`."""
    return qp.sq_addr + ((index & ((1 << qp.sq_log) - 1)) << WQEBB_SHIFT)


@engine_function
def _overdue(worker: WorkerState, qp: QpRow, index: int) -> bool:
    """Return whether the NIC has waited PATIENCE_NS for a WQE that its slot does not hold yet."""
    now = worker.now
    if qp.missing != index + 1:
        qp.missing, qp.missing_since = index + 1, now
    return now - qp.missing_since >= PATIENCE_NS


@engine_function
def _check_other(worker: WorkerState, qp: QpRow, index: int) -> int:
    """Return NOT_YET, or the reason for a refusal, where the slot does not hold this QP's WQE `index`."""
    if not _overdue(worker, qp, index):
        return NOT_YET
    wqe = wqe_slot(qp, index)
    qpn_ds = be32(ld_acquire32(wqe + CTRL_SEG.qpn_ds))
    if index_in(wqe) != index & PI_MASK or qpn_ds == 0:  # a slot never written holds index 0 of QP 0
        return refuse.stale_wqe(worker, index_in(wqe), qpn_ds >> 8)
    if qpn_ds >> 8 != qp.qpn:
        return refuse.wqe_of_other_qp(worker, qpn_ds >> 8)
    return NOT_YET  # it has just arrived


@device_function
def check_wqe(worker: WorkerState, qp: QpRow, index: int) -> int:
    """Return 0 if the slot holds WQE `index` as announced, NOT_YET, or the reason for a refusal.

    A doorbell may arrive before its WQE: stores of a GPU overtake each other on their way to host memory unless a fence
    of system scope separates them. The slot then holds the WQE of the previous lap, complete and well formed. So the
    NIC executes a WQE only if it has the index that is due, and otherwise reads the slot again in later turns.
    """
    wqe = wqe_slot(qp, index)
    found = index_in(wqe)
    qpn_ds = be32(ld_acquire32(wqe + CTRL_SEG.qpn_ds))
    if found != index & PI_MASK or qpn_ds >> 8 != qp.qpn:
        return _check_other(worker, qp, index)
    ds = ds_in(qpn_ds)
    if ds == 0 or index + ((ds + 3) >> 2) > qp.sq_pi:
        return refuse.malformed_wqe(worker, ds)
    return 0


@engine_function
def _unwrap(qp: QpRow, message: Message, index: int, blocks: int) -> None:
    """Copy a WQE that wraps around the end of its ring into the message, in one piece."""
    for i in range(blocks):
        copy(message + MESSAGE.wqe + (i << WQEBB_SHIFT), wqe_slot(qp, index + i), 1 << WQEBB_SHIFT)


@device_function
def in_one_piece(qp: QpRow, message: Message, wqe: int, index: int, blocks: int) -> int:
    """Return the address of the whole WQE: in its ring or, if it wraps around there, in the message."""
    depth = 1 << qp.sq_log
    if (index & (depth - 1)) + blocks <= depth:
        return wqe
    _unwrap(qp, message, index, blocks)
    return message + MESSAGE.wqe


@device_function
def gather(worker: WorkerState, qp: QpRow, message: Message, segment: int, end: int, right: int) -> int:
    """Check the data segments and list them in the message: return 0, or a reason.

    Sets the message's `nbytes`, `nsegments` and `device`.
    """
    out = message + _SEGMENTS
    total = 0
    count = 0
    device = 0
    while segment < end:
        word = be32(ld32(segment + DATA_SEG.byte_count))
        nbytes = word & (INLINE_SEG - 1)
        if word & INLINE_SEG:
            address = segment + 4
            step = (nbytes + 4 + SEGMENT - 1) & -SEGMENT
            if right != 0 or segment + step > end:
                return Reason.WQE_MALFORMED
        else:
            if nbytes == 0:
                nbytes = INLINE_SEG  # PRM: byte_count 0 means 2 GiB
            step = SEGMENT
            if total + nbytes > MAX_TRANSFER:
                return refuse.too_long_to_send(worker, total + nbytes, MAX_TRANSFER)
            address = translate(
                worker, be32(ld32(segment + DATA_SEG.lkey)), qp.pdn, be64(ld64(segment + DATA_SEG.addr)), nbytes, right,
                Reason.LKEY_UNKNOWN,
            )
            if address < 0:
                return -address
        if nbytes > 0:
            device |= address
            st64(out, address)
            st64(out + 8, nbytes)
            out += 16
            count += 1
        total += nbytes
        segment += step
    message.nbytes = total
    message.nsegments = count
    message.device = device >> DEVICE_SHIFT
    return 0


@device_function
def _read_operands(message: Message, operands: int, opcode: int, opmod: int) -> None:
    """Read an atomic's operands, whose segments begin at `operands`, into the message."""
    if opcode == WqeOpcode.ATOMIC_MASKED_FA and opmod == EXTENDED_ATOMIC_4:
        message.swap_add = be32(ld32(operands + MASKED_FA32_SEG.add_data))
        message.swap_mask = be32(ld32(operands + MASKED_FA32_SEG.field_boundary))
    elif opcode == WqeOpcode.ATOMIC_MASKED_FA:
        message.swap_add = be64(ld64(operands + MASKED_FA64_SEG.add_data))
        message.swap_mask = be64(ld64(operands + MASKED_FA64_SEG.field_boundary))
    elif opcode == WqeOpcode.ATOMIC_MASKED_CS and opmod == EXTENDED_ATOMIC_4:
        message.swap_add = be32(ld32(operands + MASKED_CS32_SEG.swap_data))
        message.compare = be32(ld32(operands + MASKED_CS32_SEG.compare_data))
        message.swap_mask = be32(ld32(operands + MASKED_CS32_SEG.swap_mask))
        message.compare_mask = be32(ld32(operands + MASKED_CS32_SEG.compare_mask))
    elif opcode == WqeOpcode.ATOMIC_MASKED_CS:
        message.swap_add = be64(ld64(operands + MASKED_CS64_SEG.swap))
        message.compare = be64(ld64(operands + MASKED_CS64_SEG.compare))
        message.swap_mask = be64(ld64(operands + SEGMENT + MASKED_CS64_SEG.swap))
        message.compare_mask = be64(ld64(operands + SEGMENT + MASKED_CS64_SEG.compare))
    else:
        message.swap_add = be64(ld64(operands + ATOMIC_SEG.swap_add))
        message.compare = be64(ld64(operands + ATOMIC_SEG.compare))


@device_function
def _av_segments(wqe: int) -> int:
    """Return how many segments the address vector of a UD queue pair's WQE has."""
    extended = be32(ld32(wqe + SEGMENT + AV_SEG.dqp_dct)) & EXTENDED_AV
    return AV_SEG.size // SEGMENT if extended else BASE_AV_BYTES // SEGMENT


@engine_function
def build_message(worker: WorkerState, qp: QpRow, message: Message, wqe: int, opcode: int, ds: int, index: int) -> int:
    """Build a message from a WQE of an operation that is not local, whose control segment was checked.

    Return 0, or a reason.
    """
    control = read_control(wqe)
    opmod = control.opmod
    if not is_offered(opcode, qp.service):
        return refuse.unsupported_operation(worker)
    atomic = is_atomic(opcode)
    if atomic and is_masked(opcode) and opmod != EXTENDED_ATOMIC_4 and opmod != EXTENDED_ATOMIC_8:
        return refuse.unknown_opmod(worker, opmod)
    headers = segments_of(opcode, opmod)
    if qp.service == ServiceType.UD:
        headers += _av_segments(wqe)
    if ds < headers or ds - headers > MAX_SEGMENTS:
        return refuse.malformed_wqe(worker, ds)
    message.opcode = opcode
    message.src_qpn = qp.qpn
    message.dst_qpn = qp.remote_qpn
    message.index = index
    if right_of(opcode) != 0:
        message.raddr = be64(ld64(wqe + SEGMENT + RADDR_SEG.raddr))
        message.rkey = be32(ld32(wqe + SEGMENT + RADDR_SEG.rkey))
    message.imm = control.imm
    message.solicited = control.solicited
    if atomic:
        _read_operands(message, wqe + 2 * SEGMENT, opcode, opmod)
    right = Access.LOCAL_WRITE if returns_data(opcode) else 0
    reason = gather(worker, qp, message, wqe + headers * SEGMENT, wqe + ds * SEGMENT, right)
    if reason != 0:
        return refuse.malformed_wqe(worker, ds) if reason == Reason.WQE_MALFORMED else reason
    if atomic:
        word = 4 if is_masked(opcode) and opmod == EXTENDED_ATOMIC_4 else 8
        if message.nbytes != word:
            return refuse.atomic_length(worker, message.nbytes, word)
    if message.nbytes > qp.msg_max:
        return refuse.too_long_to_send(worker, message.nbytes, qp.msg_max)
    return 0


# --- WQEs that fail at the requester ---------------------------------------------------------------------------------


@engine_function
def local_failure(worker: WorkerState, qp: QpRow, index: int, opcode: int, ce: int, reason: int, blocks: int) -> int:
    """Fail a WQE that the requester refuses, once nothing is in flight. Return 1 if it was consumed, else 0."""
    if qp.sq_ci != index:
        return 0
    fail_send(worker, qp, index, opcode, ce, reason)
    qp.sq_ci = index + blocks
    qp.sq_next = qp.sq_ci
    qp.sq_sent = qp.sq_ci
    return 1


@engine_function
def flush_next(worker: WorkerState, qp: QpRow) -> None:
    """Complete the next WQE of a QP in ERR with a flush error."""
    index = qp.sq_ci
    wqe = wqe_slot(qp, index)
    ld_acquire32(wqe)  # the producer may be a GPU
    control = read_control(wqe)
    fail_send(worker, qp, index, control.opcode, control.ce, refuse.flushed(worker))
    # Even a malformed WQE counts as one block at least, so the flush always ends.
    qp.sq_ci = min(index + max(1, control.blocks), qp.sq_pi)
    qp.sq_next = qp.sq_ci
    qp.sq_sent = qp.sq_ci
