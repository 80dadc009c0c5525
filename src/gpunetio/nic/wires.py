"""The engine's side of a wire: answer the peer's requests, and complete our own by its replies."""

from __future__ import annotations

from ..device.compile import device_function, engine_function
from ..device.ops import be32, clock_ns, ld32
from ..fabric.inprocess import message_at, reply_at, wire_end_at
from ..fabric.ring import next_free, next_full, publish, release
from ..formats.wqe import CTRL_SEG
from .completion import ce_of, complete_send
from .reasons import OUT_OF_SEQUENCE, Reason
from .requester import PSN_MASK, RTR, RTS, refused, wqe_slot
from .responder import explain, respond
from .tables import QP_ROW, nic_at, qp_row_at

_NO_RESPONSE, _RNR = int(Reason.NO_RESPONSE), int(Reason.RNR)
BATCH = 32


@device_function
def qp_row(nic, qpn):
    """Address of the row where `qpn` would be."""
    n = nic_at(nic)
    return n.qps + (qpn & n.qp_mask) * QP_ROW.size


@device_function
def _answer(nic, end, message):
    """Execute a request of the peer's: 0 or a reason."""
    m = message_at(message)
    row = qp_row(nic, m.dst_qpn)
    q = qp_row_at(row)
    if (
        q.qpn != m.dst_qpn
        or q.remote_qpn != m.src_qpn
        or q.wire != end
        or (q.state != RTR and q.state != RTS)
    ):  # fmt: skip
        return _NO_RESPONSE
    if m.psn != q.expect_psn:
        return OUT_OF_SEQUENCE
    reason = respond(nic, row, message)
    if reason == 0:
        q.expect_psn = (q.expect_psn + 1) & PSN_MASK
    return reason


@engine_function
def _serve_requests(nic, end):
    e = wire_end_at(end)
    n = nic_at(nic)
    done = 0
    while done < BATCH:
        message = next_full(e.requests_in)
        if message == 0:
            break
        reply = next_free(e.replies_out)
        if reply == 0:
            break
        if done == 0:
            n.now = clock_ns()
        m = message_at(message)
        r = reply_at(reply)
        explain(nic, 0, 0, 0, 0, 0)
        r.reason = _answer(nic, end, message)
        r.src_qpn, r.index, r.psn = m.src_qpn, m.index, m.psn
        r.rnr_timer = qp_row_at(qp_row(nic, m.dst_qpn)).min_rnr
        r.key, r.addr = n.why_key, n.why_addr
        r.nbytes = n.why_nbytes if r.reason else m.nbytes
        r.extra0, r.extra1 = n.why_extra0, n.why_extra1
        release(e.requests_in)
        publish(e.replies_out)
        done += 1
    return done


@engine_function
def _take_reply(nic, reply):
    r = reply_at(reply)
    row = qp_row(nic, r.src_qpn)
    q = qp_row_at(row)
    q.outstanding -= 1
    if q.state != RTS or q.retry_at != 0:
        return  # a later request of a QP that has failed, or that will send it again
    index = r.index
    wqe = wqe_slot(row, index)
    opcode = be32(ld32(wqe)) & 0xFF
    blocks = ((be32(ld32(wqe + CTRL_SEG.qpn_ds)) & 0x3F) + 3) >> 2
    if r.reason == 0:
        q.retries = 0
        q.rnr_retries = 0
        complete_send(nic, row, index, opcode, ce_of(wqe), r.nbytes)
        q.sq_ci = index + blocks
        return
    reason = _NO_RESPONSE if r.reason == OUT_OF_SEQUENCE else r.reason
    explain(nic, r.key, r.addr, r.nbytes, r.extra0, r.extra1)
    if refused(nic, row, index, opcode, ce_of(wqe), reason, r.rnr_timer):
        q.sq_next = index
        q.send_psn = r.psn
    else:
        q.sq_ci = index + blocks
        q.sq_next = q.sq_ci


@engine_function
def serve_replies(nic, end):
    """Replies taken."""
    e = wire_end_at(end)
    done = 0
    while done < BATCH:
        reply = next_full(e.replies_in)
        if reply == 0:
            break
        _take_reply(nic, reply)
        release(e.replies_in)
        done += 1
    return done


@engine_function
def serve_wire(nic, end):
    """Messages handled."""
    return _serve_requests(nic, end) + serve_replies(nic, end)
