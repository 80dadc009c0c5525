"""The send queue of Ethernet packets (SQ): each WQE is a packet, complete once it is on the wire.

WQEs are executed in their order. When the wire has no room, the queue waits for it, and nothing is lost.
"""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.packet import ETHERNET
from ...formats.wqe import (
    DATA_SEG, ETH_INSERT_VLAN, ETH_SEG, ETH_VLAN, INLINE_SEG, SEGMENT, EthChecksum, WaitMode, WqeOpcode,
)  # fmt: skip
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, ld8, ld16, ld32, ld64, prefetch, st64
from ..queues.completion import recover_cq
from ..queues.doorbells import poll_doorbell
from ..queues.sent import complete_send
from ..queues.waits import real_time_stamp, time_left, wait_for_cq, wait_for_time
from ..queues.wqes import (
    NOT_YET, check_wqe, flush_next, gather, in_one_piece, local_failure, read_control, wqe_slot,
)  # fmt: skip
from ..state import refuse
from ..state.counters import counters_at
from ..state.ethernet_queues import SQ_COUNTS, SQ_STATE, sq_row_at
from ..state.extensions import ETHERNET_QUEUES
from ..state.message import MESSAGE, message_at
from ..state.qp import QP_ROW, QP_SETUP_BYTES, qp_row_at
from ..state.reasons import Reason
from ..state.work_queue import wake, work_queue_at
from ..state.worker import worker_at
from .eth_frame import NO_ROOM, SENT, send_packet
from .eth_segment import send_segments
from .send_queue import budget, may_send

_WAIT, _DONE = NO_ROOM, SENT  # of a WQE, or minus a reason
_AWAKE_BEFORE = 2_000_000  # ns before the end of a WAIT, for each ms that the engine sleeps at most
_AHEAD = 4  # WQEs: another core has written them
_INLINE_IN_SEGMENT = SEGMENT - ETH_SEG.inline_hdr_start


# --- the turn ------------------------------------------------------------------------------------------------------


@ETHERNET_QUEUES.function
def serve(nic, queue):
    """Send what the doorbell announced, up to the engine's budget: return how much was done."""
    w = work_queue_at(queue)
    row = w.row
    poll_doorbell(nic, row)
    done = _serve(nic, row, budget(nic)) if may_send(queue) else _flush(nic, row)
    w.seen = qp_row_at(row).db_seen
    w.awake = 1 if may_send(queue) else 0
    return done


@device_function
def waits(row):
    """Return whether an announced WQE is not complete: the engine must not sleep.

    It may sleep while an SQ waits for a time, until the last sleep before that.
    """
    q = qp_row_at(row)
    n = worker_at(q.worker)
    left = sq_row_at(row).wait_until - n.now
    return q.sq_ci != q.sq_pi and q.state == QpState.RTS and left < _AWAKE_BEFORE * n.sleep_ms


@engine_function
def _flush(nic, row):
    """Complete everything that was announced to an SQ in ERR with a flush error, if the SQ is to do so."""
    q = qp_row_at(row)
    done = 0
    if q.state == QpState.ERR and sq_row_at(row).flush:
        while q.sq_ci != q.sq_pi:
            flush_next(nic, row)
            done += 1
    return done


@engine_function
def _serve(nic, row, most):
    """Execute up to `most` WQEs. Return how many."""
    q = qp_row_at(row)
    done = 0
    while q.sq_next != q.sq_pi and done < most and q.state == QpState.RTS:
        index = q.sq_next
        reason = check_wqe(nic, row, index)
        if reason == NOT_YET:
            break
        wqe = wqe_slot(row, index)
        prefetch(wqe_slot(row, index + _AHEAD))
        control = read_control(wqe)
        opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
        result = -reason
        if reason != 0:
            blocks = 1
        else:
            whole = in_one_piece(row, worker_at(nic).message, wqe, index, blocks)
            result = _execute(nic, row, whole, opcode, control.opmod, ds)
        if result == _WAIT:
            break
        done += 1
        if result < 0:
            local_failure(nic, row, index, opcode, ce, -result, blocks)
            done += _flush(nic, row)
            break
        _complete(nic, row, index, opcode, ce)
        q.sq_ci = index + blocks
        q.sq_next, q.sq_sent = q.sq_ci, q.sq_ci
    counters_at(worker_at(nic).counters).sq_wqes += done
    return done


@device_function
def _complete(nic, row, index, opcode, ce):
    """Complete a WQE, at the time of day if the SQ has real-time timestamps."""
    n = worker_at(nic)
    now = n.now
    if sq_row_at(row).real_time:
        n.now = real_time_stamp(nic)
    complete_send(nic, row, index, opcode, ce, 0)
    n.now = now


# --- WQEs ----------------------------------------------------------------------------------------------------------


@engine_function
def _execute(nic, row, wqe, opcode, opmod, ds):
    """Execute a WQE, which is in one piece: return _DONE, _WAIT, or minus a reason."""
    if opcode == WqeOpcode.NOP:
        return _DONE
    if opcode == WqeOpcode.WAIT:
        return _wait(nic, row, wqe, opmod, ds)
    if opcode == WqeOpcode.ENHANCED_MPSW and sq_row_at(row).multi_packet == 0:
        return -refuse.unsupported_operation(nic)
    if opcode == WqeOpcode.SEND or opcode == WqeOpcode.TSO or opcode == WqeOpcode.ENHANCED_MPSW:
        return _send(nic, row, wqe, opcode, ds)
    return -refuse.unsupported_operation(nic)


@engine_function
def _wait(nic, row, wqe, opmod, ds):
    """Execute a WAIT."""
    s = sq_row_at(row)
    s.wait_until = 0
    if opmod == WaitMode.CQ_PI:
        return wait_for_cq(nic, row, wqe, ds)
    if opmod != WaitMode.TIME:
        return -refuse.wait_mode(nic, opmod, 0)
    result = wait_for_time(nic, wqe, ds, s.real_time)
    if result == _WAIT:
        s.wait_until = worker_at(nic).now + time_left(nic, wqe, s.real_time)
    return result


@engine_function
def _send(nic, row, wqe, opcode, ds):
    """Send the packet of a SEND, the segments of a TSO, or the packets of an ENHANCED_MPSW."""
    if ds < 2:
        return -refuse.malformed_wqe(nic, ds)
    segment = wqe + SEGMENT
    flags = ld8(segment + ETH_SEG.cs_flags)
    if flags & (EthChecksum.L3_INNER | EthChecksum.L4_INNER):
        return -refuse.checksum_flags(nic, flags)
    inline = be16(ld16(segment + ETH_SEG.inline_hdr_sz))
    tag = 0
    if inline & ETH_INSERT_VLAN:
        tag = inline << 16 | be16(ld16(segment + ETH_VLAN.tci))
        inline = 0
    data = wqe + data_at(inline)
    end = wqe + ds * SEGMENT
    if data > end or (opcode == WqeOpcode.ENHANCED_MPSW and inline != 0):
        return -refuse.malformed_wqe(nic, ds)
    message = worker_at(nic).message
    reason = gather(nic, row, message, data, end, 0)
    if reason != 0:
        return -(refuse.malformed_wqe(nic, ds) if reason == Reason.WQE_MALFORMED else reason)
    head = segment + ETH_SEG.inline_hdr_start
    if opcode == WqeOpcode.TSO:
        return send_segments(nic, row, head, inline, be16(ld16(segment + ETH_SEG.mss)))
    if opcode == WqeOpcode.ENHANCED_MPSW:
        if message_at(message).nsegments != (end - data) // SEGMENT and _has_empty(data, end):
            return -refuse.frame_length(nic, 0, ETHERNET.size, qp_row_at(row).mtu + ETHERNET.size)
        return _send_each(nic, row, head, flags, tag)
    nbytes = message_at(message).nbytes
    return send_packet(nic, row, head, inline, message + MESSAGE.segments, 0, nbytes, flags, tag)


@device_function
def _has_empty(segment, end):
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
def _send_each(nic, row, head, flags, tag):
    """Send each of the message's data segments that was not sent yet, as a packet of its own."""
    s = sq_row_at(row)
    message = worker_at(nic).message
    while s.packets < message_at(message).nsegments:
        segment = message + MESSAGE.segments + 16 * s.packets
        result = send_packet(nic, row, head, 0, segment, 0, ld64(segment + 8), flags, tag)
        if result != SENT:
            return result
        s.packets += 1
    s.packets = 0
    return _DONE


@device_function
def data_at(inline):
    """Return where the data segments begin in a WQE with so many bytes of inline headers."""
    more = max(inline - _INLINE_IN_SEGMENT, 0)
    return 2 * SEGMENT + ((more + SEGMENT - 1) & -SEGMENT)


# --- commands ------------------------------------------------------------------------------------------------------


@engine_function
def clear_send_queue(row):
    """Forget all positions of an SQ."""
    recover_cq(qp_row_at(row).send_cq)
    for offset in range(QP_SETUP_BYTES, QP_ROW.size, 8):
        st64(row + offset, 0)
    for offset in range(SQ_STATE, SQ_COUNTS, 8):
        st64(row + offset, 0)
    st64(qp_row_at(row).doorbell, 0)


@ETHERNET_QUEUES.function
def modify_send_queue(nic, row, source, expected):
    """Move an SQ to the state of a prepared row. Return 0 if it is not in the `expected` state, else 1."""
    q = qp_row_at(row)
    if q.state != expected:
        return 0
    q.state = qp_row_at(source).state
    if q.state == QpState.RST:
        clear_send_queue(row)
    wake(row)
    _flush(nic, row)
    return 1
