"""The engine's side of the wires: delivers packets to QPs, and sends out at the end of a turn what is due."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, ld8, ld16, ld32, ld64, ld_acquire64, st64
from ...fabric.capture import capture
from ...fabric.injector import icrc_fits, inject, recall_injected
from ...fabric.frames import (
    LENT_SHIFT, LOAN_SHIFT, MAX_LENT, PACKET, PIPE, consume, frame_at, next_frame, pipe_end_at, publish, recall,
    release,
)  # fmt: skip
from ...fabric.udp_records import mark, udp_wire_at
from ...formats.commands import QpState, ServiceType
from ...formats.packet import (
    BTH, DEFAULT_PKEY, GRH, GRH_NEXT_HEADER, ICRC_SIZE, LNH_GLOBAL, LNH_LOCAL, LRH, OPERATION_MASK, PAD_SHIFT,
    PKEY_BASE_MASK, PSN_MASK, QPN_MASK, SERVICE_SHIFT, TVER_MASK, PacketOpcode,
)  # fmt: skip
from .packets import link_bytes
from .receiver import serve_due, take_request
from .responder import establish
from .responses import is_response, take_response
from ..state.tables import (
    GID_ROW, LOAN, LOANS, PIPES, QP_ROW, UDP, WIRE, counters_at, loan_at, nic_at, qp_row_at, wire_at,
)  # fmt: skip

_RTR, _RTS, _RC = int(QpState.RTR), int(QpState.RTS), int(ServiceType.RC)
_LAST_OF_WRITE = int(PacketOpcode.RC_WRITE_ONLY_IMM)
_DEFAULT_PKEY_BASE = DEFAULT_PKEY & PKEY_BASE_MASK
_LVER_MASK, _LNH_MASK, _LENGTH_MASK = 0x0F, 0x03, 0x07FF
_GRH_VERSION = 6
BATCH = 64  # packets of one wire in a turn


@device_function
def qp_row(nic, qpn):
    """Return the address of the row where `qpn` would be."""
    n = nic_at(nic)
    return n.qps + (qpn & n.qp_mask) * QP_ROW.size


@device_function
def _link_headers(nic, packet, nbytes):
    """Return the bytes of InfiniBand link headers before the BTH, or -1 if they are invalid or for another port.

    IBTA 7.7.4 to 7.7.8 specify the LRH checks, 9.6.1.2 those of the GRH.
    """
    n = nic_at(nic)
    if nbytes < LRH.size or be16(ld16(packet + LRH.dlid)) != n.lid:
        return -1
    words = (nbytes + ICRC_SIZE) >> 2
    if ld8(packet + LRH.vl_lver) & _LVER_MASK != 0 or be16(ld16(packet + LRH.length)) & _LENGTH_MASK != words:
        return -1
    lnh = ld8(packet + LRH.sl_lnh) & _LNH_MASK
    if lnh == LNH_LOCAL:
        return LRH.size
    if lnh != LNH_GLOBAL or nbytes < LRH.size + GRH.size:
        return -1
    grh = packet + LRH.size
    if ld8(grh) >> 4 != _GRH_VERSION or ld8(grh + GRH.next_header) != GRH_NEXT_HEADER:
        return -1
    gid = n.gids + GID_ROW.gid  # an InfiniBand port has only this one
    if ld64(gid) != ld64(grh + GRH.dgid) or ld64(gid + 8) != ld64(grh + GRH.dgid + 8):
        return -1
    return LRH.size + GRH.size


@device_function
def arrivals(row):
    """Return the position on the QP's wire where packets that arrive from now on begin."""
    q = qp_row_at(row)
    if q.wire == 0:
        return 0
    w = wire_at(q.wire)
    if w.kind == UDP:
        return mark(w.udp)
    return ld_acquire64(pipe_end_at(q.wire + WIRE.rx).pipe + PIPE.head)


@device_function
def _is_of_peer(row, life):
    """Return whether a request is from the peer's current life, or from a later one that begins at the expected PSN.

    A later life that begins at another PSN belongs to another connection. Its first packets might be taken for
    duplicates of old ones, and so be acknowledged but never executed. UC has no duplicates.
    """
    q = qp_row_at(row)
    if life == q.peer_life or life == 0:
        return True
    if life < q.peer_life or (q.peer_life != 0 and q.service == _RC and life & PSN_MASK != q.expect_psn):
        return False
    q.peer_life = life
    return True


@engine_function
def receive(nic, wire, packet, nbytes, peer_high, peer_low, life, at):
    """Take and count a packet of `nbytes`, whose ICRC was checked if the wire has one.

    `life` is the frame's, 0 on UDP; `at` is the packet's position on the wire.
    """
    counters_at(nic_at(nic).counters).rdma_rx_packets += 1
    link = 0
    if wire_at(wire).infiniband:
        link = _link_headers(nic, packet, nbytes)
        if link < 0:
            link = nbytes  # none of its bytes can be trusted
    row = addressee(nic, wire, packet + link, nbytes - link, peer_high, peer_low, at)
    if row != 0:
        deliver(nic, row, packet + link, nbytes - link, life)


@engine_function
def addressee(nic, wire, bth, nbytes, peer_high, peer_low, at):
    """Return the row of the QP that expects a packet, `nbytes` from its BTH on. If none does, count it and return 0.

    `at` is the packet's position on the wire: a QP takes no packet that was on the wire before the QP was in RTR. Every
    length is checked before the bytes are read (IBTA 9.6.1, packet header validation).
    """
    n = nic_at(nic)
    w = wire_at(wire)
    c = counters_at(n.counters)
    if n.link_down:
        c.rx_link_down += 1
        return 0
    if nbytes < BTH.size:
        c.rx_malformed += 1
        return 0
    if ld8(bth + BTH.se_m_pad_tver) & TVER_MASK != 0 or nbytes & 3 != 0:
        c.rx_malformed += 1
        return 0
    qpn = be32(ld32(bth + BTH.resv_dest_qp)) & QPN_MASK
    row = qp_row(nic, qpn)
    q = qp_row_at(row)
    if q.qpn != qpn or qpn == 0:
        c.rx_no_qp += 1
        return 0
    if q.wire != wire or (w.kind == UDP and (q.peer_high != peer_high or q.peer_low != peer_low)):
        c.rx_wrong_peer += 1
        return 0
    if be16(ld16(bth + BTH.pkey)) & PKEY_BASE_MASK != _DEFAULT_PKEY_BASE:
        c.rx_wrong_pkey += 1
        return 0
    if q.state != _RTR and q.state != _RTS:
        c.rx_wrong_state += 1
        return 0
    if at < q.rx_from:
        c.rx_stale += 1
        return 0
    if ld8(bth + BTH.opcode) >> SERVICE_SHIFT != q.service:
        c.rx_malformed += 1
        return 0
    return row


@engine_function
def deliver(nic, row, bth, nbytes, life):
    """Deliver a packet, `nbytes` from its BTH on, to the QP that `addressee` has found."""
    q = qp_row_at(row)
    c = counters_at(nic_at(nic).counters)
    opcode = ld8(bth + BTH.opcode)
    pad = (ld8(bth + BTH.se_m_pad_tver) >> PAD_SHIFT) & 3
    word = be32(ld32(bth + BTH.ack_psn))
    psn = word & PSN_MASK
    operation = opcode & OPERATION_MASK
    if q.service != _RC and operation > _LAST_OF_WRITE:
        c.rx_malformed += 1
        return
    if q.service == _RC and is_response(operation):
        if q.state != _RTS:
            c.rx_wrong_state += 1
        elif life != q.life and life != 0:
            c.rx_stale += 1
        else:
            take_response(nic, row, operation, psn, bth, nbytes, pad)
        return
    if not _is_of_peer(row, life):
        c.rx_stale += 1
        return
    establish(nic, row)
    take_request(nic, row, operation, psn, word >> 31, bth, nbytes, pad)


@device_function
def _undamaged(nic, wire, frame, nbytes):
    """Return whether a frame's ICRC is right or absent. Between NICs of one host, only a fault injector adds one."""
    w = wire_at(wire)
    f = frame_at(frame)
    if f.icrc == 0 or icrc_fits(
        nic_at(nic).scratch, frame + PACKET, nbytes, w.peer_high, w.peer_low, w.here_high, w.here_low
    ):  # fmt: skip
        return True
    counters_at(nic_at(nic).counters).rx_icrc_encapsulated += 1
    return False


@device_function
def _count_malformed(nic):
    c = counters_at(nic_at(nic).counters)
    c.rdma_rx_packets += 1
    c.rx_malformed += 1


@engine_function
def _receive_lent(nic, wire, packet, nbytes, reference, life, at):
    """Take a packet whose payload is in memory that the peer has lent us. Its reference is checked, not trusted."""
    n = nic_at(nic)
    w = wire_at(wire)
    number = reference >> LOAN_SHIFT
    if w.loans == 0 or number <= 0:
        _count_malformed(nic)
        return
    loan = loan_at(w.loans + (number & (LOANS - 1)) * LOAN.size)
    part = (reference >> LENT_SHIFT) & ((1 << LOAN_SHIFT - LENT_SHIFT) - 1)
    offset = reference & (MAX_LENT - 1)
    if loan.number != number or part == 0 or offset > loan.nbytes - part:
        _count_malformed(nic)
        return
    n.payload, n.payload_bytes = loan.address + offset, part
    receive(nic, wire, packet, nbytes, w.peer_high, w.peer_low, life, at)
    n.payload_bytes = 0


@engine_function
def _serve_pipe(nic, wire):
    """Take packets that a NIC of this host has put into the pipe: return how many."""
    n = nic_at(nic)
    w = wire_at(wire)
    end = wire + WIRE.rx
    done = 0
    while done < BATCH and not w.broken:
        frame = next_frame(end)
        if frame == 0:
            break
        if frame < 0:  # the other end does not keep to the protocol
            w.broken = 1
            break
        nbytes = pipe_end_at(end).nbytes
        intact = nbytes < BTH.size or _undamaged(nic, wire, frame, nbytes)
        if n.capture != 0:
            damaged = 0 if intact else 1
            capture(n.capture, frame + PACKET, nbytes, w.peer_high, w.peer_low, -1, damaged, n.now, 0)
        if intact:
            reference, life = frame_at(frame).reference, frame_at(frame).life
            at = pipe_end_at(end).position
            if reference == 0:
                receive(nic, wire, frame + PACKET, nbytes, w.peer_high, w.peer_low, life, at)
            else:
                _receive_lent(nic, wire, frame + PACKET, nbytes, reference, life, at)
        consume(end)
        done += 1
    if done:
        release(end)
    return done


@engine_function
def serve_wires(nic):
    """Take packets from every pipe: return how many."""
    n = nic_at(nic)
    done = 0
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if wire_at(wire).kind == PIPES:
            done += _serve_pipe(nic, wire)
    return done


@engine_function
def send_due(nic):
    """Send what QPs owe their peers. A QP whose wire has no room stays on the list."""
    n = nic_at(nic)
    left = 0
    for i in range(n.due_count):
        row = ld64(n.due + 8 * i)
        if serve_due(nic, row):
            qp_row_at(row).due = 0
        else:
            st64(n.due + 8 * left, row)
            left += 1
    n.due_count = left


@engine_function
def forget_due(nic, row):
    """Remove a QP from the list of those that owe their peers something."""
    n = nic_at(nic)
    left = 0
    for i in range(n.due_count):
        other = ld64(n.due + 8 * i)
        if other != row:
            st64(n.due + 8 * left, other)
            left += 1
    n.due_count = left
    qp_row_at(row).due = 0


@engine_function
def recall_sent(row):
    """Take back packets of the QP that have not left this NIC: those in a fault injector or queued for the sockets."""
    q = qp_row_at(row)
    if q.wire == 0:
        return
    w = wire_at(q.wire)
    if w.faults != 0:
        recall_injected(w.faults, link_bytes(row), q.remote_qpn, q.peer_high, q.peer_low)
    if w.kind == UDP:
        recall(udp_wire_at(w.udp).tx, 0, q.remote_qpn, q.peer_high, q.peer_low)


@engine_function
def flush_wires(nic):
    """Publish what was sent in this turn to the other ends."""
    n = nic_at(nic)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        w = wire_at(wire)
        publish(wire + WIRE.tx)
        if w.faults != 0:
            inject(w.faults, n.now)
        if w.broken:  # nobody reads the pipe any more: packets sent are lost
            pipe_end_at(wire + WIRE.tx).seen = pipe_end_at(wire + WIRE.tx).position
