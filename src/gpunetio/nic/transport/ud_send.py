"""The sender of unreliable datagrams: each WQE is one packet to the destination that its address vector names (IBTA
9.8.3). It completes once the packet is on a wire.

Datagrams to queue pairs of the same NIC take a wire to itself, so they are packets, too.
"""

from __future__ import annotations

from ...fabric.frames import with_traffic
from ...formats.commands import QpState
from ...formats.packet import BTH, DETH, FLOW_LABEL_MASK, IMM_DT, OWN_Q_KEY, QPN_MASK, SERVICE_SHIFT, UD_SERVICE
from ...formats.wqe import AV_GRH, AV_SEG, AV_SGID_MASK, AV_SGID_SHIFT, EXTENDED_AV, SEGMENT
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, ld16, ld32, ld64, ld8, st32
from ..memory.streams import copy_and_wait
from ..queues.local import execute_local
from ..queues.operations import has_imm, is_local, packet_opcode_of
from ..queues.send_completion import complete_send
from ..queues.wqes import NOT_YET, build_message, check_wqe, in_one_piece, local_failure, read_control, wqe_slot
from ..state.counters import CounterSet
from ..state.message import MESSAGE, Message
from ..state.path import Path, find_path
from ..state.qp import QpRow
from ..state.work_queue import WorkQueue
from ..state.worker import WorkerState
from .packets import close_packet, open_packet, write_bth
from .send_queue import begin_turn, budget, end_turn, may_send

_WAIT, _DONE = 0, 1


@engine_function
def serve(worker: WorkerState, queue: WorkQueue) -> int:
    """Send what the doorbell announced, up to the engine's budget: return how much was done."""
    qp = QpRow(queue.row)
    done = begin_turn(worker, queue)
    if may_send(queue):
        done += _serve(worker, qp, budget(worker))
    end_turn(worker, queue)
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
        control = read_control(wqe)
        opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
        result = -reason
        if reason != 0:
            blocks = 1
        elif is_local(opcode):
            result = execute_local(worker, qp, wqe, opcode, ds, index)
        else:
            result = _execute(worker, qp, wqe, opcode, ds, index, blocks)
        if result == _WAIT:
            break
        done += 1
        if result < 0:
            local_failure(worker, qp, index, opcode, ce, -result, blocks)
            break
        complete_send(worker, qp, index, opcode, ce, 0)
        qp.sq_ci = index + blocks
        qp.sq_next, qp.sq_sent = qp.sq_ci, qp.sq_ci
    CounterSet(worker.counters).sq_wqes += done
    return done


@engine_function
def _execute(worker: WorkerState, qp: QpRow, wqe: int, opcode: int, ds: int, index: int, blocks: int) -> int:
    """Send the datagram of a WQE: return _DONE, even if nobody can get it, _WAIT if the wire is full, or -reason."""
    message = Message(worker.message)
    wqe = in_one_piece(qp, message, wqe, index, blocks)
    reason = build_message(worker, qp, message, wqe, opcode, ds, index)
    if reason != 0:
        return -reason
    result = _DONE
    if worker.link_down or _aim(worker, message, wqe + SEGMENT) == 0:
        CounterSet(worker.counters).tx_unreachable += 1
    else:
        result = _send(worker, qp, message, be32(ld32(wqe + SEGMENT + AV_SEG.q_key)))
    if result == _DONE:
        qp.tx_psn += 1
        qp.ssn += 1
    return result


@device_function
def _aim(worker: WorkerState, message: Message, av: int) -> int:
    """Fill in the message's `connection` for an address vector: return 1, or 0 if no path leads there."""
    infiniband = worker.lid != 0
    qpn = be32(ld32(av + AV_SEG.dqp_dct))
    route = be32(ld32(av + AV_SEG.grh_gid_fl)) if qpn & EXTENDED_AV else 0
    own = route >> AV_SGID_SHIFT & AV_SGID_MASK
    lid = be16(ld16(av + AV_SEG.rlid))
    if infiniband:
        path = find_path(worker, 0, lid, 0)
    elif qpn & EXTENDED_AV:
        path = find_path(worker, ld64(av + AV_SEG.rgid), ld64(av + AV_SEG.rgid + 8), own)
    else:
        path = 0
    if path == 0 or Path(path).wire == 0:
        return 0
    p = Path(path)
    qp = QpRow(message + MESSAGE.connection)
    qp.remote_qpn = qpn & QPN_MASK
    qp.wire, qp.source = p.wire, p.source
    qp.egress = p.egress
    if qpn & EXTENDED_AV:
        qp.egress = with_traffic(
            p.egress, ld8(av + AV_SEG.tclass), ld8(av + AV_SEG.hop_limit), route & FLOW_LABEL_MASK
        )
    qp.peer_high, qp.peer_low = p.peer_high, p.peer_low
    qp.dlid, qp.sl, qp.grh = lid, ld8(av + AV_SEG.stat_rate_sl) & 0xF, 0
    if infiniband and route & AV_GRH:
        qp.grh, qp.source = 1, own
        qp.peer_high, qp.peer_low = ld64(av + AV_SEG.rgid), ld64(av + AV_SEG.rgid + 8)
    return 1


@engine_function
def _send(worker: WorkerState, qp: QpRow, message: Message, q_key: int) -> int:
    """Put the message on the wire of its `connection`: return _DONE, _WAIT if the wire is full, or -reason."""
    connection = QpRow(message + MESSAGE.connection)
    operation = packet_opcode_of(message.opcode, True, True)
    pad = -message.nbytes & 3
    headers = BTH.size + DETH.size + (IMM_DT.size if has_imm(operation) else 0)
    bth = open_packet(worker, connection, 0, headers + message.nbytes + pad)
    if bth == 0:
        return _WAIT
    write_bth(connection, bth, UD_SERVICE << SERVICE_SHIFT | operation, message.solicited, pad, 0, qp.tx_psn)
    deth = bth + BTH.size
    st32(deth + DETH.q_key, be32(qp.q_key if q_key & OWN_Q_KEY else q_key))
    st32(deth + DETH.resv_src_qp, be32(qp.qpn))
    if has_imm(operation):
        st32(deth + DETH.size + IMM_DT.imm, be32(message.imm))
    at = bth + headers
    if pad:
        st32((at + message.nbytes) & -4, 0)
    segment = message + MESSAGE.segments
    for _ in range(message.nsegments):
        part = ld64(segment + 8)
        reason = copy_and_wait(worker, at, ld64(segment), part)
        if reason != 0:
            return -reason
        at += part
        segment += 16
    close_packet(worker, connection, bth, headers + message.nbytes + pad, message.nbytes)
    return _DONE
