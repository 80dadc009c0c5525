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
from ...jit.ops import be16, be32, ld8, ld16, ld32, ld64, st32
from ..memory.streams import move_now
from ..queues.local import execute_local
from ..queues.operations import has_imm, is_local, packet_of
from ..queues.sent import complete_send
from ..queues.wqes import (
    NOT_YET, build, check_wqe, in_one_piece, local_failure, read_control, wqe_slot,
)  # fmt: skip
from ..state.counters import counters_at
from ..state.message import MESSAGE, message_at
from ..state.path import find_path, path_at
from ..state.qp import qp_row_at
from ..state.work_queue import work_queue_at
from ..state.worker import worker_at
from .packets import close_packet, open_packet, write_bth
from .send_queue import begin_turn, budget, end_turn, may_send

_WAIT, _DONE = 0, 1


@engine_function
def serve(nic, queue):
    """Send what the doorbell announced, up to the engine's budget: return how much was done."""
    row = work_queue_at(queue).row
    done = begin_turn(nic, queue)
    if may_send(queue):
        done += _serve(nic, row, budget(nic))
    end_turn(nic, queue)
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
        control = read_control(wqe)
        opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
        result = -reason
        if reason != 0:
            blocks = 1
        elif is_local(opcode):
            result = execute_local(nic, row, wqe, opcode, ds, index)
        else:
            result = _execute(nic, row, wqe, opcode, ds, index, blocks)
        if result == _WAIT:
            break
        done += 1
        if result < 0:
            local_failure(nic, row, index, opcode, ce, -result, blocks)
            break
        complete_send(nic, row, index, opcode, ce, 0)
        q.sq_ci = index + blocks
        q.sq_next, q.sq_sent = q.sq_ci, q.sq_ci
    counters_at(worker_at(nic).counters).sq_wqes += done
    return done


@engine_function
def _execute(nic, row, wqe, opcode, ds, index, blocks):
    """Send the datagram of a WQE: return _DONE, even if nobody can get it, _WAIT if the wire is full, or -reason."""
    q = qp_row_at(row)
    n = worker_at(nic)
    message = n.message
    wqe = in_one_piece(row, message, wqe, index, blocks)
    reason = build(nic, row, message, wqe, opcode, ds, index)
    if reason != 0:
        return -reason
    result = _DONE
    if n.link_down or _aim(nic, message, wqe + SEGMENT) == 0:
        counters_at(n.counters).tx_unreachable += 1
    else:
        result = _send(nic, row, message, be32(ld32(wqe + SEGMENT + AV_SEG.q_key)))
    if result == _DONE:
        q.tx_psn += 1
        q.ssn += 1
    return result


@device_function
def _aim(nic, message, av):
    """Fill in the message's `connection` for an address vector: return 1, or 0 if no path leads there."""
    infiniband = worker_at(nic).lid != 0
    qpn = be32(ld32(av + AV_SEG.dqp_dct))
    route = be32(ld32(av + AV_SEG.grh_gid_fl)) if qpn & EXTENDED_AV else 0
    own = route >> AV_SGID_SHIFT & AV_SGID_MASK
    lid = be16(ld16(av + AV_SEG.rlid))
    if infiniband:
        path = find_path(nic, 0, lid, 0)
    elif qpn & EXTENDED_AV:
        path = find_path(nic, ld64(av + AV_SEG.rgid), ld64(av + AV_SEG.rgid + 8), own)
    else:
        path = 0
    if path == 0 or path_at(path).wire == 0:
        return 0
    p = path_at(path)
    c = qp_row_at(message + MESSAGE.connection)
    c.remote_qpn = qpn & QPN_MASK
    c.wire, c.source = p.wire, p.source
    c.egress = p.egress
    if qpn & EXTENDED_AV:
        c.egress = with_traffic(
            p.egress, ld8(av + AV_SEG.tclass), ld8(av + AV_SEG.hop_limit), route & FLOW_LABEL_MASK
        )
    c.peer_high, c.peer_low = p.peer_high, p.peer_low
    c.dlid, c.sl, c.grh = lid, ld8(av + AV_SEG.stat_rate_sl) & 0xF, 0
    if infiniband and route & AV_GRH:
        c.grh, c.source = 1, own
        c.peer_high, c.peer_low = ld64(av + AV_SEG.rgid), ld64(av + AV_SEG.rgid + 8)
    return 1


@engine_function
def _send(nic, row, message, q_key):
    """Put the message on the wire of its `connection`: return _DONE, _WAIT if the wire is full, or -reason."""
    q = qp_row_at(row)
    m = message_at(message)
    connection = message + MESSAGE.connection
    operation = packet_of(m.opcode, True, True)
    pad = -m.nbytes & 3
    headers = BTH.size + DETH.size + (IMM_DT.size if has_imm(operation) else 0)
    bth = open_packet(nic, connection, 0, headers + m.nbytes + pad)
    if bth == 0:
        return _WAIT
    write_bth(connection, bth, UD_SERVICE << SERVICE_SHIFT | operation, m.solicited, pad, 0, q.tx_psn)
    deth = bth + BTH.size
    st32(deth + DETH.q_key, be32(q.q_key if q_key & OWN_Q_KEY else q_key))
    st32(deth + DETH.resv_src_qp, be32(q.qpn))
    if has_imm(operation):
        st32(deth + DETH.size + IMM_DT.imm, be32(m.imm))
    at = bth + headers
    if pad:
        st32((at + m.nbytes) & -4, 0)
    segment = message + MESSAGE.segments
    for _ in range(m.nsegments):
        part = ld64(segment + 8)
        reason = move_now(nic, at, ld64(segment), part)
        if reason != 0:
            return -reason
        at += part
        segment += 16
    close_packet(nic, connection, bth, headers + m.nbytes + pad, m.nbytes)
    return _DONE
