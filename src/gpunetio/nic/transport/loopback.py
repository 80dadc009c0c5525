"""Requests to a QP of the same NIC: executed at once, in one piece, without packets."""

from __future__ import annotations

from ...enums import Access
from ...formats.commands import QpState, ServiceType
from ...formats.wqe import DATA_SEG, RADDR_SEG, SEGMENT, WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, fence_sys, ld32, ld64
from ..memory.copies import copy_payload
from ..memory.keys import find
from ..memory.streams import DEVICE_SHIFT, on_gpu
from ..queues.completion import fail_send
from ..queues.local import copy_some, execute_local
from ..queues.operations import is_local
from ..queues.psn import on_wire
from ..queues.sent import complete_send
from ..queues.wqes import (
    NOT_YET, build, check_wqe, in_one_piece, local_failure, read_control, wqe_slot,
)  # fmt: skip
from ..state import refuse
from ..state.counters import counters_at
from ..state.message import message_at
from ..state.qp import qp_row_at
from ..state.reasons import Reason
from ..state.worker import worker_at
from .execution import respond
from .moving import begin, count_packets, finish, may_follow


ENDLESS_RNR = 7  # rnr_retry 7 means for ever (IBTA 9.7.5.2.8)
ENDLESS_NS = 1_000_000  # between retries of a QP that never gives up


@device_function
def peer_ready(row, peer):
    """Return whether the QP at `peer` is connected to the QP at `row`, receives, and expects this message."""
    q = qp_row_at(row)
    p = qp_row_at(peer)
    return (
        p.qpn == q.remote_qpn
        and p.remote_qpn == q.qpn
        and p.service == q.service
        and p.wire == 0
        and (p.state == QpState.RTR or p.state == QpState.RTS)
        and (p.expect_psn == on_wire(q.tx_psn) or q.service != ServiceType.RC)
    )


@engine_function
def _refused(nic, row, index, opcode, ce, reason, rnr_ns):
    """Handle the responder's refusal. Return 1 if the WQE is tried again later, 0 if it has failed."""
    q = qp_row_at(row)
    n = worker_at(nic)
    counters = counters_at(n.counters)
    if reason == Reason.RNR:
        counters.rnr_nak_retry_err += 1
        if q.rnr_retries < q.rnr_retry or q.rnr_retry == ENDLESS_RNR:
            q.rnr_retries += 1
            q.retry_at = n.now + rnr_ns
            return 1
        q.rnr_retries = 0
        refuse.receiver_not_ready(nic, q.rnr_retry)
    elif reason == Reason.NO_RESPONSE:
        counters.local_ack_timeout_err += 1
        q.retries += 1
        q.retry_at = n.now + (q.timeout_ns if q.timeout_ns != 0 else ENDLESS_NS)
        return 1
    fail_send(nic, row, index, opcode, ce, reason)
    return 0


@engine_function
def _give_up(nic, row):
    """Fail the WQE at `sq_next`: the peer has not answered it, and the time of its last retry is over (9.7.6.1.3)."""
    q = qp_row_at(row)
    index = q.sq_next
    control = read_control(wqe_slot(row, index))
    q.retries = 0
    fail_send(nic, row, index, control.opcode, control.ce, refuse.no_response(nic, q.remote_qpn, q.retry_cnt))
    _consume(row, index, control.blocks)


@device_function
def _plain_write(nic, row, wqe, ds):
    """Execute the most common request without a message: an RDMA WRITE of one segment to a QP of the same NIC.

    Return its bytes, or -1 if it is another request or any check fails. Nothing has happened then, and the general path
    finds out why. Building the message would cost 40 % of the rate.
    """
    q = qp_row_at(row)
    nbytes = be32(ld32(wqe + 2 * SEGMENT + DATA_SEG.byte_count))
    peer = q.remote_row
    if ds != 3 or nbytes == 0 or nbytes > q.msg_max or peer == 0 or not peer_ready(row, peer):
        return -1
    p = qp_row_at(peer)
    if nbytes > p.msg_max or p.state == QpState.RTR:  # in RTR the first request is an event
        return -1
    lkey = be32(ld32(wqe + 2 * SEGMENT + DATA_SEG.lkey))
    source = find(nic, lkey, q.pdn, be64(ld64(wqe + 2 * SEGMENT + DATA_SEG.addr)), nbytes, 0)
    rkey = be32(ld32(wqe + SEGMENT + RADDR_SEG.rkey))
    target = find(nic, rkey, p.pdn, be64(ld64(wqe + SEGMENT + RADDR_SEG.raddr)), nbytes, Access.REMOTE_WRITE)
    # The upper bits are set if an address was refused (-1) or is in device memory, which needs a DMA stream.
    if (source | target) >> DEVICE_SHIFT != 0 or p.rights & Access.REMOTE_WRITE == 0:
        return -1
    copy_payload(nic, target, source, nbytes)
    counters = counters_at(worker_at(nic).counters)
    counters.rdma_rx_bytes += nbytes
    counters.rx_write_requests += 1
    return nbytes


@device_function
def _consume(row, index, blocks):
    q = qp_row_at(row)
    q.sq_ci = index + blocks
    q.sq_next = q.sq_ci


@device_function
def _succeed(nic, row, index, blocks, opcode, ce, nbytes):
    """Complete a request that the peer, a QP of the same NIC, has executed."""
    q = qp_row_at(row)
    q.retries = 0
    q.rnr_retries = 0
    count_packets(row, q.remote_row, nbytes)
    counters_at(worker_at(nic).counters).rdma_tx_bytes += nbytes
    complete_send(nic, row, index, opcode, ce, nbytes)
    _consume(row, index, blocks)


@engine_function
def _execute_message(nic, row, wqe, index, blocks, opcode, ce, ds):
    """Have the peer execute a WQE. Return what `execute_next` does."""
    q = qp_row_at(row)
    message = worker_at(nic).message
    wqe = in_one_piece(row, message, wqe, index, blocks)
    reason = build(nic, row, message, wqe, opcode, ds, index)
    if reason != 0:
        return local_failure(nic, row, index, opcode, ce, reason, blocks)
    n = worker_at(nic)
    n.touched, n.landed = 0, 0
    peer = q.remote_row
    reason = Reason.NO_RESPONSE
    if peer != 0 and peer_ready(row, peer):
        reason = respond(nic, peer, message)
    nbytes = message_at(message).nbytes
    if reason != 0 and q.sq_ci != index:
        return 0  # it fails after the requests in flight
    if reason == 0 and n.touched != 0:
        begin(nic, row, index, blocks, opcode, ce, nbytes)
        return 0
    if reason == 0:
        _succeed(nic, row, index, blocks, opcode, ce, nbytes)
    elif q.service != ServiceType.RC:  # lost, and the sender is not told
        count_packets(row, 0, nbytes)
        complete_send(nic, row, index, opcode, ce, nbytes)
        _consume(row, index, blocks)
    elif _refused(nic, row, index, opcode, ce, reason, qp_row_at(peer).min_rnr if peer else 0):
        return 0
    else:
        _consume(row, index, blocks)
    return 1


@device_function
def execute_next(nic, row):
    """Execute the WQE at `sq_next`. Return 1, or 0 if the QP has to wait, maybe for this WQE, which has then begun."""
    if on_gpu():
        fence_sys()  # between the bytes of this request and those before it, which a CPU keeps in order by itself
    q = qp_row_at(row)
    index = q.sq_next
    reason = check_wqe(nic, row, index)
    if reason == NOT_YET:
        return 0
    wqe = wqe_slot(row, index)
    control = read_control(wqe)
    opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
    if reason != 0:
        return local_failure(nic, row, index, opcode, ce, reason, 1)
    if opcode == WqeOpcode.RDMA_WRITE:
        nbytes = _plain_write(nic, row, wqe, ds)
        if nbytes >= 0:
            _succeed(nic, row, index, blocks, opcode, ce, nbytes)
            return 1
    if is_local(opcode):
        n = worker_at(nic)
        n.touched, n.landed = 0, 0
        done = execute_local(nic, row, wqe, opcode, ds, index)
        if done == 0:
            return 0
        if done < 0:
            return local_failure(nic, row, index, opcode, ce, -done, blocks)
        if n.touched != 0:
            begin(nic, row, index, blocks, opcode, ce, message_at(n.message).nbytes)
            return 0
        complete_send(nic, row, index, opcode, ce, 0)
        _consume(row, index, blocks)
        return 1
    return _execute_message(nic, row, wqe, index, blocks, opcode, ce, ds)


@engine_function
def _begin_copy(nic, row, index, ce):
    """Begin the MMO at `index`, which `may_follow` has checked. One that is refused fails after those in flight."""
    n = worker_at(nic)
    n.touched, n.landed = 0, 0
    if copy_some(nic, row) > 0:
        begin(nic, row, index, 1, WqeOpcode.MMO, ce, message_at(n.message).nbytes)


@engine_function
def _begin_behind(nic, row, budget):
    """Begin the requests that may follow those in flight. Return how many."""
    q = qp_row_at(row)
    begun = 0
    while q.stream != 0 and q.sq_next != q.sq_pi and begun < budget and q.state == QpState.RTS:
        index = q.sq_next
        peer = q.remote_row
        if peer == 0 or not peer_ready(row, peer) or not may_follow(nic, row):
            break
        wqe = wqe_slot(row, index)
        control = read_control(wqe)
        if control.opcode == WqeOpcode.MMO:
            _begin_copy(nic, row, index, control.ce)
        else:
            _execute_message(nic, row, wqe, index, control.blocks, control.opcode, control.ce, control.ds)
        if q.sq_next == index:
            break
        begun += 1
    return begun


@engine_function
def serve(nic, row, budget):
    """Execute or begin up to `budget` WQEs, and complete those whose bytes are in place. Return how many in all."""
    q = qp_row_at(row)
    if q.retry_at != 0:
        if worker_at(nic).now < q.retry_at:
            return 0
        q.retry_at = 0
        if q.retries > q.retry_cnt and q.timeout_ns != 0:  # ack_timeout 0: never give up
            _give_up(nic, row)
            return 1
    begun = 0
    finished = 0
    if q.stream != 0:
        finished = finish(nic, row)
        begun = _begin_behind(nic, row, budget)
    if q.stream == 0:
        while q.sq_next != q.sq_pi and begun < budget and q.state == QpState.RTS:
            if execute_next(nic, row) == 0:
                break
            begun += 1
        if q.stream != 0:
            begun += 1  # the last one, which is in flight
        if q.copied != 0:
            finished += 1  # part of a long copy
    q.sq_sent = q.sq_next
    counters_at(worker_at(nic).counters).sq_wqes += begun
    return begun + finished
