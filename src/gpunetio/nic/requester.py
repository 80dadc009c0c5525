"""Requester of a QP whose peer is across a wire: cuts WQEs into packets, completes them by acknowledgements, and sends
again what got lost (IBTA 9.7, requester side; 9.8 for UC).

A started WQE has a FLIGHT: the packet sequence numbers it takes. What is sent again is cut from the WQE once more, so
nothing is kept but that.
"""

from __future__ import annotations

from ..device.compile import device_function, engine_function
from ..device.ops import be32, copy, ld8, ld32, ld64, st32, st64
from ..fabric.frames import LEAST_LENT, LENT_SHIFT, publish, refer
from ..formats.commands import QpState, ServiceType
from ..formats.packet import ATOMIC_ETH, BTH, IMM_DT, PSN_MASK, RETH, PacketOpcode
from ..formats.wqe import CTRL_SEG, DATA_SEG, DS_MASK, FM_SHIFT, INLINE_SEG, SEGMENT, CtrlFlags, WqeOpcode
from .completion import ce_of, complete_send, fail_send
from .loopback import ENDLESS_RNR
from .message import MESSAGE, message_at
from .mkey import reference
from .movers import let_arrive
from .packets import close_packet, open_packet, packet_opcode, put_be64, write_bth
from .reasons import Reason
from .responder import explain
from .staging import drop_acknowledged, leave, request_tag, slot_at, staged
from .tables import FLIGHT, MAX_RD_ATOMIC, QP_ROW, WIRE, counters_at, flight_at, nic_at, qp_row_at, wire_at
from .wqes import (
    NOT_YET, build, check_wqe, execute_local, explain_wqe, header_segments, in_one_piece, is_local, local_failure,
    wqe_slot,
)  # fmt: skip

_RTS, _RC = int(QpState.RTS), int(ServiceType.RC)
_SEND, _SEND_IMM = int(WqeOpcode.SEND), int(WqeOpcode.SEND_IMM)
_WRITE, _WRITE_IMM, _READ = int(WqeOpcode.RDMA_WRITE), int(WqeOpcode.RDMA_WRITE_IMM), int(WqeOpcode.RDMA_READ)
_CS, _FA = int(WqeOpcode.ATOMIC_CS), int(WqeOpcode.ATOMIC_FA)
_MALFORMED, _NO_RESPONSE, _RNR = int(Reason.WQE_MALFORMED), int(Reason.NO_RESPONSE), int(Reason.RNR)
_SOLICITED = int(CtrlFlags.SOLICITED)
_FIRST, _MIDDLE = int(PacketOpcode.RC_SEND_FIRST), int(PacketOpcode.RC_SEND_MIDDLE)
_LAST, _ONLY = int(PacketOpcode.RC_SEND_LAST), int(PacketOpcode.RC_SEND_ONLY)  # + 1 with immediate data
_OF_WRITE = int(PacketOpcode.RC_WRITE_FIRST)  # the same six operations again, from here
_READ_REQUEST = int(PacketOpcode.RC_READ_REQUEST)
_COMPARE_SWAP, _FETCH_ADD = int(PacketOpcode.RC_COMPARE_SWAP), int(PacketOpcode.RC_FETCH_ADD)

MAX_OUTSTANDING = 1 << 23  # half of the PSNs: more, and old could not be told from new (IBTA 9.7.2)
BURST = 64  # packets of one QP before the next has its turn
PUBLISH_EVERY = 8  # packets, so that the peer can start before the burst ends
ACK_EVERY = 16  # packets inside a message
# Retries wait for twice the time, then four times, which is the most that the standard allows (IBTA 9.7.6.1.3). A lost
# packet is soon sent again, and a peer that is short of CPU time, as software ones are, is not given up too early.
MAX_PATIENCE = 2
LEAST_WINDOW = 32  # packets in flight, after losses
HURRY_SHIFT = 3  # see `hurry`


@device_function
def flight_of(row, index):
    """Address of the FLIGHT of the WQE that starts at `index`."""
    q = qp_row_at(row)
    return q.flights + (index & ((1 << q.sq_log) - 1)) * FLIGHT.size


@device_function
def answered(opcode):
    """Whether a request completes by a response of its own rather than by an acknowledgement."""
    return opcode == _READ or opcode == _CS or opcode == _FA


# --- starting a WQE ------------------------------------------------------------------------------------------------


@engine_function
def _start(nic, row):
    """Check the next WQE and give it its packets: 1, or 0 if the QP has to wait or has failed."""
    q = qp_row_at(row)
    n = nic_at(nic)
    counters = counters_at(n.counters)
    if n.pause_at >= 0 and counters.sq_wqes >= n.pause_at:
        return 0
    index = q.sq_sent
    reason = check_wqe(nic, row, index)
    if reason == NOT_YET:
        return 0
    wqe = wqe_slot(row, index)
    opcode = be32(ld32(wqe)) & 0xFF
    ds = be32(ld32(wqe + CTRL_SEG.qpn_ds)) & DS_MASK
    blocks = (ds + 3) >> 2
    ce = ce_of(wqe)
    if reason != 0:
        explain_wqe(nic, row, index, reason)
        local_failure(nic, row, index, opcode, ce, reason, 1)
        return 0
    nbytes = 0
    packets = 0
    fenced = ld8(wqe + CTRL_SEG.fm_ce_se) >> FM_SHIFT != 0
    if fenced and q.reads_head != q.reads_tail:
        return 0  # a fence waits for READs and atomics (IBTA 10.8.3.3)
    if is_local(opcode):
        done = execute_local(nic, row, wqe, opcode, ds)
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
        packets = 1 if opcode == _CS or opcode == _FA else max(1, (nbytes + q.mtu - 1) // q.mtu)
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
def _move_out(message, offset, nbytes, target):
    """Copy bytes [offset, offset + nbytes) of the message's segments to `target`."""
    segment = message + MESSAGE.segments
    while offset >= ld64(segment + 8) and nbytes > 0:
        offset -= ld64(segment + 8)
        segment += 16
    while nbytes > 0:
        part = min(nbytes, ld64(segment + 8) - offset)
        copy(target, ld64(segment) + offset, part)
        target += part
        nbytes -= part
        offset = 0
        segment += 16


@engine_function
def _reference(nic, row, message, wqe, flight):
    """What refers to the message's first byte, or 0 if its bytes have to be copied.

    The bytes of an RC message stay unchanged until it is acknowledged, which is after the peer has read them; UC
    completes before that.
    """
    q = qp_row_at(row)
    f = flight_at(flight)
    headers = header_segments(f.opcode, 0)
    segment = wqe + headers * SEGMENT
    if q.service != _RC or f.ds != headers + 1 or be32(ld32(segment + DATA_SEG.byte_count)) & INLINE_SEG:
        return 0
    return reference(nic, q.wire, be32(ld32(segment + DATA_SEG.lkey)), ld64(message + MESSAGE.segments))


@device_function
def _send_data(nic, row, message, flight, wqe, solicited):
    """Packets of a SEND or WRITE, until it ends or the wire or window is full: how many, or minus a reason."""
    q = qp_row_at(row)
    f = flight_at(flight)
    m = message_at(message)
    opcode = f.opcode
    end = f.first + f.packets
    window = 1 if _probing(nic, row) else wire_at(q.wire).window - q.held_back
    limit = min(end, q.una_psn + window, q.tx_psn + BURST)
    with_imm = opcode == _SEND_IMM or opcode == _WRITE_IMM
    writing = opcode == _WRITE or opcode == _WRITE_IMM
    slot = 0
    if m.far != 0:
        if q.tx_psn >= limit:
            return 0
        slot = staged(nic, row, request_tag(f.first), message, (q.tx_psn - f.first) * q.mtu, f.nbytes)
        if slot <= 0:
            return slot
        if slot_at(slot).end < f.nbytes:
            limit = min(limit, f.first + slot_at(slot).end // q.mtu)
    lent = 0
    if wire_at(q.wire).loans != 0 and f.nbytes >= LEAST_LENT:
        lent = _reference(nic, row, message, wqe, flight)
    sent = 0
    while q.tx_psn < limit:
        psn = q.tx_psn
        offset = (psn - f.first) * q.mtu
        part = min(q.mtu, f.nbytes - offset)
        carried = 0 if lent != 0 and part >= LEAST_LENT else part
        pad = -carried & 3
        last = psn + 1 == end
        operation = _MIDDLE
        if psn == f.first:
            operation = _ONLY if last else _FIRST
        elif last:
            operation = _LAST
        headers = BTH.size
        if writing:
            operation += _OF_WRITE
            if psn == f.first:
                headers += RETH.size
        if with_imm and last:
            operation += 1
            headers += IMM_DT.size
        nbytes = headers + carried + pad
        bth = open_packet(nic, row, q.life, nbytes)
        if bth == 0:
            break
        asks = last or psn + 1 == limit or psn & (ACK_EVERY - 1) == ACK_EVERY - 1
        ack = 1 if q.service == _RC and asks else 0
        write_bth(row, bth, packet_opcode(row, operation), solicited and last, pad, ack, psn)
        at = bth + BTH.size
        if writing and psn == f.first:
            _write_reth(at, m.raddr, m.rkey, f.nbytes)
            at += RETH.size
        if with_imm and last:
            st32(at + IMM_DT.imm, be32(m.imm))
            at += IMM_DT.size
        if pad:
            st32((at + part) & -4, 0)
        if carried < part:
            refer(q.wire + WIRE.tx, lent + offset + (part << LENT_SHIFT))
        elif slot != 0:
            copy(at, slot_at(slot).address + offset - slot_at(slot).begin, part)
        else:
            _move_out(message, offset, part, at)
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
    """The PSN behind the READ request that covers `psn`: a long READ is asked for in parts that the window allows.

    Parts end at fixed places, so that a request which is sent again never reaches into the next one.
    """
    f = flight_at(flight)
    part = max(wire_at(qp_row_at(row).wire).window >> 1, 1)
    begun = psn - f.first
    return f.first + min(begun - begun % part + part, f.packets)


@engine_function
def _send_read(nic, row, message, flight):
    """A READ request, or one for a part of a READ: 1, or 0 if it has to wait."""
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
    write_bth(row, bth, _READ_REQUEST, 0, 0, 1, q.tx_psn)
    _write_reth(bth + BTH.size, m.raddr + offset, m.rkey, min(packets * q.mtu, f.nbytes - offset))
    close_packet(nic, row, bth, BTH.size + RETH.size, 0)
    _await_response(row, packets)
    return 1


@engine_function
def _send_atomic(nic, row, message, flight):
    """An atomic request: 1, or 0 if it has to wait."""
    q = qp_row_at(row)
    f = flight_at(flight)
    m = message_at(message)
    if q.reads_head - q.reads_tail >= q.max_rd:
        return 0
    bth = open_packet(nic, row, q.life, BTH.size + ATOMIC_ETH.size)
    if bth == 0:
        return 0
    write_bth(row, bth, _COMPARE_SWAP if f.opcode == _CS else _FETCH_ADD, 0, 0, 1, q.tx_psn)
    at = bth + BTH.size
    put_be64(at + ATOMIC_ETH.va, m.raddr)
    st32(at + ATOMIC_ETH.rkey, be32(m.rkey))
    put_be64(at + ATOMIC_ETH.swap_add, m.swap_add)
    put_be64(at + ATOMIC_ETH.compare, m.compare)
    close_packet(nic, row, bth, BTH.size + ATOMIC_ETH.size, 0)
    _await_response(row, 1)
    return 1


@device_function
def _await_response(row, packets):
    """A request that is answered in `packets` packets has been sent."""
    q = qp_row_at(row)
    q.tx_psn += packets
    st64(row + QP_ROW.read_ends + 8 * (q.reads_head & (MAX_RD_ATOMIC - 1)), q.tx_psn)
    q.reads_head += 1


@engine_function
def _send_flight(nic, row):
    """Packets of the WQE at `sq_next`: how many, 0 if it has to wait or has failed."""
    q = qp_row_at(row)
    index = q.sq_next
    flight = flight_of(row, index)
    f = flight_at(flight)
    message = nic_at(nic).message
    wqe = in_one_piece(row, message, wqe_slot(row, index), index, f.blocks)
    # Its keys are looked up again for each burst: what has been deregistered meanwhile is not sent.
    reason = build(nic, row, message, wqe, f.opcode, f.ds, index)
    if reason == 0 and message_at(message).nbytes != f.nbytes:
        explain(nic, 0, 0, 0, f.ds, 0)
        reason = _MALFORMED
    if reason != 0:
        local_failure(nic, row, index, f.opcode, f.ce, reason, f.blocks)
        return 0
    if f.opcode == _READ:
        sent = _send_read(nic, row, message, flight)
    elif answered(f.opcode):
        sent = _send_atomic(nic, row, message, flight)
    else:
        sent = _send_data(nic, row, message, flight, wqe, ld8(wqe + CTRL_SEG.fm_ce_se) & _SOLICITED)
        if sent < 0:
            local_failure(nic, row, index, f.opcode, f.ce, -sent, f.blocks)
            return 0
    if q.tx_psn == f.first + f.packets:
        q.sq_next = index + f.blocks
    return sent


@engine_function
def _send(nic, row):
    """Send what may be sent: how many WQEs and packets that was."""
    q = qp_row_at(row)
    done = 0
    while done < BURST and q.state == _RTS:
        if _probing(nic, row) and q.tx_psn != q.una_psn:
            break
        if q.sq_next == q.sq_sent and (q.sq_next == q.sq_pi or _start(nic, row) == 0):
            break
        f = flight_at(flight_of(row, q.sq_next))
        if f.packets == 0:  # a WQE that the peer does not hear of, and that has been carried out
            q.sq_next += f.blocks
            acknowledge(nic, row, q.una_psn)
            done += 1
            continue
        sent = _send_flight(nic, row)
        if sent == 0:
            break
        done += sent
        if q.service != _RC:  # nobody acknowledges
            acknowledge(nic, row, q.tx_psn)
    return done


# --- acknowledgements ----------------------------------------------------------------------------------------------


@engine_function
def acknowledge(nic, row, target):
    """Everything below PSN `target` has arrived: complete those WQEs.

    1 if a READ or atomic below it has not been answered, which says that its response got lost (IBTA 9.7.5.1.2).
    """
    q = qp_row_at(row)
    before = q.una_psn
    implied = 0
    while q.sq_ci != q.sq_sent and q.state == _RTS:
        f = flight_at(flight_of(row, q.sq_ci))
        end = f.first + f.packets
        if answered(f.opcode) and end > q.una_psn:
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
        q.held_back = max(q.held_back - 1, 0)
        q.retries = 0
        q.rnr_retries = 0
        q.timer_at = 0
        q.hurry = 0
    if q.sq_next < q.sq_ci or q.tx_psn < q.una_psn:  # acknowledged what was about to be sent again
        q.sq_next = max(q.sq_next, q.sq_ci)
        q.tx_psn = max(q.tx_psn, q.una_psn)
        if nic_at(nic).mover_count != 0:
            drop_acknowledged(nic, row)
    return implied


@device_function
def go_back(row):
    """Send again from the oldest packet that is not acknowledged (go-back-N, IBTA 9.7.5.1.1)."""
    q = qp_row_at(row)
    q.high_psn = max(q.high_psn, q.tx_psn)
    q.sq_next = q.sq_ci
    q.tx_psn = q.una_psn
    q.reads_tail = q.reads_head
    q.timer_at = 0


@engine_function
def fail_oldest(nic, row, reason):
    """The oldest WQE in flight fails, and with it the QP."""
    q = qp_row_at(row)
    index = q.sq_ci
    f = flight_at(flight_of(row, index))
    if q.mover != 0 and answered(f.opcode):
        let_arrive(nic, row)
    q.sq_ci = index + f.blocks
    q.sq_next = q.sq_ci
    q.sq_sent = q.sq_ci
    fail_send(nic, row, index, f.opcode, f.ce, reason)


@engine_function
def retry(nic, row):
    """Nothing came back, or a packet got lost: send again, or fail once retry_cnt is used up."""
    q = qp_row_at(row)
    if q.retries >= q.retry_cnt:
        explain(nic, 0, 0, 0, q.remote_qpn, q.retry_cnt)
        fail_oldest(nic, row, _NO_RESPONSE)
        return
    q.retries += 1
    # What was sent behind a lost packet was sent in vain: half of the window from here on, which grows again.
    window = wire_at(q.wire).window
    q.held_back = window - min(window, max((window - q.held_back) >> 1, LEAST_WINDOW))
    go_back(row)


@device_function
def hurry(nic, row):
    """The peer has asked for a packet, and does so once: if that is lost again, nobody tells.

    So the timer is a short one at first, and longer each time. What it sends again is that packet alone, and counts as
    no retry: the peer may only be slow. Not so READs: a slow peer would answer each of them, at length.
    """
    q = qp_row_at(row)
    if not answered(flight_at(flight_of(row, q.sq_ci)).opcode):
        q.hurry = nic_at(nic).min_timeout


@device_function
def _probing(nic, row):
    """Whether only the oldest packet is sent, until the peer says that it has it."""
    return qp_row_at(row).hurry > nic_at(nic).min_timeout


@engine_function
def retry_gap(nic, row):
    """A response is missing, as a later one shows: an implied NAK, which is a retry like others (IBTA 9.9.2.4.1.1).

    The rest of what is on its way shows the same gap: it is asked for again once, and after that when the timer says.
    """
    q = qp_row_at(row)
    counters_at(nic_at(nic).counters).implied_nak_seq_err += 1
    if q.gap_psn != q.una_psn + 1:
        q.gap_psn = q.una_psn + 1
        retry(nic, row)


@engine_function
def retry_rnr(nic, row, delay_ns):
    """The receiver was not ready: send again after its timer, or fail once rnr_retry is used up (IBTA 9.7.5.2.8).

    The packet has arrived: what was lost before is made up for. The packets behind it, which a slow peer may still
    complain of when they are on their way again, must not use up the retries.
    """
    q = qp_row_at(row)
    counters_at(nic_at(nic).counters).rnr_nak_retry_err += 1
    if q.rnr_retries >= q.rnr_retry and q.rnr_retry != ENDLESS_RNR:
        explain(nic, 0, 0, 0, q.rnr_retry, 0)
        fail_oldest(nic, row, _RNR)
        return
    q.rnr_retries += 1
    q.retries = 0
    go_back(row)
    q.retry_at = nic_at(nic).now + delay_ns


@device_function
def _patience(nic, row):
    """How long to wait for an acknowledgement before the next retry, in nanoseconds."""
    q = qp_row_at(row)
    return max(q.timeout_ns, nic_at(nic).min_timeout) << min(q.retries, MAX_PATIENCE)


@device_function
def _waits_for_peer(nic, row):
    """Whether it is the peer's turn: packets are on their way to it, or the wire is full of what it has not taken.

    Not while a WAIT is open, nor while bytes of the first packet are fetched.
    """
    q = qp_row_at(row)
    return q.tx_psn != q.una_psn or (
        q.sq_next != q.sq_sent and open_packet(nic, row, q.life, BTH.size + RETH.size + IMM_DT.size + q.mtu) == 0
    )


@engine_function
def serve(nic, row):
    """Timers, then packets: how much was done."""
    q = qp_row_at(row)
    n = nic_at(nic)
    if q.retry_at != 0:
        if n.now < q.retry_at:
            return 0
        q.retry_at = 0
    if q.timer_at != 0 and n.now >= q.timer_at:
        q.timer_at = 0
        q.gap_psn = 0
        counters_at(n.counters).local_ack_timeout_err += 1
        if q.hurry != 0 and q.hurry < _patience(nic, row):
            q.hurry <<= HURRY_SHIFT
            go_back(row)
        else:
            q.hurry = 0
            retry(nic, row)
    done = _send(nic, row)
    if q.timer_at == 0 and q.timeout_ns != 0 and q.service == _RC and _waits_for_peer(nic, row):
        patience = _patience(nic, row)
        q.timer_at = n.now + (patience if q.hurry == 0 else min(patience, q.hurry))
    return done


@device_function
def unwrap(psn, near):
    """The 64-bit PSN whose low 24 bits are `psn`, within half a range of `near`."""
    distance = (psn - near) & PSN_MASK
    if distance >= MAX_OUTSTANDING:
        distance -= PSN_MASK + 1
    return near + distance
