"""Requests and copies inside one NIC by a DMA stream: they begin one after another, and complete with their bytes.

From `sq_ci` on, each such request has a FLIGHT, with the position at which its bytes are in place. Only requests that
do nothing but copy, by the same stream and with effects in the same order, begin while one is in flight. Everything
else waits until all are complete. So a request that was posted later never takes effect earlier.
"""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64
from ..memory.keys import find
from ..memory.staging import free_slots
from ..memory.streams import copy_failed, ended, device_of, is_pinned, stream_of, on_gpu
from ..queues.completion import fail_send
from ..queues.local import check_copy, source_of, target_of
from ..queues.operations import is_atomic, is_local, receive_cqe, returns_data, right_of
from ..queues.psn import on_wire, packets_of
from ..queues.sent import complete_send
from ..queues.wqes import build, check_wqe, in_one_piece, read_control, wqe_slot
from ..state.counters import counters_at
from ..state.dma_stream import dma_stream_at
from ..state.message import MESSAGE, message_at
from ..state.qp import flight_at, flight_of, qp_row_at
from ..state.worker import worker_at
from .execution import complete_receive

MOST_MOVING = 64 << 20  # bytes in flight by one stream, beyond which nothing begins: commands wait for them


@device_function
def count_packets(row, peer, nbytes):
    """Count a request of `nbytes` that was executed: PSNs count the packets that it would have taken (IBTA 9.7.2)."""
    q = qp_row_at(row)
    q.ssn += 1
    q.tx_psn += packets_of(nbytes, q.mtu)
    if peer != 0:
        p = qp_row_at(peer)
        p.expect_psn = on_wire(q.tx_psn)
        p.msn += 1


# --- beginning -----------------------------------------------------------------------------------------------------


@device_function
def _fits(nic, row, target, source, nbytes):
    """Return whether a copy is for the stream that works for the QP, and takes effect after those before it."""
    q = qp_row_at(row)
    number = device_of(target) if device_of(target) != 0 else device_of(source)
    if number == 0 or stream_of(nic, number) != q.stream:
        return False
    landing = 0
    if device_of(target) == 0 and not is_pinned(nic, q.stream, target, nbytes):
        landing = 1
    return landing == q.landing


@engine_function
def may_follow(nic, row):
    """Return whether the WQE at `sq_next` may begin while those before it are in flight."""
    if on_gpu():
        return False
    n = worker_at(nic)
    q = qp_row_at(row)
    index = q.sq_next
    if dma_stream_at(q.stream).issued - dma_stream_at(q.stream).done >= MOST_MOVING or check_wqe(nic, row, index) != 0:
        return False
    wqe = wqe_slot(row, index)
    control = read_control(wqe)
    opcode = control.opcode
    if opcode == WqeOpcode.MMO:
        if control.fenced or check_copy(nic, row, wqe, control.ds) != 0:
            return False
        return _fits(nic, row, target_of(n.message), source_of(n.message), message_at(n.message).nbytes)
    right = right_of(opcode)
    if right == 0 or is_atomic(opcode) or receive_cqe(opcode) != 0 or control.fenced:
        return False
    message = n.message
    wqe = in_one_piece(row, message, wqe, index, control.blocks)
    if build(nic, row, message, wqe, opcode, control.ds, index) != 0:
        return False
    m = message_at(message)
    peer = qp_row_at(q.remote_row)
    there = find(nic, m.rkey, peer.pdn, m.raddr, m.nbytes, right)
    if m.nbytes == 0 or m.nbytes > peer.msg_max or there < 0 or peer.rights & right != right:
        return False
    segment = message + MESSAGE.segments
    for _ in range(m.nsegments):
        here, nbytes = ld64(segment), ld64(segment + 8)
        to, from_ = (here, there) if returns_data(opcode) else (there, here)
        if not _fits(nic, row, to, from_, nbytes):
            return False
        there += nbytes
        segment += 16
    return True


@engine_function
def begin(nic, row, index, blocks, opcode, ce, nbytes):
    """Note a request whose bytes are in flight. It completes when they are in place."""
    if on_gpu():
        return
    n = worker_at(nic)
    q = qp_row_at(row)
    if q.stream == 0:
        q.stream, q.failures, q.landing = n.touched, n.failures, n.landed
    q.fence = dma_stream_at(n.touched).issued
    f = flight_at(flight_of(row, index))
    f.opcode, f.ce, f.nbytes, f.blocks, f.fence = opcode, ce, nbytes, blocks, q.fence
    q.sq_next = index + blocks


# --- completing ----------------------------------------------------------------------------------------------------


@engine_function
def _arrive(nic, row, opcode, nbytes):
    """Complete the peer's receive if the request takes one. Return 0, a reason, or -1 if it no longer receives."""
    if on_gpu():
        return 0
    q = qp_row_at(row)
    peer = q.remote_row
    kind = receive_cqe(opcode)
    if kind == 0:
        return 0
    p = qp_row_at(peer)
    if p.qpn != q.remote_qpn or (p.state != QpState.RTR and p.state != QpState.RTS):
        return -1
    control = read_control(wqe_slot(row, q.sq_ci))
    return complete_receive(nic, peer, kind, nbytes, control.imm, opcode, control.solicited, 0)


@engine_function
def finish(nic, row):
    """Complete the requests whose bytes are in place, in order. Return how many. `stream` is 0 when none is left."""
    if on_gpu():
        return 0
    q = qp_row_at(row)
    done = 0
    while q.sq_ci != q.sq_next:
        index = q.sq_ci
        f = flight_at(flight_of(row, index))
        state = ended(q.stream, f.fence, q.failures)
        if state == 0:
            return done
        if state > 0:
            reason = _arrive(nic, row, f.opcode, f.nbytes)
        else:
            reason = copy_failed(nic, q.stream, 0, f.nbytes)
        if reason < 0:  # the peer has not seen it: it is tried again, as any request to a peer that does not answer
            q.sq_next = index
            break
        done += 1
        q.sq_ci = index + f.blocks
        if reason != 0:
            q.sq_next = q.sq_ci  # requests begun after it are flushed
            q.sq_sent = q.sq_ci
            fail_send(nic, row, index, f.opcode, f.ce, reason)
            break
        if is_local(f.opcode):
            complete_send(nic, row, index, f.opcode, f.ce, 0)
            continue
        q.retries = 0
        q.rnr_retries = 0
        count_packets(row, q.remote_row, f.nbytes)
        counters_at(worker_at(nic).counters).rdma_tx_bytes += f.nbytes
        complete_send(nic, row, index, f.opcode, f.ce, f.nbytes)
    q.stream = 0
    return done


@engine_function
def is_still(nic, row):
    """Return whether nothing is in flight for a QP in ERR, neither for its requests nor into its receives."""
    if on_gpu():
        return True
    q = qp_row_at(row)
    if q.wire != 0:
        # The responses owed to the peer depend on how the copies ended.
        if q.stream != 0 and q.pending == 0 and ended(q.stream, q.fence, q.failures) != 0:
            q.stream = 0
        return q.stream == 0 and free_slots(nic, row)
    if q.stream != 0:
        finish(nic, row)
    if q.stream != 0:
        return False
    peer = q.remote_row
    return peer == 0 or peer == row or qp_row_at(peer).stream == 0 or qp_row_at(peer).remote_row != row
