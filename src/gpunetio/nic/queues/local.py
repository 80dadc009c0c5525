"""Local WQEs, which send nothing: NOP, WAIT, DUMP, and the MMO that copies local memory."""

from __future__ import annotations

from ...enums import Access
from ...formats.wqe import DATA_SEG, INLINE_SEG, MAX_MMO, MMO_DMA, SEGMENT, WaitMode, WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, copy, ld32, ld64, st64
from ..memory.keys import translate
from ..memory.streams import DEVICE_SHIFT, copy_and_wait, start_copy
from ..state import refuse
from ..state.message import MESSAGE, Message
from ..state.qp import QpRow
from ..state.reasons import Reason
from ..state.worker import WorkerState
from .operations import is_offered, segments_of
from .waits import wait_for_cq
from .wqes import gather, read_control

TURN_BYTES = 1 << 20  # of a copy in host memory, before the next work queue is served
_SOURCE, _TARGET = MESSAGE.segments, MESSAGE.segments + 16  # of a copy, in the message


@engine_function
def execute_local(worker: WorkerState, qp: QpRow, wqe: int, opcode: int, ds: int, index: int) -> int:
    """Execute a local WQE. Return 1, 0 if it has to wait or continues in the next turn, or minus a reason.

    Inside a NIC, a copy in device memory is then in flight, in `WORKER.touched`.
    """
    if not is_offered(opcode, qp.service):
        return -refuse.unsupported_operation(worker)
    if opcode == WqeOpcode.NOP:
        return 1
    if opcode == WqeOpcode.MMO:
        if qp.sq_ci != index:
            return 0  # it begins when all WQEs before it are complete: one that is flushed first has copied nothing
        reason = check_copy(worker, qp, wqe, ds)
        return copy_next_part(worker, qp) if reason == 0 else -reason
    if opcode == WqeOpcode.WAIT:
        if read_control(wqe).opmod != WaitMode.CQ_PI:
            return -refuse.unsupported_operation(worker)
        return wait_for_cq(worker, qp, wqe, ds)
    return _dump(worker, qp, wqe, ds)


@engine_function
def _dump(worker: WorkerState, qp: QpRow, wqe: int, ds: int) -> int:
    """Check a DUMP, which reads local memory and drops the bytes: return 1, or minus a reason.

    Its place in the queue is what matters: it completes after the READs before it, whose bytes are then in memory.
    """
    segment = wqe + SEGMENT
    if ds != segments_of(WqeOpcode.DUMP, 0) or be32(ld32(segment + DATA_SEG.byte_count)) & INLINE_SEG:
        return -refuse.malformed_wqe(worker, ds)
    reason = gather(worker, qp, Message(worker.message), segment, segment + SEGMENT, 0)
    return 1 if reason == 0 else -reason


# --- copies ----------------------------------------------------------------------------------------------------------


@device_function
def _local_range(worker: WorkerState, qp: QpRow, segment: int, nbytes: int, right: int) -> int:
    """Return the address that a data segment of `nbytes` names, or minus a reason."""
    key, address = be32(ld32(segment + DATA_SEG.lkey)), be64(ld64(segment + DATA_SEG.addr))
    return translate(worker, key, qp.pdn, address, nbytes, right, Reason.LKEY_UNKNOWN)


@engine_function
def check_copy(worker: WorkerState, qp: QpRow, wqe: int, ds: int) -> int:
    """Check an MMO, and put its source, target and length into the message: return 0, or a reason.

    Each turn of a long copy checks again: memory that was deregistered meanwhile is not touched.
    """
    if qp.mmo == 0 or read_control(wqe).opmod != MMO_DMA:
        return refuse.unsupported_operation(worker)
    source, target = wqe + 2 * SEGMENT, wqe + 3 * SEGMENT
    length = be32(ld32(source + DATA_SEG.byte_count))
    if (
        ds != segments_of(WqeOpcode.MMO, 0)
        or length & INLINE_SEG
        or length != be32(ld32(target + DATA_SEG.byte_count))
    ):
        return refuse.malformed_wqe(worker, ds)
    nbytes = length if length != 0 else MAX_MMO
    here = _local_range(worker, qp, source, nbytes, 0)
    if here < 0:
        return -here
    there = _local_range(worker, qp, target, nbytes, Access.LOCAL_WRITE)
    if there < 0:
        return -there
    message = Message(worker.message)
    message.nbytes = nbytes
    st64(message + _SOURCE, here)
    st64(message + _TARGET, there)
    return 0


@device_function
def source_of(message: Message) -> int:
    """Return the source address of the copy in the message."""
    return ld64(message + _SOURCE)


@device_function
def target_of(message: Message) -> int:
    """Return the target address of the copy in the message."""
    return ld64(message + _TARGET)


@engine_function
def copy_next_part(worker: WorkerState, qp: QpRow) -> int:
    """Copy what `check_copy` has found, or the next TURN_BYTES of it: return 1, 0 if bytes are left, or minus a reason.

    The copy of a QP with a peer across a wire is complete when this returns 1, in the memory of a GPU too.
    """
    message = Message(worker.message)
    source, target, nbytes = source_of(message), target_of(message), message.nbytes
    if (source | target) >> DEVICE_SHIFT != 0:
        if qp.wire == 0:
            reason = start_copy(worker, target, source, nbytes)
        else:
            reason = copy_and_wait(worker, target, source, nbytes)
        return 1 if reason == 0 else -reason
    part = min(nbytes - qp.copied, TURN_BYTES)
    copy(target + qp.copied, source + qp.copied, part)
    qp.copied += part
    if qp.copied < nbytes:
        return 0
    qp.copied = 0
    return 1
