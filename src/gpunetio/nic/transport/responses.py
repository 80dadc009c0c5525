"""Responses at the requester: acknowledgements, NAKs, READ data, results of atomics (IBTA 9.7.5)."""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.packet import (
    ACK_KIND_SHIFT, ACK_VALUE_MASK, AETH, ATOMIC_ACK_ETH, BTH, SYNDROME_SHIFT, AckKind, NakCode, PacketOpcode,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, ld32, ld64, st64
from ..memory.streams import await_copies, write_payload
from ..queues.operations import is_atomic, returns_data
from ..queues.psn import unwrap
from ..queues.wqes import build_message, in_one_piece, wqe_slot
from ..state import refuse
from ..state.counters import CounterSet
from ..state.message import MESSAGE, Message
from ..state.qp import QpRow, flight_of
from ..state.reasons import Reason
from ..state.worker import WorkerState
from .requester import acknowledge, fail_oldest, fast_retransmit, read_end, retry, retry_gap, retry_rnr
from .rnr import rnr_delay_ns



@device_function
def is_response(operation: int) -> bool:
    """Return whether an RC operation is a response."""
    return operation > PacketOpcode.RC_READ_REQUEST and operation <= PacketOpcode.RC_ATOMIC_ACKNOWLEDGE


@engine_function
def take_response(worker: WorkerState, qp: QpRow, operation: int, psn24: int, bth: int, nbytes: int, pad: int) -> None:
    """Take a response for a QP in RTS. One that fits no request in flight is ignored (IBTA 9.7.5.1)."""
    counters = CounterSet(worker.counters)
    psn = unwrap(psn24, qp.una_psn)
    if psn < qp.una_psn or psn >= max(qp.tx_psn, qp.high_psn) or qp.retry_at != 0:
        counters.rx_unexpected += 1
        return
    at = bth + BTH.size
    left = nbytes - BTH.size
    syndrome = AckKind.ACK
    if operation != PacketOpcode.RC_READ_RESPONSE_MIDDLE:
        if left < AETH.size:
            counters.rx_malformed += 1
            return
        syndrome = be32(ld32(at + AETH.syndrome_msn)) >> SYNDROME_SHIFT
        at += AETH.size
        left -= AETH.size
    if operation == PacketOpcode.RC_ACKNOWLEDGE:
        _take_acknowledge(worker, qp, psn, syndrome)
        return
    # The response to a READ or atomic acknowledges the requests before it.
    implied = acknowledge(worker, qp, psn)
    if qp.sq_ci == qp.sq_sent or qp.state != QpState.RTS:
        counters.rx_unexpected += 1
        return
    flight = flight_of(qp, qp.sq_ci)
    if implied or psn != qp.una_psn:
        retry_gap(worker, qp)
    elif not returns_data(flight.opcode):
        _bad_response(worker, qp, left)
    elif operation == PacketOpcode.RC_ATOMIC_ACKNOWLEDGE:
        _take_atomic(worker, qp, at, left)
    else:
        _take_read(worker, qp, operation, psn, at, left - pad)


@engine_function
def _take_acknowledge(worker: WorkerState, qp: QpRow, psn: int, syndrome: int) -> None:
    counters = CounterSet(worker.counters)
    kind, value = syndrome >> ACK_KIND_SHIFT, syndrome & ACK_VALUE_MASK
    if kind == AckKind.ACK:
        if acknowledge(worker, qp, psn + 1):
            retry_gap(worker, qp)
        else:
            counters.rx_accepted += 1
        return
    if (
        acknowledge(worker, qp, psn) or qp.una_psn != psn or qp.state != QpState.RTS or kind == AckKind.RESERVED
        or (kind == AckKind.NAK and value > NakCode.REMOTE_OPERATION)
    ):
        # A NAK of no known kind, for something never sent, or behind an unanswered READ: leave it to the timer.
        counters.rx_unexpected += 1
        return
    counters.rx_accepted += 1
    if kind == AckKind.RNR_NAK:
        retry_rnr(worker, qp, rnr_delay_ns(value))
    elif value == NakCode.PSN_SEQUENCE:
        counters.packet_seq_err += 1
        retry(worker, qp)
        fast_retransmit(worker, qp)
    else:
        reason = Reason.NAK_REMOTE_OPERATION
        if value == NakCode.INVALID_REQUEST:
            reason = Reason.NAK_INVALID_REQUEST
        elif value == NakCode.REMOTE_ACCESS:
            reason = Reason.NAK_REMOTE_ACCESS
        fail_oldest(worker, qp, refuse.negative_acknowledgement(worker, reason, qp.remote_qpn, value))


@device_function
def _scatter_part(worker: WorkerState, qp: QpRow, offset: int, nbytes: int, source: int) -> int:
    """Copy `nbytes` at `source` to byte `offset` of the message's segments: return 0, or a reason."""
    message = worker.message
    segment = message + MESSAGE.segments
    while offset >= ld64(segment + 8) and nbytes > 0:
        offset -= ld64(segment + 8)
        segment += 16
    while nbytes > 0:
        part = min(nbytes, ld64(segment + 8) - offset)
        reason = write_payload(worker, qp, ld64(segment) + offset, source, part)
        if reason != 0:
            return reason
        source += part
        nbytes -= part
        offset = 0
        segment += 16
    return 0


@engine_function
def _place(worker: WorkerState, qp: QpRow, offset: int, nbytes: int, source: int) -> int:
    """Put response bytes into the memory that the oldest WQE names: return 0, or a reason."""
    index = qp.sq_ci
    flight = flight_of(qp, index)
    message = Message(worker.message)
    wqe = in_one_piece(qp, message, wqe_slot(qp, index), index, flight.blocks)
    reason = build_message(worker, qp, message, wqe, flight.opcode, flight.ds, index)
    if reason == 0 and message.nbytes != flight.nbytes:
        reason = refuse.bad_response(worker, qp.remote_qpn, nbytes)
    if reason == 0:
        reason = _scatter_part(worker, qp, offset, nbytes, source)
    return reason


@device_function
def _refuse(worker: WorkerState, qp: QpRow, reason: int) -> None:
    CounterSet(worker.counters).rx_refused += 1
    fail_oldest(worker, qp, reason)


@device_function
def _bad_response(worker: WorkerState, qp: QpRow, nbytes: int) -> None:
    _refuse(worker, qp, refuse.bad_response(worker, qp.remote_qpn, nbytes))


@device_function
def _advance(worker: WorkerState, qp: QpRow) -> None:
    """Advance past the oldest packet, whose response was taken."""
    qp.una_psn += 1
    qp.retries = 0
    qp.timer_at = 0
    qp.fast_timer = 0
    CounterSet(worker.counters).rx_accepted += 1
    acknowledge(worker, qp, qp.una_psn)


@engine_function
def _take_read(worker: WorkerState, qp: QpRow, operation: int, psn: int, data: int, nbytes: int) -> None:
    flight = flight_of(qp, qp.sq_ci)
    offset = (psn - flight.first) * qp.mtu
    is_last = operation == PacketOpcode.RC_READ_RESPONSE_LAST or operation == PacketOpcode.RC_READ_RESPONSE_ONLY
    if (
        is_atomic(flight.opcode)
        or nbytes != min(qp.mtu, flight.nbytes - offset)
        or is_last != (psn + 1 == read_end(qp, flight, psn))
    ):
        _bad_response(worker, qp, nbytes)
        return
    reason = _place(worker, qp, offset, nbytes, data)
    if reason == 0 and qp.stream != 0 and psn + 1 == flight.first + flight.packets:
        reason = await_copies(worker, qp)
    if reason != 0:
        _refuse(worker, qp, reason)
        return
    CounterSet(worker.counters).rdma_rx_bytes += nbytes
    _advance(worker, qp)


@engine_function
def _take_atomic(worker: WorkerState, qp: QpRow, data: int, nbytes: int) -> None:
    flight = flight_of(qp, qp.sq_ci)
    if not is_atomic(flight.opcode) or nbytes != ATOMIC_ACK_ETH.size:
        _bad_response(worker, qp, nbytes)
        return
    # The word is big-endian on the wire. In memory it is in host order, but a word of 4 bytes is not (execution.py).
    scratch = worker.message + MESSAGE.compare
    low = ld32(data + 4)
    old = low if flight.nbytes == 4 else be32(ld32(data)) << 32 | be32(low)
    reason = _place(worker, qp, 0, 0, scratch)
    if reason == 0:
        st64(scratch, old)
        reason = _scatter_part(worker, qp, 0, flight.nbytes, scratch)
    if reason == 0 and qp.stream != 0:
        reason = await_copies(worker, qp)
    if reason == 0:
        _advance(worker, qp)
    else:
        _refuse(worker, qp, reason)
