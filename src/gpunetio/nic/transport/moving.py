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
from ..memory.streams import copy_failed, copy_status, device_of, is_pinned, on_gpu, stream_of
from ..queues.completion import fail_send
from ..queues.local import check_copy, source_of, target_of
from ..queues.operations import is_atomic, is_local, receive_cqe, returns_data, right_of
from ..queues.psn import on_wire, packets_of
from ..queues.send_completion import complete_send
from ..queues.wqes import build_message, check_wqe, in_one_piece, read_control, wqe_slot
from ..state.counters import CounterSet
from ..state.dma_stream import DmaStream
from ..state.message import MESSAGE, Message
from ..state.qp import QpRow, flight_of
from ..state.worker import WorkerState
from .execution import complete_receive

MOST_MOVING = 64 << 20  # bytes in flight by one stream, beyond which nothing begins: commands wait for them


@device_function
def count_packets(qp: QpRow, p: QpRow, nbytes: int) -> None:
    """Count a request of `nbytes` that was executed: PSNs count the packets that it would have taken (IBTA 9.7.2)."""
    qp.ssn += 1
    qp.tx_psn += packets_of(nbytes, qp.mtu)
    if p != 0:
        p.expect_psn = on_wire(qp.tx_psn)
        p.msn += 1


# --- beginning -----------------------------------------------------------------------------------------------------


@device_function
def _fits(worker: WorkerState, qp: QpRow, target: int, source: int, nbytes: int) -> bool:
    """Return whether a copy is for the stream that works for the QP, and takes effect after those before it."""
    number = device_of(target) if device_of(target) != 0 else device_of(source)
    if number == 0 or stream_of(worker, number) != qp.stream:
        return False
    landing = 0
    if device_of(target) == 0 and not is_pinned(worker, DmaStream(qp.stream), target, nbytes):
        landing = 1
    return landing == qp.landing


@engine_function
def may_follow(worker: WorkerState, qp: QpRow) -> bool:
    """Return whether the WQE at `sq_next` may begin while those before it are in flight."""
    if on_gpu():
        return False
    index = qp.sq_next
    if DmaStream(qp.stream).issued - DmaStream(qp.stream).done >= MOST_MOVING or check_wqe(worker, qp, index) != 0:
        return False
    wqe = wqe_slot(qp, index)
    control = read_control(wqe)
    opcode = control.opcode
    if opcode == WqeOpcode.MMO:
        if control.fenced or check_copy(worker, qp, wqe, control.ds) != 0:
            return False
        return _fits(worker, qp, target_of(worker.message), source_of(worker.message), Message(worker.message).nbytes)
    right = right_of(opcode)
    if right == 0 or is_atomic(opcode) or receive_cqe(opcode) != 0 or control.fenced:
        return False
    message = Message(worker.message)
    wqe = in_one_piece(qp, message, wqe, index, control.blocks)
    if build_message(worker, qp, message, wqe, opcode, control.ds, index) != 0:
        return False
    peer = QpRow(qp.remote_row)
    there = find(worker, message.rkey, peer.pdn, message.raddr, message.nbytes, right)
    if message.nbytes == 0 or message.nbytes > peer.msg_max or there < 0 or peer.rights & right != right:
        return False
    segment = message + MESSAGE.segments
    for _ in range(message.nsegments):
        here, nbytes = ld64(segment), ld64(segment + 8)
        to, from_ = (here, there) if returns_data(opcode) else (there, here)
        if not _fits(worker, qp, to, from_, nbytes):
            return False
        there += nbytes
        segment += 16
    return True


@engine_function
def begin(worker: WorkerState, qp: QpRow, index: int, blocks: int, opcode: int, ce: int, nbytes: int) -> None:
    """Note a request whose bytes are in flight. It completes when they are in place."""
    if on_gpu():
        return
    if qp.stream == 0:
        qp.stream, qp.failures, qp.landing = worker.touched, worker.failures, worker.landed
    qp.fence = DmaStream(worker.touched).issued
    flight = flight_of(qp, index)
    flight.opcode, flight.ce, flight.nbytes, flight.blocks, flight.fence = opcode, ce, nbytes, blocks, qp.fence
    qp.sq_next = index + blocks


# --- completing ----------------------------------------------------------------------------------------------------


@engine_function
def _arrive(worker: WorkerState, qp: QpRow, opcode: int, nbytes: int) -> int:
    """Complete the peer's receive if the request takes one. Return 0, a reason, or -1 if it no longer receives."""
    if on_gpu():
        return 0
    peer = QpRow(qp.remote_row)
    kind = receive_cqe(opcode)
    if kind == 0:
        return 0
    if peer.qpn != qp.remote_qpn or (peer.state != QpState.RTR and peer.state != QpState.RTS):
        return -1
    control = read_control(wqe_slot(qp, qp.sq_ci))
    return complete_receive(worker, peer, kind, nbytes, control.imm, opcode, control.solicited, 0)


@engine_function
def finish(worker: WorkerState, qp: QpRow) -> int:
    """Complete the requests whose bytes are in place, in order. Return how many. `stream` is 0 when none is left."""
    if on_gpu():
        return 0
    done = 0
    while qp.sq_ci != qp.sq_next:
        index = qp.sq_ci
        flight = flight_of(qp, index)
        state = copy_status(DmaStream(qp.stream), flight.fence, qp.failures)
        if state == 0:
            return done
        if state > 0:
            reason = _arrive(worker, qp, flight.opcode, flight.nbytes)
        else:
            reason = copy_failed(worker, DmaStream(qp.stream), 0, flight.nbytes)
        if reason < 0:  # the peer has not seen it: it is tried again, as any request to a peer that does not answer
            qp.sq_next = index
            break
        done += 1
        qp.sq_ci = index + flight.blocks
        if reason != 0:
            qp.sq_next = qp.sq_ci  # requests begun after it are flushed
            qp.sq_sent = qp.sq_ci
            fail_send(worker, qp, index, flight.opcode, flight.ce, reason)
            break
        if is_local(flight.opcode):
            complete_send(worker, qp, index, flight.opcode, flight.ce, 0)
            continue
        qp.retries = 0
        qp.rnr_retries = 0
        count_packets(qp, QpRow(qp.remote_row), flight.nbytes)
        CounterSet(worker.counters).rdma_tx_bytes += flight.nbytes
        complete_send(worker, qp, index, flight.opcode, flight.ce, flight.nbytes)
    qp.stream = 0
    return done


@engine_function
def is_still(worker: WorkerState, qp: QpRow) -> int:
    """Return whether nothing is in flight for a QP in ERR, neither for its requests nor into its receives."""
    if on_gpu():
        return True
    if qp.wire != 0:
        # The responses owed to the peer depend on how the copies ended.
        if qp.stream != 0 and qp.pending == 0 and copy_status(DmaStream(qp.stream), qp.fence, qp.failures) != 0:
            qp.stream = 0
        return qp.stream == 0 and free_slots(worker, qp)
    if qp.stream != 0:
        finish(worker, qp)
    if qp.stream != 0:
        return False
    peer = QpRow(qp.remote_row)
    return peer == 0 or peer == qp or peer.stream == 0 or peer.remote_row != qp
