"""Responses at the requester: acknowledgements, NAKs, READ data, results of atomics (IBTA 9.7.5)."""

from __future__ import annotations

from ...formats.commands import QpState
from ...formats.packet import (
    ACK_KIND_SHIFT, ACK_VALUE_MASK, AETH, ATOMIC_ACK_ETH, BTH, SYNDROME_SHIFT, AckKind, NakCode, PacketOpcode,
)  # fmt: skip
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, ld32, ld64, st64
from ..memory.streams import await_moved, place
from ..queues.operations import is_atomic, returns_data
from ..queues.psn import unwrap
from ..queues.wqes import build, in_one_piece, wqe_slot
from ..state import refuse
from ..state.counters import counters_at
from ..state.message import MESSAGE, message_at
from ..state.qp import flight_at, flight_of, qp_row_at
from ..state.reasons import Reason
from ..state.worker import worker_at
from .requester import acknowledge, fail_oldest, fast_retransmit, read_end, retry, retry_gap, retry_rnr
from .rnr import rnr_delay_ns



@device_function
def is_response(operation):
    """Return whether an RC operation is a response."""
    return operation > PacketOpcode.RC_READ_REQUEST and operation <= PacketOpcode.RC_ATOMIC_ACKNOWLEDGE


@engine_function
def take_response(nic, row, operation, psn24, bth, nbytes, pad):
    """Take a response for a QP in RTS. One that fits no request in flight is ignored (IBTA 9.7.5.1)."""
    q = qp_row_at(row)
    counters = counters_at(worker_at(nic).counters)
    psn = unwrap(psn24, q.una_psn)
    if psn < q.una_psn or psn >= max(q.tx_psn, q.high_psn) or q.retry_at != 0:
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
        _take_acknowledge(nic, row, psn, syndrome)
        return
    # The response to a READ or atomic acknowledges the requests before it.
    implied = acknowledge(nic, row, psn)
    if q.sq_ci == q.sq_sent or q.state != QpState.RTS:
        counters.rx_unexpected += 1
        return
    f = flight_at(flight_of(row, q.sq_ci))
    if implied or psn != q.una_psn:
        retry_gap(nic, row)
    elif not returns_data(f.opcode):
        _bad_response(nic, row, left)
    elif operation == PacketOpcode.RC_ATOMIC_ACKNOWLEDGE:
        _take_atomic(nic, row, at, left)
    else:
        _take_read(nic, row, operation, psn, at, left - pad)


@engine_function
def _take_acknowledge(nic, row, psn, syndrome):
    q = qp_row_at(row)
    counters = counters_at(worker_at(nic).counters)
    kind, value = syndrome >> ACK_KIND_SHIFT, syndrome & ACK_VALUE_MASK
    if kind == AckKind.ACK:
        if acknowledge(nic, row, psn + 1):
            retry_gap(nic, row)
        else:
            counters.rx_accepted += 1
        return
    if (
        acknowledge(nic, row, psn) or q.una_psn != psn or q.state != QpState.RTS or kind == AckKind.RESERVED
        or (kind == AckKind.NAK and value > NakCode.REMOTE_OPERATION)
    ):  # fmt: skip
        # A NAK of no known kind, for something never sent, or behind an unanswered READ: leave it to the timer.
        counters.rx_unexpected += 1
        return
    counters.rx_accepted += 1
    if kind == AckKind.RNR_NAK:
        retry_rnr(nic, row, rnr_delay_ns(value))
    elif value == NakCode.PSN_SEQUENCE:
        counters.packet_seq_err += 1
        retry(nic, row)
        fast_retransmit(nic, row)
    else:
        reason = Reason.NAK_REMOTE_OPERATION
        if value == NakCode.INVALID_REQUEST:
            reason = Reason.NAK_INVALID_REQUEST
        elif value == NakCode.REMOTE_ACCESS:
            reason = Reason.NAK_REMOTE_ACCESS
        fail_oldest(nic, row, refuse.negative_acknowledgement(nic, reason, q.remote_qpn, value))


@device_function
def _scatter_part(nic, row, offset, nbytes, source):
    """Copy `nbytes` at `source` to byte `offset` of the message's segments: return 0, or a reason."""
    message = worker_at(nic).message
    segment = message + MESSAGE.segments
    while offset >= ld64(segment + 8) and nbytes > 0:
        offset -= ld64(segment + 8)
        segment += 16
    while nbytes > 0:
        part = min(nbytes, ld64(segment + 8) - offset)
        reason = place(nic, row, ld64(segment) + offset, source, part)
        if reason != 0:
            return reason
        source += part
        nbytes -= part
        offset = 0
        segment += 16
    return 0


@engine_function
def _place(nic, row, offset, nbytes, source):
    """Put response bytes into the memory that the oldest WQE names: return 0, or a reason."""
    q = qp_row_at(row)
    index = q.sq_ci
    f = flight_at(flight_of(row, index))
    message = worker_at(nic).message
    wqe = in_one_piece(row, message, wqe_slot(row, index), index, f.blocks)
    reason = build(nic, row, message, wqe, f.opcode, f.ds, index)
    if reason == 0 and message_at(message).nbytes != f.nbytes:
        reason = refuse.bad_response(nic, q.remote_qpn, nbytes)
    if reason == 0:
        reason = _scatter_part(nic, row, offset, nbytes, source)
    return reason


@device_function
def _refuse(nic, row, reason):
    counters_at(worker_at(nic).counters).rx_refused += 1
    fail_oldest(nic, row, reason)


@device_function
def _bad_response(nic, row, nbytes):
    _refuse(nic, row, refuse.bad_response(nic, qp_row_at(row).remote_qpn, nbytes))


@device_function
def _advance(nic, row):
    """Advance past the oldest packet, whose response was taken."""
    q = qp_row_at(row)
    q.una_psn += 1
    q.retries = 0
    q.timer_at = 0
    q.fast_timer = 0
    counters_at(worker_at(nic).counters).rx_accepted += 1
    acknowledge(nic, row, q.una_psn)


@engine_function
def _take_read(nic, row, operation, psn, data, nbytes):
    q = qp_row_at(row)
    flight = flight_of(row, q.sq_ci)
    f = flight_at(flight)
    offset = (psn - f.first) * q.mtu
    ends = operation == PacketOpcode.RC_READ_RESPONSE_LAST or operation == PacketOpcode.RC_READ_RESPONSE_ONLY
    if (
        is_atomic(f.opcode)
        or nbytes != min(q.mtu, f.nbytes - offset)
        or ends != (psn + 1 == read_end(row, flight, psn))
    ):  # fmt: skip
        _bad_response(nic, row, nbytes)
        return
    reason = _place(nic, row, offset, nbytes, data)
    if reason == 0 and q.stream != 0 and psn + 1 == f.first + f.packets:
        reason = await_moved(nic, row)
    if reason != 0:
        _refuse(nic, row, reason)
        return
    counters_at(worker_at(nic).counters).rdma_rx_bytes += nbytes
    _advance(nic, row)


@engine_function
def _take_atomic(nic, row, data, nbytes):
    q = qp_row_at(row)
    f = flight_at(flight_of(row, q.sq_ci))
    if not is_atomic(f.opcode) or nbytes != ATOMIC_ACK_ETH.size:
        _bad_response(nic, row, nbytes)
        return
    # The word is big-endian on the wire. In memory it is in host order, but a word of 4 bytes is not (execution.py).
    scratch = worker_at(nic).message + MESSAGE.compare
    low = ld32(data + 4)
    old = low if f.nbytes == 4 else be32(ld32(data)) << 32 | be32(low)
    reason = _place(nic, row, 0, 0, scratch)
    if reason == 0:
        st64(scratch, old)
        reason = _scatter_part(nic, row, 0, f.nbytes, scratch)
    if reason == 0 and q.stream != 0:
        reason = await_moved(nic, row)
    if reason == 0:
        _advance(nic, row)
    else:
        _refuse(nic, row, reason)
