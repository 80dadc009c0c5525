"""The requester of a QP whose peer is across a wire: cuts WQEs into packets, completes acknowledged WQEs, and
retransmits lost packets (IBTA 9.7, requester side; 9.8 for UC).

A started WQE has a FLIGHT: the packet sequence numbers that it takes. A retransmission cuts the packets from the WQE
again, so only the FLIGHT is kept.
"""

from __future__ import annotations

from ...fabric.frames import GRANTED_SHIFT, LEAST_GRANTED, PipeEnd, publish, refer
from ...formats.commands import QpState, ServiceType
from ...formats.packet import ATOMIC_ETH, BTH, IMM_DT, OPERATION_MASK, RETH
from ...formats.wqe import DATA_SEG, INLINE_SEG, SEGMENT
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, copy, ld32, ld64, st32, st64
from ..memory.copies import copy_payload
from ..memory.keys import reference
from ..memory.staging import abandon_acknowledged, free_if_sent, request_tag, staged_slot
from ..memory.streams import drain_copies
from ..queues.completion import fail_send
from ..queues.local import execute_local
from ..queues.operations import (
    has_imm, header_bytes, is_atomic, is_local, is_masked, packet_opcode_of, returns_data, right_of, segments_of,
)
from ..queues.psn import MAX_OUTSTANDING, packets_of
from ..queues.send_completion import complete_send
from ..queues.wqes import NOT_YET, build_message, check_wqe, in_one_piece, local_failure, read_control, wqe_slot
from ..state import refuse
from ..state.counters import CounterSet
from ..state.dma_stream import Slot
from ..state.message import MESSAGE, Message
from ..state.qp import MAX_RD_ATOMIC, QP_ROW, Flight, QpRow, flight_of
from ..state.wire import WIRE, WireState
from ..state.worker import WorkerState
from . import masked_atomics
from .loopback import ENDLESS_RNR
from .packets import close_packet, open_packet, packet_opcode, put_be64, write_bth

BURST = 64  # packets of one QP before the next QP's turn
PUBLISH_EVERY = 8  # packets, so that the peer can start before the burst ends
ACK_EVERY = 16  # packets inside a message
# The first retry waits twice as long, later ones four times as long, the most that IBTA 9.7.6.1.3 allows. So a lost
# packet is retransmitted soon, and a software peer that is short of CPU time is not given up too early.
MAX_PATIENCE = 2
LEAST_WINDOW = 32  # packets in flight, after losses
FAST_RETRANSMIT_SHIFT = 3  # see `fast_retransmit`


# --- starting a WQE ------------------------------------------------------------------------------------------------


@engine_function
def _start(worker: WorkerState, qp: QpRow) -> int:
    """Check the next WQE, build its message and assign its PSNs: return 1, or 0 if the QP must wait or has failed."""
    counters = CounterSet(worker.counters)
    if worker.pause_at >= 0 and counters.sq_wqes >= worker.pause_at:
        return 0
    index = qp.sq_sent
    reason = check_wqe(worker, qp, index)
    if reason == NOT_YET:
        return 0
    wqe = wqe_slot(qp, index)
    control = read_control(wqe)
    opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
    if reason != 0:
        local_failure(worker, qp, index, opcode, ce, reason, 1)
        return 0
    nbytes = 0
    packets = 0
    if control.fenced and qp.reads_head != qp.reads_tail:
        return 0  # a fence waits for READs and atomics (IBTA 10.8.3.3)
    if is_local(opcode):
        done = execute_local(worker, qp, wqe, opcode, ds, index)
        if done < 0:
            local_failure(worker, qp, index, opcode, ce, -done, blocks)
        if done <= 0:
            return 0
    else:
        message = Message(worker.message)
        reason = build_message(worker, qp, message, in_one_piece(qp, message, wqe, index, blocks), opcode, ds, index)
        if reason != 0:
            local_failure(worker, qp, index, opcode, ce, reason, blocks)
            return 0
        nbytes = message.nbytes
        packets = packets_of(nbytes, qp.mtu)
        if qp.end_psn + packets - qp.una_psn > MAX_OUTSTANDING:
            return 0
    flight = flight_of(qp, index)
    flight.first, flight.packets, flight.nbytes, flight.opcode = qp.end_psn, packets, nbytes, opcode
    flight.ce, flight.ds, flight.blocks = ce, ds, blocks
    qp.sq_sent = index + blocks
    qp.end_psn += packets
    if packets != 0:
        qp.ssn += 1
    counters.sq_wqes += 1
    return 1


# --- sending packets -----------------------------------------------------------------------------------------------


@device_function
def _move_out(worker: WorkerState, message: Message, offset: int, nbytes: int, target: int) -> None:
    """Copy bytes [offset, offset + nbytes) of the message's segments to `target`."""
    segment = message + MESSAGE.segments
    while offset >= ld64(segment + 8) and nbytes > 0:
        offset -= ld64(segment + 8)
        segment += 16
    while nbytes > 0:
        part = min(nbytes, ld64(segment + 8) - offset)
        copy_payload(worker, target, ld64(segment) + offset, part)
        target += part
        nbytes -= part
        offset = 0
        segment += 16


@engine_function
def _reference(worker: WorkerState, qp: QpRow, message: Message, wqe: int, flight: Flight) -> int:
    """Return a reference to the message's first byte, or 0 if its bytes must be copied.

    The bytes of an RC message stay unchanged until it is acknowledged, and by then the peer has read them. UC completes
    a message earlier.
    """
    headers = segments_of(flight.opcode, 0)
    segment = wqe + headers * SEGMENT
    if qp.service != ServiceType.RC or flight.ds != headers + 1:
        return 0
    if be32(ld32(segment + DATA_SEG.byte_count)) & INLINE_SEG:
        return 0
    return reference(worker, WireState(qp.wire), be32(ld32(segment + DATA_SEG.lkey)), ld64(message + MESSAGE.segments))


@device_function
def _send_data(worker: WorkerState, qp: QpRow, message: Message, flight: Flight, wqe: int, solicited: int) -> int:
    """Send packets of a SEND or WRITE until it ends or wire or window is full: return how many, or minus a reason."""
    opcode = flight.opcode
    end = flight.first + flight.packets
    window = 1 if _probing(worker, qp) else WireState(qp.wire).window - qp.window_cut
    limit = min(end, qp.una_psn + window, qp.tx_psn + BURST)
    writing = right_of(opcode) != 0
    slot = 0
    if message.device != 0:
        if qp.tx_psn >= limit:
            return 0
        begin = (qp.tx_psn - flight.first) * qp.mtu
        slot = staged_slot(worker, qp, request_tag(flight.first), message, begin, flight.nbytes)
        if slot <= 0:
            return slot
        if Slot(slot).end < flight.nbytes:
            limit = min(limit, flight.first + Slot(slot).end // qp.mtu)
    granted = 0
    if WireState(qp.wire).grants != 0 and flight.nbytes >= LEAST_GRANTED:
        granted = _reference(worker, qp, message, wqe, flight)
    sent = 0
    while qp.tx_psn < limit:
        psn = qp.tx_psn
        offset = (psn - flight.first) * qp.mtu
        part = min(qp.mtu, flight.nbytes - offset)
        carried = 0 if granted != 0 and part >= LEAST_GRANTED else part
        pad = -carried & 3
        last = psn + 1 == end
        packet = packet_opcode_of(opcode, psn == flight.first, last)
        headers = BTH.size + header_bytes(packet)
        nbytes = headers + carried + pad
        bth = open_packet(worker, qp, qp.life, nbytes)
        if bth == 0:
            break
        asks = last or psn + 1 == limit or psn & (ACK_EVERY - 1) == ACK_EVERY - 1
        ack = 1 if qp.service == ServiceType.RC and asks else 0
        write_bth(qp, bth, packet_opcode(qp, packet), solicited and last, pad, ack, psn)
        at = bth + BTH.size
        if writing and psn == flight.first:
            _write_reth(at, message.raddr, message.rkey, flight.nbytes)
            at += RETH.size
        if has_imm(packet):
            st32(at + IMM_DT.imm, be32(message.imm))
            at += IMM_DT.size
        if pad:
            st32((at + part) & -4, 0)
        if carried < part:
            refer(PipeEnd(qp.wire + WIRE.tx), granted + offset + (part << GRANTED_SHIFT))
        elif slot != 0:
            copy(at, Slot(slot).address + offset - Slot(slot).begin, part)
        else:
            _move_out(worker, message, offset, part, at)
        close_packet(worker, qp, bth, nbytes, part)
        qp.tx_psn = psn + 1
        sent += 1
        if sent & (PUBLISH_EVERY - 1) == 0:
            publish(PipeEnd(qp.wire + WIRE.tx))
    if slot != 0:
        free_if_sent(Slot(slot), (qp.tx_psn - flight.first) * qp.mtu)
    return sent


@device_function
def _write_reth(at: int, va: int, rkey: int, nbytes: int) -> None:
    put_be64(at + RETH.va, va)
    st32(at + RETH.rkey, be32(rkey))
    st32(at + RETH.dma_length, be32(nbytes))


@device_function
def read_end(qp: QpRow, flight: Flight, psn: int) -> int:
    """Return the PSN behind the READ request that covers `psn`. The window splits a long READ into several requests.

    The requests end at fixed PSNs, so a retransmitted request never reaches into the next one.
    """
    part = max(WireState(qp.wire).window >> 1, 1)
    begun = psn - flight.first
    return flight.first + min(begun - begun % part + part, flight.packets)


@engine_function
def _send_read(worker: WorkerState, qp: QpRow, message: Message, flight: Flight) -> int:
    """Send a request for a READ, or for a part of it: return 1, or 0 if it has to wait."""
    window = WireState(qp.wire).window
    packets = read_end(qp, flight, qp.tx_psn) - qp.tx_psn
    if qp.reads_head - qp.reads_tail >= qp.max_rd or (
        qp.tx_psn != qp.una_psn and qp.tx_psn + packets - qp.una_psn > window
    ):
        return 0
    bth = open_packet(worker, qp, qp.life, BTH.size + RETH.size)
    if bth == 0:
        return 0
    offset = (qp.tx_psn - flight.first) * qp.mtu
    write_bth(qp, bth, packet_opcode_of(flight.opcode, True, True), 0, 0, 1, qp.tx_psn)
    _write_reth(bth + BTH.size, message.raddr + offset, message.rkey, min(packets * qp.mtu, flight.nbytes - offset))
    close_packet(worker, qp, bth, BTH.size + RETH.size, 0)
    _await_response(qp, packets)
    return 1


@engine_function
def _send_atomic(worker: WorkerState, qp: QpRow, message: Message, flight: Flight) -> int:
    """Send an atomic request: return 1, or 0 if it has to wait."""
    if qp.reads_head - qp.reads_tail >= qp.max_rd:
        return 0
    packet = packet_opcode_of(flight.opcode, True, True)
    headers = BTH.size + header_bytes(packet & OPERATION_MASK)
    bth = open_packet(worker, qp, qp.life, headers)
    if bth == 0:
        return 0
    write_bth(qp, bth, packet, 0, 0, 1, qp.tx_psn)
    at = bth + BTH.size
    if is_masked(flight.opcode):
        masked_atomics.write_header(at, message)
    else:
        put_be64(at + ATOMIC_ETH.va, message.raddr)
        st32(at + ATOMIC_ETH.rkey, be32(message.rkey))
        put_be64(at + ATOMIC_ETH.swap_add, message.swap_add)
        put_be64(at + ATOMIC_ETH.compare, message.compare)
    close_packet(worker, qp, bth, headers, 0)
    _await_response(qp, 1)
    return 1


@device_function
def _await_response(qp: QpRow, packets: int) -> None:
    """Record that a request was sent whose response has `packets` packets."""
    qp.tx_psn += packets
    st64(qp + QP_ROW.read_ends + 8 * (qp.reads_head & (MAX_RD_ATOMIC - 1)), qp.tx_psn)
    qp.reads_head += 1


@engine_function
def _send_flight(worker: WorkerState, qp: QpRow, built: int) -> int:
    """Send packets of the WQE at `sq_next`: return how many, or 0 if it has to wait or has failed.

    `built` says that its message is there. Each burst looks up the keys again: memory that was deregistered meanwhile
    is not sent.
    """
    index = qp.sq_next
    flight = flight_of(qp, index)
    message = Message(worker.message)
    wqe = in_one_piece(qp, message, wqe_slot(qp, index), index, flight.blocks)
    if not built:
        reason = build_message(worker, qp, message, wqe, flight.opcode, flight.ds, index)
        if reason == 0 and message.nbytes != flight.nbytes:
            reason = refuse.malformed_wqe(worker, flight.ds)
        if reason != 0:
            local_failure(worker, qp, index, flight.opcode, flight.ce, reason, flight.blocks)
            return 0
    if is_atomic(flight.opcode):
        sent = _send_atomic(worker, qp, message, flight)
    elif returns_data(flight.opcode):
        sent = _send_read(worker, qp, message, flight)
    else:
        sent = _send_data(worker, qp, message, flight, wqe, message.solicited)
        if sent < 0:
            local_failure(worker, qp, index, flight.opcode, flight.ce, -sent, flight.blocks)
            return 0
    if qp.tx_psn == flight.first + flight.packets:
        qp.sq_next = index + flight.blocks
    return sent


@device_function
def _is_held(worker: WorkerState, qp: QpRow) -> bool:
    """Return whether a request is not to begin now, because soon it may go without packets (gpu/slices.py)."""
    return worker.quiesce_until != 0 and qp.peer_keys != 0


@engine_function
def _send(worker: WorkerState, qp: QpRow) -> int:
    """Send what may be sent: return the number of WQEs and packets."""
    done = 0
    while done < BURST and qp.state == QpState.RTS:
        if _probing(worker, qp) and qp.tx_psn != qp.una_psn:
            break
        starts = qp.sq_next == qp.sq_sent
        if starts and (qp.sq_next == qp.sq_pi or _is_held(worker, qp) or _start(worker, qp) == 0):
            break
        flight = flight_of(qp, qp.sq_next)
        if flight.packets == 0:  # a local WQE, already executed
            qp.sq_next += flight.blocks
            acknowledge(worker, qp, qp.una_psn)
            done += 1
            continue
        sent = _send_flight(worker, qp, starts)
        if sent == 0:
            break
        done += sent
        if qp.service != ServiceType.RC:  # UC has no acknowledgements
            acknowledge(worker, qp, qp.tx_psn)
    if qp.copied != 0:
        done += 1  # part of a long copy
    return done


# --- acknowledgements ----------------------------------------------------------------------------------------------


@engine_function
def acknowledge(worker: WorkerState, qp: QpRow, target: int) -> int:
    """Complete the WQEs below PSN `target`: the peer has received everything below it.

    Return 1 if a READ or atomic below it has no response yet: that response was lost (IBTA 9.7.5.1.2).
    """
    before = qp.una_psn
    implied = 0
    while qp.sq_ci != qp.sq_sent and qp.state == QpState.RTS:
        flight = flight_of(qp, qp.sq_ci)
        end = flight.first + flight.packets
        if returns_data(flight.opcode) and end > qp.una_psn:
            if target > max(qp.una_psn, flight.first):
                implied = 1
            break
        if end > target:
            qp.una_psn = max(qp.una_psn, target)
            break
        qp.una_psn = max(qp.una_psn, end)
        index = qp.sq_ci
        qp.sq_ci = index + flight.blocks
        complete_send(worker, qp, index, flight.opcode, flight.ce, flight.nbytes)
    while qp.reads_tail != qp.reads_head and ld64(
        qp + QP_ROW.read_ends + 8 * (qp.reads_tail & (MAX_RD_ATOMIC - 1))
    ) <= qp.una_psn:
        qp.reads_tail += 1
    if qp.una_psn != before:
        qp.window_cut = max(qp.window_cut - 1, 0)
        qp.retries = 0
        qp.rnr_retries = 0
        qp.timer_at = 0
        qp.fast_timer = 0
    if qp.sq_next < qp.sq_ci or qp.tx_psn < qp.una_psn:  # what was to be retransmitted has arrived
        qp.sq_next = max(qp.sq_next, qp.sq_ci)
        qp.tx_psn = max(qp.tx_psn, qp.una_psn)
        if worker.stream_count != 0:
            abandon_acknowledged(worker, qp)
    return implied


@device_function
def go_back(qp: QpRow) -> None:
    """Retransmit from the oldest unacknowledged packet on (go-back-N, IBTA 9.7.5.1.1)."""
    qp.high_psn = max(qp.high_psn, qp.tx_psn)
    qp.sq_next = qp.sq_ci
    qp.tx_psn = qp.una_psn
    qp.reads_tail = qp.reads_head
    qp.timer_at = 0


@engine_function
def fail_oldest(worker: WorkerState, qp: QpRow, reason: int) -> None:
    """Fail the oldest WQE in flight, and with it the QP."""
    index = qp.sq_ci
    flight = flight_of(qp, index)
    if qp.stream != 0 and returns_data(flight.opcode):
        drain_copies(worker, qp)
    qp.sq_ci = index + flight.blocks
    qp.sq_next = qp.sq_ci
    qp.sq_sent = qp.sq_ci
    fail_send(worker, qp, index, flight.opcode, flight.ce, reason)


@engine_function
def retry(worker: WorkerState, qp: QpRow) -> None:
    """Retransmit after a timeout or a lost packet, or fail once retry_cnt is used up."""
    if qp.retries >= qp.retry_cnt:
        fail_oldest(worker, qp, refuse.no_response(worker, qp.remote_qpn, qp.retry_cnt))
        return
    qp.retries += 1
    # Packets behind a lost one were sent in vain: halve the window from here on. It grows again.
    window = WireState(qp.wire).window
    qp.window_cut = window - min(window, max((window - qp.window_cut) >> 1, LEAST_WINDOW))
    go_back(qp)


@device_function
def fast_retransmit(worker: WorkerState, qp: QpRow) -> None:
    """Shorten the timer: the peer has asked for a packet once, and will not report it if that packet is lost again.

    The timer grows each time. When it expires, only that packet is sent, which counts as no retry: the peer may just be
    slow. READs keep their timer, because a slow peer would send the whole response for each of them.
    """
    if not returns_data(flight_of(qp, qp.sq_ci).opcode):
        qp.fast_timer = worker.min_timeout


@device_function
def _probing(worker: WorkerState, qp: QpRow) -> bool:
    """Return whether to send only the oldest packet until the peer acknowledges it."""
    return qp.fast_timer > worker.min_timeout


@engine_function
def retry_gap(worker: WorkerState, qp: QpRow) -> None:
    """Retry when a later response shows that one is missing: an implied NAK (IBTA 9.9.2.4.1.1).

    The responses still on their way show the same gap. So the missing one is requested again once, and then only when
    the timer expires.
    """
    CounterSet(worker.counters).implied_nak_seq_err += 1
    if qp.gap_psn != qp.una_psn + 1:
        qp.gap_psn = qp.una_psn + 1
        retry(worker, qp)


@engine_function
def retry_rnr(worker: WorkerState, qp: QpRow, delay_ns: int) -> None:
    """Retransmit after the receiver's RNR timer, or fail once rnr_retry is used up (IBTA 9.7.5.2.8).

    The packet has arrived, so earlier losses are made up for and `retries` starts anew. A slow peer may send more NAKs
    while the packets behind it are retransmitted: they must not use up the retries.
    """
    CounterSet(worker.counters).rnr_nak_retry_err += 1
    if qp.rnr_retries >= qp.rnr_retry and qp.rnr_retry != ENDLESS_RNR:
        fail_oldest(worker, qp, refuse.receiver_not_ready(worker, qp.rnr_retry))
        return
    qp.rnr_retries += 1
    qp.retries = 0
    go_back(qp)
    qp.retry_at = worker.now + delay_ns


@device_function
def _patience(worker: WorkerState, qp: QpRow) -> int:
    """Return how long to wait for an acknowledgement before the next retry, in nanoseconds."""
    return max(qp.timeout_ns, worker.min_timeout) << min(qp.retries, MAX_PATIENCE)


@device_function
def _waits_for_peer(worker: WorkerState, qp: QpRow) -> bool:
    """Return whether progress depends on the peer: packets are in flight, or it has not taken those that fill the wire.

    False while the QP waits for a WAIT or for bytes of its first packet.
    """
    return qp.tx_psn != qp.una_psn or (
        qp.sq_next != qp.sq_sent and open_packet(worker, qp, qp.life, BTH.size + RETH.size + IMM_DT.size + qp.mtu) == 0
    )


@engine_function
def serve(worker: WorkerState, qp: QpRow) -> int:
    """Serve the timers, then send packets: return how much was done."""
    if qp.retry_at != 0:
        if worker.now < qp.retry_at:
            return 0
        qp.retry_at = 0
    if qp.timer_at != 0 and worker.now >= qp.timer_at:
        qp.timer_at = 0
        qp.gap_psn = 0
        CounterSet(worker.counters).local_ack_timeout_err += 1
        if qp.fast_timer != 0 and qp.fast_timer < _patience(worker, qp):
            qp.fast_timer <<= FAST_RETRANSMIT_SHIFT
            go_back(qp)
        else:
            qp.fast_timer = 0
            retry(worker, qp)
    done = _send(worker, qp)
    if qp.timer_at == 0 and qp.timeout_ns != 0 and qp.service == ServiceType.RC and _waits_for_peer(worker, qp):
        patience = _patience(worker, qp)
        qp.timer_at = worker.now + (patience if qp.fast_timer == 0 else min(patience, qp.fast_timer))
    return done
