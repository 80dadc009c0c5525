"""The send queue of Ethernet packets (SQ): each WQE is a packet, complete once it is on the wire.

WQEs are executed in their order. When the wire has no room, the queue waits for it, and nothing is lost.
"""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.packet import ETHERNET
from ...formats.wqe import (
    DATA_SEG, ETH_INSERT_VLAN, ETH_SEG, ETH_VLAN, INLINE_SEG, SEGMENT, EthChecksum, WaitMode, WqeOpcode,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, ld16, ld32, ld64, ld8, prefetch, st64
from ..queues.completion import recover_cq
from ..queues.doorbells import poll_doorbell
from ..queues.send_completion import complete_send
from ..queues.waits import real_time_stamp, time_left, wait_for_cq, wait_for_time
from ..queues.wqes import NOT_YET, check_wqe, flush_next, gather, in_one_piece, local_failure, read_control, wqe_slot
from ..state import refuse
from ..state.counters import CounterSet
from ..state.cq import CqRow
from ..state.ethernet_queues import SQ_COUNTS, SQ_STATE, SqRow
from ..state.extensions import ETHERNET_QUEUES
from ..state.message import MESSAGE, Message
from ..state.qp import QP_ROW, QP_SETUP_BYTES, QpRow
from ..state.reasons import Reason
from ..state.work_queue import WorkQueue, wake
from ..state.worker import WorkerState
from .eth_frame import NO_ROOM, SENT, send_packet
from .eth_segment import send_segments
from .send_queue import budget, may_send

_WAIT, _DONE = NO_ROOM, SENT  # of a WQE, or minus a reason
_AWAKE_BEFORE = 2_000_000  # ns before the end of a WAIT, for each ms that the engine sleeps at most
_AHEAD = 4  # WQEs: another core has written them
_INLINE_IN_SEGMENT = SEGMENT - ETH_SEG.inline_hdr_start


# --- the turn ------------------------------------------------------------------------------------------------------


@ETHERNET_QUEUES.function
def serve(worker: WorkerState, queue: WorkQueue) -> int:
    """Send what the doorbell announced, up to the engine's budget: return how much was done."""
    sq = SqRow(queue.row)
    poll_doorbell(worker, sq)
    done = _serve(worker, sq, budget(worker)) if may_send(queue) else _flush(worker, sq)
    queue.seen = sq.db_seen
    queue.awake = 1 if may_send(queue) else 0
    return done


@device_function
def waits(qp: QpRow) -> bool:
    """Return whether an announced WQE is not complete: the engine must not sleep.

    It may sleep while an SQ waits for a time, until the last sleep before that.
    """
    worker = WorkerState(qp.worker)
    left = SqRow(qp).wait_until - worker.now
    return qp.sq_ci != qp.sq_pi and qp.state == QpState.RTS and left < _AWAKE_BEFORE * worker.sleep_ms


@engine_function
def _flush(worker: WorkerState, qp: QpRow) -> int:
    """Complete everything that was announced to an SQ in ERR with a flush error, if the SQ is to do so."""
    done = 0
    if qp.state == QpState.ERR and SqRow(qp).flush:
        while qp.sq_ci != qp.sq_pi:
            flush_next(worker, qp)
            done += 1
    return done


@engine_function
def _serve(worker: WorkerState, qp: QpRow, most: int) -> int:
    """Execute up to `most` WQEs. Return how many."""
    done = 0
    while qp.sq_next != qp.sq_pi and done < most and qp.state == QpState.RTS:
        index = qp.sq_next
        reason = check_wqe(worker, qp, index)
        if reason == NOT_YET:
            break
        wqe = wqe_slot(qp, index)
        prefetch(wqe_slot(qp, index + _AHEAD))
        control = read_control(wqe)
        opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
        result = -reason
        if reason != 0:
            blocks = 1
        else:
            whole = in_one_piece(qp, worker.message, wqe, index, blocks)
            result = _execute(worker, SqRow(qp), whole, opcode, control.opmod, ds)
        if result == _WAIT:
            break
        done += 1
        if result < 0:
            local_failure(worker, qp, index, opcode, ce, -result, blocks)
            done += _flush(worker, qp)
            break
        _complete(worker, SqRow(qp), index, opcode, ce)
        qp.sq_ci = index + blocks
        qp.sq_next, qp.sq_sent = qp.sq_ci, qp.sq_ci
    CounterSet(worker.counters).sq_wqes += done
    return done


@device_function
def _complete(worker: WorkerState, sq: SqRow, index: int, opcode: int, ce: int) -> None:
    """Complete a WQE, at the time of day if the SQ has real-time timestamps."""
    now = worker.now
    if sq.real_time:
        worker.now = real_time_stamp(worker)
    complete_send(worker, sq, index, opcode, ce, 0)
    worker.now = now


# --- WQEs ----------------------------------------------------------------------------------------------------------


@engine_function
def _execute(worker: WorkerState, sq: SqRow, wqe: int, opcode: int, opmod: int, ds: int) -> int:
    """Execute a WQE, which is in one piece: return _DONE, _WAIT, or minus a reason."""
    if opcode == WqeOpcode.NOP:
        return _DONE
    if opcode == WqeOpcode.WAIT:
        return _wait(worker, sq, wqe, opmod, ds)
    if opcode == WqeOpcode.ENHANCED_MPSW and sq.multi_packet == 0:
        return -refuse.unsupported_operation(worker)
    if opcode == WqeOpcode.SEND or opcode == WqeOpcode.TSO or opcode == WqeOpcode.ENHANCED_MPSW:
        return _send(worker, sq, wqe, opcode, ds)
    return -refuse.unsupported_operation(worker)


@engine_function
def _wait(worker: WorkerState, sq: SqRow, wqe: int, opmod: int, ds: int) -> int:
    """Execute a WAIT."""
    sq.wait_until = 0
    if opmod == WaitMode.CQ_PI:
        return wait_for_cq(worker, sq, wqe, ds)
    if opmod != WaitMode.TIME:
        return -refuse.wait_mode(worker, opmod, 0)
    result = wait_for_time(worker, wqe, ds, sq.real_time)
    if result == _WAIT:
        sq.wait_until = worker.now + time_left(worker, wqe, sq.real_time)
    return result


@engine_function
def _send(worker: WorkerState, qp: QpRow, wqe: int, opcode: int, ds: int) -> int:
    """Send the packet of a SEND, the segments of a TSO, or the packets of an ENHANCED_MPSW."""
    if ds < 2:
        return -refuse.malformed_wqe(worker, ds)
    segment = wqe + SEGMENT
    flags = ld8(segment + ETH_SEG.cs_flags)
    if flags & (EthChecksum.L3_INNER | EthChecksum.L4_INNER):
        return -refuse.checksum_flags(worker, flags)
    inline = be16(ld16(segment + ETH_SEG.inline_hdr_sz))
    tag = 0
    if inline & ETH_INSERT_VLAN:
        tag = inline << 16 | be16(ld16(segment + ETH_VLAN.tci))
        inline = 0
    data = wqe + data_at(inline)
    end = wqe + ds * SEGMENT
    if data > end or (opcode == WqeOpcode.ENHANCED_MPSW and inline != 0):
        return -refuse.malformed_wqe(worker, ds)
    message = Message(worker.message)
    reason = gather(worker, qp, message, data, end, 0)
    if reason != 0:
        return -(refuse.malformed_wqe(worker, ds) if reason == Reason.WQE_MALFORMED else reason)
    head = segment + ETH_SEG.inline_hdr_start
    if opcode == WqeOpcode.TSO:
        return send_segments(worker, SqRow(qp), head, inline, be16(ld16(segment + ETH_SEG.mss)))
    if opcode == WqeOpcode.ENHANCED_MPSW:
        if message.nsegments != (end - data) // SEGMENT and _has_empty(data, end):
            return -refuse.frame_length(worker, 0, ETHERNET.size, qp.mtu + ETHERNET.size)
        return _send_each(worker, SqRow(qp), head, flags, tag)
    nbytes = message.nbytes
    return send_packet(worker, qp, head, inline, message + MESSAGE.segments, 0, nbytes, flags, tag)


@device_function
def _has_empty(segment: int, end: int) -> int:
    """Return whether one of the data segments, which are well-formed, is inline and without a byte."""
    while segment < end:
        word = be32(ld32(segment + DATA_SEG.byte_count))
        if word == INLINE_SEG:
            return 1
        step = SEGMENT
        if word & INLINE_SEG:
            step = (word - INLINE_SEG + DATA_SEG.lkey + SEGMENT - 1) & -SEGMENT
        segment += step
    return 0


@engine_function
def _send_each(worker: WorkerState, sq: SqRow, head: int, flags: int, tag: int) -> int:
    """Send each of the message's data segments that was not sent yet, as a packet of its own."""
    message = Message(worker.message)
    while sq.packets < message.nsegments:
        segment = message + MESSAGE.segments + 16 * sq.packets
        result = send_packet(worker, sq, head, 0, segment, 0, ld64(segment + 8), flags, tag)
        if result != SENT:
            return result
        sq.packets += 1
    sq.packets = 0
    return _DONE


@device_function
def data_at(inline: int) -> int:
    """Return where the data segments begin in a WQE with so many bytes of inline headers."""
    more = max(inline - _INLINE_IN_SEGMENT, 0)
    return 2 * SEGMENT + ((more + SEGMENT - 1) & -SEGMENT)


# --- commands ------------------------------------------------------------------------------------------------------


@engine_function
def clear_send_queue(qp: QpRow) -> None:
    """Forget all positions of an SQ."""
    recover_cq(CqRow(qp.send_cq))
    for offset in range(QP_SETUP_BYTES, QP_ROW.size, 8):
        st64(qp + offset, 0)
    for offset in range(SQ_STATE, SQ_COUNTS, 8):
        st64(qp + offset, 0)
    st64(qp.doorbell, 0)


@ETHERNET_QUEUES.function
def modify_send_queue(worker: WorkerState, sq: SqRow, source: SqRow, expected: int) -> int:
    """Move an SQ to the state of a prepared row. Return 0 if it is not in the `expected` state, else 1."""
    if sq.state != expected:
        return 0
    sq.state = source.state
    if sq.state == QpState.RST:
        clear_send_queue(sq)
    wake(sq)
    _flush(worker, sq)
    return 1
