"""The requester of a QP whose peer is across a wire: cuts WQEs into packets, completes acknowledged WQEs, and
retransmits lost packets (IBTA 9.7, requester side; 9.8 for UC).

A started WQE has a FLIGHT: the packet sequence numbers that it takes. A retransmission cuts the packets from the WQE
again, so only the FLIGHT is kept.
"""

from __future__ import annotations

from ...fabric.frames import LEAST_GRANTED, GRANTED_SHIFT, publish, refer
from ...formats.commands import QpState, ServiceType
from ...formats.packet import ATOMIC_ETH, BTH, IMM_DT, OPERATION_MASK, RETH
from ...formats.wqe import DATA_SEG, INLINE_SEG, SEGMENT
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, copy, ld32, ld64, st32, st64
from ..memory.copies import copy_payload
from ..memory.keys import reference
from ..memory.staging import drop_acknowledged, leave, request_tag, staged
from ..memory.streams import let_arrive
from ..queues.completion import fail_send
from ..queues.local import execute_local
from ..queues.operations import (
    has_imm, header_bytes, is_atomic, is_local, is_masked, packet_of, returns_data, right_of, segments_of,
)  # fmt: skip
from ..queues.psn import MAX_OUTSTANDING, packets_of
from ..queues.sent import complete_send
from ..queues.wqes import (
    NOT_YET, build, check_wqe, in_one_piece, local_failure, read_control, wqe_slot,
)  # fmt: skip
from ..state import refuse
from ..state.counters import counters_at
from ..state.dma_stream import slot_at
from ..state.message import MESSAGE, message_at
from ..state.nic import nic_at
from ..state.qp import MAX_RD_ATOMIC, QP_ROW, flight_at, flight_of, qp_row_at
from ..state.wire import WIRE, wire_at
from ..state.worker import worker_at
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
def _start(nic, row):
    """Check the next WQE, build its message and assign its PSNs: return 1, or 0 if the QP must wait or has failed."""
    q = qp_row_at(row)
    n = worker_at(nic)
    counters = counters_at(n.counters)
    if n.pause_at >= 0 and counters.sq_wqes >= n.pause_at:
        return 0
    index = q.sq_sent
    reason = check_wqe(nic, row, index)
    if reason == NOT_YET:
        return 0
    wqe = wqe_slot(row, index)
    control = read_control(wqe)
    opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
    if reason != 0:
        local_failure(nic, row, index, opcode, ce, reason, 1)
        return 0
    nbytes = 0
    packets = 0
    if control.fenced and q.reads_head != q.reads_tail:
        return 0  # a fence waits for READs and atomics (IBTA 10.8.3.3)
    if is_local(opcode):
        done = execute_local(nic, row, wqe, opcode, ds, index)
        if done < 0:
            local_failure(nic, row, index, opcode, ce, -done, blocks)
        if done <= 0:
            return 0
    else:
        message = n.message
        reason = build(nic, row, message, in_one_piece(row, message, wqe, index, blocks), opcode, ds, index)
        if reason != 0:
            local_failure(nic, row, index, opcode, ce, reason, blocks)
            return 0
        nbytes = message_at(message).nbytes
        packets = packets_of(nbytes, q.mtu)
        if q.end_psn + packets - q.una_psn > MAX_OUTSTANDING:
            return 0
    f = flight_at(flight_of(row, index))
    f.first, f.packets, f.nbytes, f.opcode = q.end_psn, packets, nbytes, opcode
    f.ce, f.ds, f.blocks = ce, ds, blocks
    q.sq_sent = index + blocks
    q.end_psn += packets
    if packets != 0:
        q.ssn += 1
    counters.sq_wqes += 1
    return 1


# --- sending packets -----------------------------------------------------------------------------------------------


@device_function
def _move_out(nic, message, offset, nbytes, target):
    """Copy bytes [offset, offset + nbytes) of the message's segments to `target`."""
    segment = message + MESSAGE.segments
    while offset >= ld64(segment + 8) and nbytes > 0:
        offset -= ld64(segment + 8)
        segment += 16
    while nbytes > 0:
        part = min(nbytes, ld64(segment + 8) - offset)
        copy_payload(nic, target, ld64(segment) + offset, part)
        target += part
        nbytes -= part
        offset = 0
        segment += 16


@engine_function
def _reference(nic, row, message, wqe, flight):
    """Return a reference to the message's first byte, or 0 if its bytes must be copied.

    The bytes of an RC message stay unchanged until it is acknowledged, and by then the peer has read them. UC completes
    a message earlier.
    """
    q = qp_row_at(row)
    f = flight_at(flight)
    headers = segments_of(f.opcode, 0)
    segment = wqe + headers * SEGMENT
    if q.service != ServiceType.RC or f.ds != headers + 1 or be32(ld32(segment + DATA_SEG.byte_count)) & INLINE_SEG:
        return 0
    return reference(nic, q.wire, be32(ld32(segment + DATA_SEG.lkey)), ld64(message + MESSAGE.segments))


@device_function
def _send_data(nic, row, message, flight, wqe, solicited):
    """Send packets of a SEND or WRITE until it ends or wire or window is full: return how many, or minus a reason."""
    q = qp_row_at(row)
    f = flight_at(flight)
    m = message_at(message)
    opcode = f.opcode
    end = f.first + f.packets
    window = 1 if _probing(nic, row) else wire_at(q.wire).window - q.window_cut
    limit = min(end, q.una_psn + window, q.tx_psn + BURST)
    writing = right_of(opcode) != 0
    slot = 0
    if m.device != 0:
        if q.tx_psn >= limit:
            return 0
        slot = staged(nic, row, request_tag(f.first), message, (q.tx_psn - f.first) * q.mtu, f.nbytes)
        if slot <= 0:
            return slot
        if slot_at(slot).end < f.nbytes:
            limit = min(limit, f.first + slot_at(slot).end // q.mtu)
    granted = 0
    if wire_at(q.wire).grants != 0 and f.nbytes >= LEAST_GRANTED:
        granted = _reference(nic, row, message, wqe, flight)
    sent = 0
    while q.tx_psn < limit:
        psn = q.tx_psn
        offset = (psn - f.first) * q.mtu
        part = min(q.mtu, f.nbytes - offset)
        carried = 0 if granted != 0 and part >= LEAST_GRANTED else part
        pad = -carried & 3
        last = psn + 1 == end
        packet = packet_of(opcode, psn == f.first, last)
        headers = BTH.size + header_bytes(packet)
        nbytes = headers + carried + pad
        bth = open_packet(nic, row, q.life, nbytes)
        if bth == 0:
            break
        asks = last or psn + 1 == limit or psn & (ACK_EVERY - 1) == ACK_EVERY - 1
        ack = 1 if q.service == ServiceType.RC and asks else 0
        write_bth(row, bth, packet_opcode(row, packet), solicited and last, pad, ack, psn)
        at = bth + BTH.size
        if writing and psn == f.first:
            _write_reth(at, m.raddr, m.rkey, f.nbytes)
            at += RETH.size
        if has_imm(packet):
            st32(at + IMM_DT.imm, be32(m.imm))
            at += IMM_DT.size
        if pad:
            st32((at + part) & -4, 0)
        if carried < part:
            refer(q.wire + WIRE.tx, granted + offset + (part << GRANTED_SHIFT))
        elif slot != 0:
            copy(at, slot_at(slot).address + offset - slot_at(slot).begin, part)
        else:
            _move_out(nic, message, offset, part, at)
        close_packet(nic, row, bth, nbytes, part)
        q.tx_psn = psn + 1
        sent += 1
        if sent & (PUBLISH_EVERY - 1) == 0:
            publish(q.wire + WIRE.tx)
    if slot != 0:
        leave(slot, (q.tx_psn - f.first) * q.mtu)
    return sent


@device_function
def _write_reth(at, va, rkey, nbytes):
    put_be64(at + RETH.va, va)
    st32(at + RETH.rkey, be32(rkey))
    st32(at + RETH.dma_length, be32(nbytes))


@device_function
def read_end(row, flight, psn):
    """Return the PSN behind the READ request that covers `psn`. The window splits a long READ into several requests.

    The requests end at fixed PSNs, so a retransmitted request never reaches into the next one.
    """
    f = flight_at(flight)
    part = max(wire_at(qp_row_at(row).wire).window >> 1, 1)
    begun = psn - f.first
    return f.first + min(begun - begun % part + part, f.packets)


@engine_function
def _send_read(nic, row, message, flight):
    """Send a request for a READ, or for a part of it: return 1, or 0 if it has to wait."""
    q = qp_row_at(row)
    f = flight_at(flight)
    m = message_at(message)
    window = wire_at(q.wire).window
    packets = read_end(row, flight, q.tx_psn) - q.tx_psn
    if q.reads_head - q.reads_tail >= q.max_rd or (
        q.tx_psn != q.una_psn and q.tx_psn + packets - q.una_psn > window
    ):  # fmt: skip
        return 0
    bth = open_packet(nic, row, q.life, BTH.size + RETH.size)
    if bth == 0:
        return 0
    offset = (q.tx_psn - f.first) * q.mtu
    write_bth(row, bth, packet_of(f.opcode, True, True), 0, 0, 1, q.tx_psn)
    _write_reth(bth + BTH.size, m.raddr + offset, m.rkey, min(packets * q.mtu, f.nbytes - offset))
    close_packet(nic, row, bth, BTH.size + RETH.size, 0)
    _await_response(row, packets)
    return 1


@engine_function
def _send_atomic(nic, row, message, flight):
    """Send an atomic request: return 1, or 0 if it has to wait."""
    q = qp_row_at(row)
    f = flight_at(flight)
    m = message_at(message)
    if q.reads_head - q.reads_tail >= q.max_rd:
        return 0
    packet = packet_of(f.opcode, True, True)
    headers = BTH.size + header_bytes(packet & OPERATION_MASK)
    bth = open_packet(nic, row, q.life, headers)
    if bth == 0:
        return 0
    write_bth(row, bth, packet, 0, 0, 1, q.tx_psn)
    at = bth + BTH.size
    if is_masked(f.opcode):
        masked_atomics.write_header(at, message)
    else:
        put_be64(at + ATOMIC_ETH.va, m.raddr)
        st32(at + ATOMIC_ETH.rkey, be32(m.rkey))
        put_be64(at + ATOMIC_ETH.swap_add, m.swap_add)
        put_be64(at + ATOMIC_ETH.compare, m.compare)
    close_packet(nic, row, bth, headers, 0)
    _await_response(row, 1)
    return 1


@device_function
def _await_response(row, packets):
    """Record that a request was sent whose response has `packets` packets."""
    q = qp_row_at(row)
    q.tx_psn += packets
    st64(row + QP_ROW.read_ends + 8 * (q.reads_head & (MAX_RD_ATOMIC - 1)), q.tx_psn)
    q.reads_head += 1


@engine_function
def _send_flight(nic, row, built):
    """Send packets of the WQE at `sq_next`: return how many, or 0 if it has to wait or has failed.

    `built` says that its message is there. Each burst looks up the keys again: memory that was deregistered meanwhile
    is not sent.
    """
    q = qp_row_at(row)
    index = q.sq_next
    flight = flight_of(row, index)
    f = flight_at(flight)
    message = worker_at(nic).message
    wqe = in_one_piece(row, message, wqe_slot(row, index), index, f.blocks)
    if not built:
        reason = build(nic, row, message, wqe, f.opcode, f.ds, index)
        if reason == 0 and message_at(message).nbytes != f.nbytes:
            reason = refuse.malformed_wqe(nic, f.ds)
        if reason != 0:
            local_failure(nic, row, index, f.opcode, f.ce, reason, f.blocks)
            return 0
    if is_atomic(f.opcode):
        sent = _send_atomic(nic, row, message, flight)
    elif returns_data(f.opcode):
        sent = _send_read(nic, row, message, flight)
    else:
        sent = _send_data(nic, row, message, flight, wqe, message_at(message).solicited)
        if sent < 0:
            local_failure(nic, row, index, f.opcode, f.ce, -sent, f.blocks)
            return 0
    if q.tx_psn == f.first + f.packets:
        q.sq_next = index + f.blocks
    return sent


@device_function
def _is_held(nic, row):
    """Return whether a request is not to begin now, because soon it may go without packets (gpu/slices.py)."""
    return worker_at(nic).lull != 0 and qp_row_at(row).peer_keys != 0


@engine_function
def _send(nic, row):
    """Send what may be sent: return the number of WQEs and packets."""
    q = qp_row_at(row)
    done = 0
    while done < BURST and q.state == QpState.RTS:
        if _probing(nic, row) and q.tx_psn != q.una_psn:
            break
        starts = q.sq_next == q.sq_sent
        if starts and (q.sq_next == q.sq_pi or _is_held(nic, row) or _start(nic, row) == 0):
            break
        f = flight_at(flight_of(row, q.sq_next))
        if f.packets == 0:  # a local WQE, already executed
            q.sq_next += f.blocks
            acknowledge(nic, row, q.una_psn)
            done += 1
            continue
        sent = _send_flight(nic, row, starts)
        if sent == 0:
            break
        done += sent
        if q.service != ServiceType.RC:  # UC has no acknowledgements
            acknowledge(nic, row, q.tx_psn)
    if q.copied != 0:
        done += 1  # part of a long copy
    return done


# --- acknowledgements ----------------------------------------------------------------------------------------------


@engine_function
def acknowledge(nic, row, target):
    """Complete the WQEs below PSN `target`: the peer has received everything below it.

    Return 1 if a READ or atomic below it has no response yet: that response was lost (IBTA 9.7.5.1.2).
    """
    q = qp_row_at(row)
    before = q.una_psn
    implied = 0
    while q.sq_ci != q.sq_sent and q.state == QpState.RTS:
        f = flight_at(flight_of(row, q.sq_ci))
        end = f.first + f.packets
        if returns_data(f.opcode) and end > q.una_psn:
            if target > max(q.una_psn, f.first):
                implied = 1
            break
        if end > target:
            q.una_psn = max(q.una_psn, target)
            break
        q.una_psn = max(q.una_psn, end)
        index = q.sq_ci
        q.sq_ci = index + f.blocks
        complete_send(nic, row, index, f.opcode, f.ce, f.nbytes)
    while q.reads_tail != q.reads_head and ld64(
        row + QP_ROW.read_ends + 8 * (q.reads_tail & (MAX_RD_ATOMIC - 1))
    ) <= q.una_psn:  # fmt: skip
        q.reads_tail += 1
    if q.una_psn != before:
        q.window_cut = max(q.window_cut - 1, 0)
        q.retries = 0
        q.rnr_retries = 0
        q.timer_at = 0
        q.fast_timer = 0
    if q.sq_next < q.sq_ci or q.tx_psn < q.una_psn:  # what was to be retransmitted has arrived
        q.sq_next = max(q.sq_next, q.sq_ci)
        q.tx_psn = max(q.tx_psn, q.una_psn)
        if worker_at(nic).stream_count != 0:
            drop_acknowledged(nic, row)
    return implied


@device_function
def go_back(row):
    """Retransmit from the oldest unacknowledged packet on (go-back-N, IBTA 9.7.5.1.1)."""
    q = qp_row_at(row)
    q.high_psn = max(q.high_psn, q.tx_psn)
    q.sq_next = q.sq_ci
    q.tx_psn = q.una_psn
    q.reads_tail = q.reads_head
    q.timer_at = 0


@engine_function
def fail_oldest(nic, row, reason):
    """Fail the oldest WQE in flight, and with it the QP."""
    q = qp_row_at(row)
    index = q.sq_ci
    f = flight_at(flight_of(row, index))
    if q.stream != 0 and returns_data(f.opcode):
        let_arrive(nic, row)
    q.sq_ci = index + f.blocks
    q.sq_next = q.sq_ci
    q.sq_sent = q.sq_ci
    fail_send(nic, row, index, f.opcode, f.ce, reason)


@engine_function
def retry(nic, row):
    """Retransmit after a timeout or a lost packet, or fail once retry_cnt is used up."""
    q = qp_row_at(row)
    if q.retries >= q.retry_cnt:
        fail_oldest(nic, row, refuse.no_response(nic, q.remote_qpn, q.retry_cnt))
        return
    q.retries += 1
    # Packets behind a lost one were sent in vain: halve the window from here on. It grows again.
    window = wire_at(q.wire).window
    q.window_cut = window - min(window, max((window - q.window_cut) >> 1, LEAST_WINDOW))
    go_back(row)


@device_function
def fast_retransmit(nic, row):
    """Shorten the timer: the peer has asked for a packet once, and will not report it if that packet is lost again.

    The timer grows each time. When it expires, only that packet is sent, which counts as no retry: the peer may just be
    slow. READs keep their timer, because a slow peer would send the whole response for each of them.
    """
    q = qp_row_at(row)
    if not returns_data(flight_at(flight_of(row, q.sq_ci)).opcode):
        q.fast_timer = nic_at(nic).min_timeout


@device_function
def _probing(nic, row):
    """Return whether to send only the oldest packet until the peer acknowledges it."""
    return qp_row_at(row).fast_timer > nic_at(nic).min_timeout


@engine_function
def retry_gap(nic, row):
    """Retry when a later response shows that one is missing: an implied NAK (IBTA 9.9.2.4.1.1).

    The responses still on their way show the same gap. So the missing one is requested again once, and then only when
    the timer expires.
    """
    q = qp_row_at(row)
    counters_at(worker_at(nic).counters).implied_nak_seq_err += 1
    if q.gap_psn != q.una_psn + 1:
        q.gap_psn = q.una_psn + 1
        retry(nic, row)


@engine_function
def retry_rnr(nic, row, delay_ns):
    """Retransmit after the receiver's RNR timer, or fail once rnr_retry is used up (IBTA 9.7.5.2.8).

    The packet has arrived, so earlier losses are made up for and `retries` starts anew. A slow peer may send more NAKs
    while the packets behind it are retransmitted: they must not use up the retries.
    """
    q = qp_row_at(row)
    counters_at(worker_at(nic).counters).rnr_nak_retry_err += 1
    if q.rnr_retries >= q.rnr_retry and q.rnr_retry != ENDLESS_RNR:
        fail_oldest(nic, row, refuse.receiver_not_ready(nic, q.rnr_retry))
        return
    q.rnr_retries += 1
    q.retries = 0
    go_back(row)
    q.retry_at = worker_at(nic).now + delay_ns


@device_function
def _patience(nic, row):
    """Return how long to wait for an acknowledgement before the next retry, in nanoseconds."""
    q = qp_row_at(row)
    return max(q.timeout_ns, nic_at(nic).min_timeout) << min(q.retries, MAX_PATIENCE)


@device_function
def _waits_for_peer(nic, row):
    """Return whether progress depends on the peer: packets are in flight, or it has not taken those that fill the wire.

    False while the QP waits for a WAIT or for bytes of its first packet.
    """
    q = qp_row_at(row)
    return q.tx_psn != q.una_psn or (
        q.sq_next != q.sq_sent and open_packet(nic, row, q.life, BTH.size + RETH.size + IMM_DT.size + q.mtu) == 0
    )


@engine_function
def serve(nic, row):
    """Serve the timers, then send packets: return how much was done."""
    q = qp_row_at(row)
    n = worker_at(nic)
    if q.retry_at != 0:
        if n.now < q.retry_at:
            return 0
        q.retry_at = 0
    if q.timer_at != 0 and n.now >= q.timer_at:
        q.timer_at = 0
        q.gap_psn = 0
        counters_at(n.counters).local_ack_timeout_err += 1
        if q.fast_timer != 0 and q.fast_timer < _patience(nic, row):
            q.fast_timer <<= FAST_RETRANSMIT_SHIFT
            go_back(row)
        else:
            q.fast_timer = 0
            retry(nic, row)
    done = _send(nic, row)
    if q.timer_at == 0 and q.timeout_ns != 0 and q.service == ServiceType.RC and _waits_for_peer(nic, row):
        patience = _patience(nic, row)
        q.timer_at = n.now + (patience if q.fast_timer == 0 else min(patience, q.fast_timer))
    return done
