"""Requests to a QP of the same NIC: executed at once, in one piece, without packets."""

from __future__ import annotations

from ...enums import Access
from ...formats.commands import QpState, ServiceType
from ...formats.wqe import DATA_SEG, RADDR_SEG, SEGMENT, WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, fence_sys, ld32, ld64
from ..memory.copies import copy_payload
from ..memory.keys import find, key_row
from ..memory.streams import DEVICE_SHIFT, on_gpu
from ..queues.completion import fail_send
from ..queues.local import copy_next_part, execute_local
from ..queues.operations import is_local
from ..queues.psn import on_wire
from ..queues.send_completion import complete_send
from ..queues.wqes import NOT_YET, build_message, check_wqe, in_one_piece, local_failure, read_control, wqe_slot
from ..state import refuse
from ..state.counters import CounterSet
from ..state.message import Message
from ..state.qp import QpRow
from ..state.reasons import Reason
from ..state.worker import WorkerState
from .execution import respond
from .moving import begin, count_packets, finish, may_follow
from .peer_memory import peer_range


ENDLESS_RNR = 7  # rnr_retry 7 means for ever (IBTA 9.7.5.2.8)
ENDLESS_NS = 1_000_000  # between retries of a QP that never gives up


@device_function
def peer_ready(qp: QpRow, p: QpRow) -> bool:
    """Return whether the QP at `p` is connected to the QP at `qp`, receives, and expects this message."""
    return (
        p.qpn == qp.remote_qpn
        and p.remote_qpn == qp.qpn
        and p.service == qp.service
        and p.wire == 0
        and (p.state == QpState.RTR or p.state == QpState.RTS)
        and (p.expect_psn == on_wire(qp.tx_psn) or qp.service != ServiceType.RC)
    )


@engine_function
def _refused(worker: WorkerState, qp: QpRow, index: int, opcode: int, ce: int, reason: int, rnr_ns: int) -> int:
    """Handle the responder's refusal. Return 1 if the WQE is tried again later, 0 if it has failed."""
    counters = CounterSet(worker.counters)
    if reason == Reason.RNR:
        counters.rnr_nak_retry_err += 1
        if qp.rnr_retries < qp.rnr_retry or qp.rnr_retry == ENDLESS_RNR:
            qp.rnr_retries += 1
            qp.retry_at = worker.now + rnr_ns
            return 1
        qp.rnr_retries = 0
        refuse.receiver_not_ready(worker, qp.rnr_retry)
    elif reason == Reason.NO_RESPONSE:
        counters.local_ack_timeout_err += 1
        qp.retries += 1
        qp.retry_at = worker.now + (qp.timeout_ns if qp.timeout_ns != 0 else ENDLESS_NS)
        return 1
    fail_send(worker, qp, index, opcode, ce, reason)
    return 0


@engine_function
def _give_up(worker: WorkerState, qp: QpRow) -> None:
    """Fail the WQE at `sq_next`: the peer has not answered it, and the time of its last retry is over (9.7.6.1.3)."""
    index = qp.sq_next
    control = read_control(wqe_slot(qp, index))
    qp.retries = 0
    fail_send(worker, qp, index, control.opcode, control.ce, refuse.no_response(worker, qp.remote_qpn, qp.retry_cnt))
    _consume(qp, index, control.blocks)


@device_function
def _plain_write(worker: WorkerState, qp: QpRow, wqe: int, ds: int) -> int:
    """Execute the most common request without a message: an RDMA WRITE of one segment to a QP of the same NIC.

    Return its bytes, or -1 if it is another request or any check fails. Nothing has happened then, and the general path
    finds out why. Building the message would cost 40 % of the rate.
    """
    nbytes = be32(ld32(wqe + 2 * SEGMENT + DATA_SEG.byte_count))
    peer = QpRow(qp.remote_row)
    if ds != 3 or nbytes == 0 or nbytes > qp.msg_max or peer == 0 or not peer_ready(qp, peer):
        return -1
    if peer.state == QpState.RTR:  # in RTR the first request is an event
        return -1
    lkey = be32(ld32(wqe + 2 * SEGMENT + DATA_SEG.lkey))
    source = find(worker, lkey, qp.pdn, be64(ld64(wqe + 2 * SEGMENT + DATA_SEG.addr)), nbytes, 0)
    rkey, raddr = be32(ld32(wqe + SEGMENT + RADDR_SEG.rkey)), be64(ld64(wqe + SEGMENT + RADDR_SEG.raddr))
    far = key_row(worker.mkeys, worker.mkey_mask, rkey)
    target = peer_range(far, rkey, peer.pdn, peer.rights, peer.msg_max, raddr, nbytes, Access.REMOTE_WRITE)
    # The upper bits are set if an address was refused (-1) or is in device memory, which needs a DMA stream.
    if (source | target) >> DEVICE_SHIFT != 0:
        return -1
    copy_payload(worker, target, source, nbytes)
    counters = CounterSet(worker.counters)
    counters.rdma_rx_bytes += nbytes
    counters.rx_write_requests += 1
    return nbytes


@device_function
def _consume(qp: QpRow, index: int, blocks: int) -> None:
    qp.sq_ci = index + blocks
    qp.sq_next = qp.sq_ci


@device_function
def _succeed(worker: WorkerState, qp: QpRow, index: int, blocks: int, opcode: int, ce: int, nbytes: int) -> None:
    """Complete a request that the peer, a QP of the same NIC, has executed."""
    qp.retries = 0
    qp.rnr_retries = 0
    count_packets(qp, QpRow(qp.remote_row), nbytes)
    CounterSet(worker.counters).rdma_tx_bytes += nbytes
    complete_send(worker, qp, index, opcode, ce, nbytes)
    _consume(qp, index, blocks)


@engine_function
def _execute_message(
    worker: WorkerState, qp: QpRow, wqe: int, index: int, blocks: int, opcode: int, ce: int, ds: int
) -> int:
    """Have the peer execute a WQE. Return what `execute_next` does."""
    message = Message(worker.message)
    wqe = in_one_piece(qp, message, wqe, index, blocks)
    reason = build_message(worker, qp, message, wqe, opcode, ds, index)
    if reason != 0:
        return local_failure(worker, qp, index, opcode, ce, reason, blocks)
    worker.touched, worker.landed = 0, 0
    peer = QpRow(qp.remote_row)
    reason = Reason.NO_RESPONSE
    if peer != 0 and peer_ready(qp, peer):
        reason = respond(worker, peer, message)
    nbytes = message.nbytes
    if reason != 0 and qp.sq_ci != index:
        return 0  # it fails after the requests in flight
    if reason == 0 and worker.touched != 0:
        begin(worker, qp, index, blocks, opcode, ce, nbytes)
        return 0
    if reason == 0:
        _succeed(worker, qp, index, blocks, opcode, ce, nbytes)
    elif qp.service != ServiceType.RC:  # lost, and the sender is not told
        count_packets(qp, 0, nbytes)
        complete_send(worker, qp, index, opcode, ce, nbytes)
        _consume(qp, index, blocks)
    elif _refused(worker, qp, index, opcode, ce, reason, peer.min_rnr if peer else 0):
        return 0
    else:
        _consume(qp, index, blocks)
    return 1


@device_function
def execute_next(worker: WorkerState, qp: QpRow) -> int:
    """Execute the WQE at `sq_next`. Return 1, or 0 if the QP has to wait, maybe for this WQE, which has then begun."""
    if on_gpu():
        fence_sys()  # between the bytes of this request and those before it, which a CPU keeps in order by itself
    index = qp.sq_next
    reason = check_wqe(worker, qp, index)
    if reason == NOT_YET:
        return 0
    wqe = wqe_slot(qp, index)
    control = read_control(wqe)
    opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
    if reason != 0:
        return local_failure(worker, qp, index, opcode, ce, reason, 1)
    if opcode == WqeOpcode.RDMA_WRITE:
        nbytes = _plain_write(worker, qp, wqe, ds)
        if nbytes >= 0:
            _succeed(worker, qp, index, blocks, opcode, ce, nbytes)
            return 1
    if is_local(opcode):
        worker.touched, worker.landed = 0, 0
        done = execute_local(worker, qp, wqe, opcode, ds, index)
        if done == 0:
            return 0
        if done < 0:
            return local_failure(worker, qp, index, opcode, ce, -done, blocks)
        if worker.touched != 0:
            begin(worker, qp, index, blocks, opcode, ce, Message(worker.message).nbytes)
            return 0
        complete_send(worker, qp, index, opcode, ce, 0)
        _consume(qp, index, blocks)
        return 1
    return _execute_message(worker, qp, wqe, index, blocks, opcode, ce, ds)


@engine_function
def _begin_copy(worker: WorkerState, qp: QpRow, index: int, ce: int) -> None:
    """Begin the MMO at `index`, which `may_follow` has checked. One that is refused fails after those in flight."""
    worker.touched, worker.landed = 0, 0
    if copy_next_part(worker, qp) > 0:
        begin(worker, qp, index, 1, WqeOpcode.MMO, ce, Message(worker.message).nbytes)


@engine_function
def _begin_behind(worker: WorkerState, qp: QpRow, budget: int) -> int:
    """Begin the requests that may follow those in flight. Return how many."""
    begun = 0
    while qp.stream != 0 and qp.sq_next != qp.sq_pi and begun < budget and qp.state == QpState.RTS:
        index = qp.sq_next
        peer = QpRow(qp.remote_row)
        if peer == 0 or not peer_ready(qp, peer) or not may_follow(worker, qp):
            break
        wqe = wqe_slot(qp, index)
        control = read_control(wqe)
        if control.opcode == WqeOpcode.MMO:
            _begin_copy(worker, qp, index, control.ce)
        else:
            _execute_message(worker, qp, wqe, index, control.blocks, control.opcode, control.ce, control.ds)
        if qp.sq_next == index:
            break
        begun += 1
    return begun


@engine_function
def serve(worker: WorkerState, qp: QpRow, budget: int) -> int:
    """Execute or begin up to `budget` WQEs, and complete those whose bytes are in place. Return how many in all."""
    if qp.retry_at != 0:
        if worker.now < qp.retry_at:
            return 0
        qp.retry_at = 0
        if qp.retries > qp.retry_cnt and qp.timeout_ns != 0:  # ack_timeout 0: never give up
            _give_up(worker, qp)
            return 1
    begun = 0
    finished = 0
    if qp.stream != 0:
        finished = finish(worker, qp)
        begun = _begin_behind(worker, qp, budget)
    if qp.stream == 0:
        while qp.sq_next != qp.sq_pi and begun < budget and qp.state == QpState.RTS:
            if execute_next(worker, qp) == 0:
                break
            begun += 1
        if qp.stream != 0:
            begun += 1  # the last one, which is in flight
        if qp.copied != 0:
            finished += 1  # part of a long copy
    qp.sq_sent = qp.sq_next
    CounterSet(worker.counters).sq_wqes += begun
    return begun + finished
