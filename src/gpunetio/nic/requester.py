"""Requester: fetches WQEs, checks them, and carries them out or sends them (IBTA 9.7, requester side).

One QP's WQEs are executed and completed in order. A request to a QP of the same NIC is executed at once; over a wire,
up to a ring's worth is in flight and completes by replies.
"""

from __future__ import annotations

from ..device.compile import device_function, engine_function
from ..device.ops import (
    be32, be64, clock_ns, copy, fence_acquire_sys, ld32, ld64, ld_acquire32, ld_relaxed32, pause, st64,
)  # fmt: skip
from ..enums import Access
from ..fabric.inprocess import MAX_SEGMENTS, MESSAGE, message_at, wire_end_at
from ..fabric.ring import next_free, publish
from ..formats.commands import QpState
from ..formats.doorbell import PI_MASK, QP_DBREC, WQE_IDX_SHIFT
from ..formats.wqe import (
    ATOMIC_SEG, CTRL_SEG, DATA_SEG, INLINE_SEG, MAX_TRANSFER, RADDR_SEG, SEGMENT, WQEBB_SHIFT, WqeOpcode,
)  # fmt: skip
from .completion import ERR, REQUESTER, ce_of, complete_send, fail_qp, fail_send, record_error
from .mkey import find, translate
from .reasons import Reason
from .responder import explain, flush_receives, respond
from .tables import QP_ROW, counters_at, nic_at, qp_row_at

RST, RTR, RTS = int(QpState.RST), int(QpState.RTR), int(QpState.RTS)
_NOP, _WRITE, _WRITE_IMM = int(WqeOpcode.NOP), int(WqeOpcode.RDMA_WRITE), int(WqeOpcode.RDMA_WRITE_IMM)
_SEND, _SEND_IMM, _READ = int(WqeOpcode.SEND), int(WqeOpcode.SEND_IMM), int(WqeOpcode.RDMA_READ)
_CS, _FA = int(WqeOpcode.ATOMIC_CS), int(WqeOpcode.ATOMIC_FA)
_LOCAL_WRITE, _REMOTE_WRITE = int(Access.LOCAL_WRITE), int(Access.REMOTE_WRITE)
_LKEY_UNKNOWN, _LENGTH, _ATOMIC_LENGTH = int(Reason.LKEY_UNKNOWN), int(Reason.LENGTH), int(Reason.ATOMIC_LENGTH)
_STALE, _WRONG_QPN, _OPCODE = int(Reason.WQE_STALE), int(Reason.WQE_QPN), int(Reason.WQE_OPCODE)
_MALFORMED, _FLUSH, _QP_STATE = int(Reason.WQE_MALFORMED), int(Reason.FLUSH), int(Reason.QP_STATE)
_DOORBELL_RANGE, _NO_RESPONSE, _RNR = int(Reason.DOORBELL_RANGE), int(Reason.NO_RESPONSE), int(Reason.RNR)

# Between our own NICs a PSN numbers a message, not a packet: whole messages travel.
PSN_MASK = 0xFF_FFFF
HALF_RANGE = (PI_MASK + 1) // 2
STALE_POLLS = 20_000  # how often a WQE that is not there yet is read again: a fraction of a millisecond
ENDLESS_RNR = 7  # rnr_retry 7 means for ever (IBTA 9.7.5.2.8)
ENDLESS_NS = 1_000_000  # between tries of a QP that never gives up
_UNSUPPORTED = 64  # larger than any WQE's number of segments
_SEGMENTS = MESSAGE.segments


@device_function
def wqe_slot(row, index):
    """Address of the ring slot of WQE `index`."""
    q = qp_row_at(row)
    return q.sq_addr + ((index & ((1 << q.sq_log) - 1)) << WQEBB_SHIFT)


# --- doorbells -----------------------------------------------------------------------------------------------------


@engine_function
def announce(nic, row, producer16):
    """A doorbell or record says that the queue reaches `producer16`: move `sq_pi` there, or explain what is wrong."""
    q = qp_row_at(row)
    if q.state == RST or q.sq_addr == 0:  # in RST the counts stay 0, though the record may hold those of before
        return
    depth = 1 << q.sq_log
    ahead = (producer16 - q.sq_ci) & PI_MASK
    if ahead <= depth:
        if q.sq_ci + ahead <= q.sq_pi:
            return
        q.sq_pi = q.sq_ci + ahead
        if q.state < RTS and q.failed == 0:
            explain(nic, 0, 0, 0, q.state, 0)
            record_error(nic, REQUESTER, q.qpn, q.sq_ci, _NOP, _QP_STATE, 0)
    elif PI_MASK + 1 - ahead > depth:  # not an old index either
        explain(nic, 0, 0, depth, producer16, q.sq_ci & PI_MASK)
        if q.state == RTS and q.sq_pi == q.sq_ci:
            fail_send(nic, row, q.sq_ci, _NOP, 0, _DOORBELL_RANGE)
        elif q.state == RTS:  # each posted WQE completes once: with a flush error
            fail_qp(nic, row, q.sq_ci, _NOP, _DOORBELL_RANGE, REQUESTER)


@device_function
def poll_doorbell(nic, row):
    """Look at the QP's own register line."""
    q = qp_row_at(row)
    raw = ld_relaxed32(q.doorbell)
    if raw != q.db_seen:
        q.db_seen = raw
        fence_acquire_sys()
        announce(nic, row, (be32(raw) >> WQE_IDX_SHIFT) & PI_MASK)


@engine_function
def scan_record(nic, row):
    """Look at the doorbell record, for rings that were missed. An index behind the NIC is an old one."""
    q = qp_row_at(row)
    if q.no_dbr or q.sq_addr == 0:
        return
    producer16 = be32(ld_acquire32(q.dbrec + QP_DBREC.snd)) & PI_MASK
    ahead = (producer16 - q.sq_ci) & PI_MASK
    if ahead == HALF_RANGE:
        # A full ring of 2^15 ahead, or as much behind: the WQE in the next slot tells.
        if (be32(ld_acquire32(wqe_slot(row, q.sq_ci))) >> WQE_IDX_SHIFT) & PI_MASK != q.sq_ci & PI_MASK:
            return
    if ahead <= 1 << q.sq_log:
        announce(nic, row, producer16)


# --- one WQE -------------------------------------------------------------------------------------------------------


@device_function
def _is_there(wqe, index, qpn):
    """Whether the slot holds this QP's WQE `index` (a slot never written holds index 0 of QP 0)."""
    return (be32(ld_acquire32(wqe)) >> WQE_IDX_SHIFT) & PI_MASK == index & PI_MASK and (
        be32(ld_acquire32(wqe + CTRL_SEG.qpn_ds)) >> 8 == qpn
    )


@engine_function
def _await_wqe(wqe, index, qpn):
    """Look again at a slot that does not hold the WQE yet, until it does or patience has ended."""
    for _ in range(STALE_POLLS):
        if _is_there(wqe, index, qpn):
            return
        pause()


@engine_function
def _unwrap(row, message, index, blocks):
    """Copy a WQE that wraps around the end of its ring into the message, in one piece."""
    for i in range(blocks):
        copy(message + MESSAGE.wqe + (i << WQEBB_SHIFT), wqe_slot(row, index + i), 1 << WQEBB_SHIFT)


@device_function
def _in_one_piece(row, message, wqe, index, blocks):
    """The WQE where it is, or where `_unwrap` has put it."""
    depth = 1 << qp_row_at(row).sq_log
    if (index & (depth - 1)) + blocks <= depth:
        return wqe
    _unwrap(row, message, index, blocks)
    return message + MESSAGE.wqe


@device_function
def _gather(nic, row, message, segment, end, right):
    """Check the data segments and list them in the message: 0, or a reason. Sets nbytes and nsegments."""
    q = qp_row_at(row)
    m = message_at(message)
    out = message + _SEGMENTS
    total = 0
    count = 0
    while segment < end:
        word = be32(ld32(segment + DATA_SEG.byte_count))
        nbytes = word & (INLINE_SEG - 1)
        if word & INLINE_SEG:
            address = segment + 4
            step = (nbytes + 4 + SEGMENT - 1) & -SEGMENT
            if right != 0 or segment + step > end:
                return _MALFORMED
        else:
            if nbytes == 0:
                nbytes = INLINE_SEG  # PRM: byte_count 0 means 2 GiB
            step = SEGMENT
            if total + nbytes > MAX_TRANSFER:
                explain(nic, 0, 0, total + nbytes, 0, 0)
                return _LENGTH
            address = translate(
                nic, be32(ld32(segment + DATA_SEG.lkey)), q.pdn, be64(ld64(segment + DATA_SEG.addr)), nbytes, right,
                _LKEY_UNKNOWN,
            )  # fmt: skip
            if address < 0:
                return -address
        if nbytes > 0:
            st64(out, address)
            st64(out + 8, nbytes)
            out += 16
            count += 1
        total += nbytes
        segment += step
    m.nbytes = total
    m.nsegments = count
    return 0


@device_function
def _header_segments(opcode):
    """16-byte segments before the data: ctrl, and raddr and atomic where the opcode has them."""
    if opcode == _WRITE or opcode == _READ or opcode == _WRITE_IMM:
        return 2
    if opcode == _SEND or opcode == _SEND_IMM:
        return 1
    if opcode == _CS or opcode == _FA:
        return 3
    return _UNSUPPORTED


@device_function
def _build(nic, row, message, wqe, opcode, ds, index):
    """Turn a checked control segment's WQE into a message: 0, or a reason."""
    q = qp_row_at(row)
    m = message_at(message)
    headers = _header_segments(opcode)
    if headers == _UNSUPPORTED:
        explain(nic, 0, 0, 0, 0, 0)
        return _OPCODE
    if ds < headers or ds - headers > MAX_SEGMENTS:
        explain(nic, 0, 0, 0, ds, 0)
        return _MALFORMED
    m.opcode = opcode
    m.src_qpn = q.qpn
    m.dst_qpn = q.remote_qpn
    m.index = index
    if headers > 1:
        m.raddr = be64(ld64(wqe + SEGMENT + RADDR_SEG.raddr))
        m.rkey = be32(ld32(wqe + SEGMENT + RADDR_SEG.rkey))
    m.imm = be32(ld32(wqe + CTRL_SEG.imm))
    right = 0
    if opcode == _READ:
        right = _LOCAL_WRITE
    if headers == 3:
        right = _LOCAL_WRITE
        m.swap_add = be64(ld64(wqe + 2 * SEGMENT + ATOMIC_SEG.swap_add))
        m.compare = be64(ld64(wqe + 2 * SEGMENT + ATOMIC_SEG.compare))
    reason = _gather(nic, row, message, wqe + headers * SEGMENT, wqe + ds * SEGMENT, right)
    if reason == _MALFORMED:
        explain(nic, 0, 0, 0, ds, 0)
    elif reason == 0 and headers == 3 and m.nbytes != 8:
        explain(nic, 0, 0, m.nbytes, 0, 0)
        return _ATOMIC_LENGTH
    return reason


@engine_function
def _defer(row, retries, delay_ns, limit, endless):
    """Try the WQE again later. 1 if it will be, 0 if the retries counted at `retries` are used up."""
    if ld64(retries) >= limit and not endless:
        st64(retries, 0)
        return 0
    st64(retries, ld64(retries) + 1)
    qp_row_at(row).retry_at = clock_ns() + delay_ns
    return 1


@device_function
def _peer_ready(row, peer):
    """Whether the QP at `peer` is the one that `row` is connected to, receives, and expects this message."""
    q = qp_row_at(row)
    p = qp_row_at(peer)
    return (
        p.qpn == q.remote_qpn
        and p.remote_qpn == q.qpn
        and p.wire == 0
        and (p.state == RTR or p.state == RTS)
        and p.expect_psn == q.send_psn
    )


@engine_function
def refused(nic, row, index, opcode, ce, reason, rnr_ns):
    """The responder said no: try again later (1), or fail the WQE (0)."""
    q = qp_row_at(row)
    counters = counters_at(nic_at(nic).counters)
    if reason == _RNR:
        counters.rnr_nak_retry_err += 1
        if _defer(row, row + QP_ROW.rnr_retries, rnr_ns, q.rnr_retry, q.rnr_retry == ENDLESS_RNR):
            return 1
        explain(nic, 0, 0, 0, q.rnr_retry, 0)
    elif reason == _NO_RESPONSE:
        counters.local_ack_timeout_err += 1
        endless = q.timeout_ns == 0  # ack_timeout 0: never give up
        if _defer(row, row + QP_ROW.retries, ENDLESS_NS if endless else q.timeout_ns, q.retry_cnt, endless):
            return 1
        explain(nic, 0, 0, 0, q.remote_qpn, q.retry_cnt)
    fail_send(nic, row, index, opcode, ce, reason)
    return 0


@engine_function
def _local_failure(nic, row, index, opcode, ce, reason, blocks):
    """A WQE that this side refuses: behind everything in flight, an error CQE. 1 if it was consumed, else 0."""
    q = qp_row_at(row)
    if q.outstanding:
        return 0
    fail_send(nic, row, index, opcode, ce, reason)
    q.sq_ci = index + blocks
    q.sq_next = q.sq_ci
    return 1


@engine_function
def _flush_one(nic, row):
    """Complete the next WQE of a QP in ERR with a flush error: 1, or 0 while requests are in flight."""
    q = qp_row_at(row)
    if q.outstanding:
        return 0
    index = q.sq_ci
    wqe = wqe_slot(row, index)
    word = be32(ld_acquire32(wqe))
    ds = be32(ld32(wqe + CTRL_SEG.qpn_ds)) & 0x3F
    explain(nic, 0, 0, 0, 0, 0)
    fail_send(nic, row, index, word & 0xFF, ce_of(wqe), _FLUSH)
    # A WQE that is not what it should be counts as one block, so that the flush always ends.
    q.sq_ci = min(index + max(1, (ds + 3) >> 2), q.sq_pi)
    q.sq_next = q.sq_ci
    return 1


@device_function
def _plain_write(nic, row, wqe, ds):
    """The commonest request, an RDMA WRITE of one segment to a QP beside this one, carried out without a message.

    Its bytes, or -1 if it is anything else or if any check fails: nothing has happened then, and the general path
    finds out why. Building the message would cost 40 % of the rate.
    """
    q = qp_row_at(row)
    nbytes = be32(ld32(wqe + 2 * SEGMENT + DATA_SEG.byte_count))
    peer = q.remote_row
    if ds != 3 or nbytes == 0 or nbytes > MAX_TRANSFER or peer == 0 or not _peer_ready(row, peer):
        return -1
    p = qp_row_at(peer)
    lkey = be32(ld32(wqe + 2 * SEGMENT + DATA_SEG.lkey))
    source = find(nic, lkey, q.pdn, be64(ld64(wqe + 2 * SEGMENT + DATA_SEG.addr)), nbytes, 0)
    rkey = be32(ld32(wqe + SEGMENT + RADDR_SEG.rkey))
    target = find(nic, rkey, p.pdn, be64(ld64(wqe + SEGMENT + RADDR_SEG.raddr)), nbytes, _REMOTE_WRITE)
    if source < 0 or target < 0 or p.rights & _REMOTE_WRITE == 0:
        return -1
    copy(target, source, nbytes)
    counters = counters_at(nic_at(nic).counters)
    counters.port_rcv_data += nbytes
    counters.rx_write_requests += 1
    return nbytes


@device_function
def _succeed(nic, row, index, blocks, opcode, ce, nbytes):
    """A request to the QP beside this one has been carried out."""
    q = qp_row_at(row)
    p = qp_row_at(q.remote_row)
    q.retries = 0
    q.rnr_retries = 0
    q.send_psn = (q.send_psn + 1) & PSN_MASK
    p.expect_psn = (p.expect_psn + 1) & PSN_MASK
    counters_at(nic_at(nic).counters).port_xmit_data += nbytes
    complete_send(nic, row, index, opcode, ce, nbytes)
    q.sq_ci = index + blocks
    q.sq_next = q.sq_ci


@device_function
def execute_next(nic, row):
    """Execute or send the WQE at `sq_next`: 1, or 0 if the QP has to wait."""
    q = qp_row_at(row)
    index = q.sq_next
    wqe = wqe_slot(row, index)
    if not _is_there(wqe, index, q.qpn):
        _await_wqe(wqe, index, q.qpn)
    word = be32(ld32(wqe))
    opcode = word & 0xFF
    qpn_ds = be32(ld32(wqe + CTRL_SEG.qpn_ds))
    ds = qpn_ds & 0x3F
    blocks = (ds + 3) >> 2
    ce = ce_of(wqe)
    reason = 0
    if (word >> WQE_IDX_SHIFT) & PI_MASK != index & PI_MASK or qpn_ds == 0:
        explain(nic, 0, 0, 0, (word >> WQE_IDX_SHIFT) & PI_MASK, qpn_ds >> 8)
        reason = _STALE
    elif qpn_ds >> 8 != q.qpn:
        explain(nic, 0, 0, 0, qpn_ds >> 8, 0)
        reason = _WRONG_QPN
    elif ds == 0 or index + blocks > q.sq_pi:
        explain(nic, 0, 0, 0, ds, 0)
        reason = _MALFORMED
    if reason != 0:
        return _local_failure(nic, row, index, opcode, ce, reason, 1)
    if opcode == _NOP:
        if q.outstanding:
            return 0
        complete_send(nic, row, index, opcode, ce, 0)
        q.sq_ci = index + blocks
        q.sq_next = q.sq_ci
        return 1
    if q.wire != 0:
        return _send(nic, row, wqe, opcode, ds, index, blocks, ce)
    if opcode == _WRITE:
        nbytes = _plain_write(nic, row, wqe, ds)
        if nbytes >= 0:
            _succeed(nic, row, index, blocks, opcode, ce, nbytes)
            return 1
    message = nic_at(nic).message
    wqe = _in_one_piece(row, message, wqe, index, blocks)
    reason = _build(nic, row, message, wqe, opcode, ds, index)
    if reason != 0:
        return _local_failure(nic, row, index, opcode, ce, reason, blocks)
    peer = q.remote_row
    if peer == 0 or not _peer_ready(row, peer):
        reason = _NO_RESPONSE
    else:
        reason = respond(nic, peer, message)
    if reason != 0:
        if refused(nic, row, index, opcode, ce, reason, qp_row_at(peer).min_rnr if peer else 0):
            return 0
        q.sq_ci = index + blocks
        q.sq_next = q.sq_ci
    else:
        _succeed(nic, row, index, blocks, opcode, ce, message_at(message).nbytes)
    return 1


@engine_function
def _send(nic, row, wqe, opcode, ds, index, blocks, ce):
    """Put the WQE on the wire: 1, or 0 if the QP has to wait for room, for a quiet moment, or for its peer."""
    q = qp_row_at(row)
    end = wire_end_at(q.wire)
    if nic_at(nic).hold:
        return 0
    if end.peer_closed:
        if q.outstanding == 0 and not refused(nic, row, index, opcode, ce, _NO_RESPONSE, 0):
            q.sq_ci = index + blocks
            q.sq_next = q.sq_ci
            return 1
        return 0
    message = next_free(end.requests_out)
    if message == 0:
        return 0
    wqe = _in_one_piece(row, message, wqe, index, blocks)
    reason = _build(nic, row, message, wqe, opcode, ds, index)
    if reason != 0:
        return _local_failure(nic, row, index, opcode, ce, reason, blocks)
    counters_at(nic_at(nic).counters).port_xmit_data += message_at(message).nbytes
    message_at(message).psn = q.send_psn
    q.send_psn = (q.send_psn + 1) & PSN_MASK
    publish(end.requests_out)
    q.outstanding += 1
    q.sq_next = index + blocks
    return 1


# --- one QP --------------------------------------------------------------------------------------------------------


@engine_function
def serve_qp(nic, row):
    """Execute what the QP's doorbell announced, up to the engine's budget: the number of WQEs."""
    q = qp_row_at(row)
    poll_doorbell(nic, row)
    if q.state == ERR:
        return _flush(nic, row)
    if q.sq_next == q.sq_pi or q.state != RTS:
        return 0
    n = nic_at(nic)
    n.now = clock_ns()
    if q.retry_at != 0:
        if q.outstanding or n.now < q.retry_at:
            return 0
        q.retry_at = 0
    done = 0
    budget = n.budget
    if n.pause_at >= 0:
        budget = min(budget, n.pause_at - counters_at(n.counters).sq_wqes)
    while q.sq_next != q.sq_pi and done < budget and q.state == RTS:
        if execute_next(nic, row) == 0:
            break
        done += 1
    counters_at(n.counters).sq_wqes += done
    return done


@engine_function
def _flush(nic, row):
    q = qp_row_at(row)
    done = flush_receives(nic, row)
    while q.sq_ci != q.sq_pi:
        if _flush_one(nic, row) == 0:
            break
        done += 1
    return done
