"""Validates packets that arrive on any wire, and delivers them to their QPs (IBTA 9.6.1)."""

from __future__ import annotations

from ...fabric.capture import capture
from ...fabric.frames import traffic_of
from ...formats.commands import QpState, ServiceType
from ...formats.packet import (
    BTH, DEFAULT_PKEY, GRH, GRH_NEXT_HEADER, ICRC_SIZE, LNH_GLOBAL, LNH_LOCAL, LRH, MANUFACTURER, OPERATION_MASK,
    PAD_SHIFT, PKEY_BASE_MASK, QPN_MASK, RESERVED, SERVICE_SHIFT, TVER_MASK, UD_SERVICE,
)  # fmt: skip
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, clock_ns, ld8, ld16, ld32, ld64
from ..queues.operations import is_request, service_bits
from ..queues.psn import on_wire
from ..state.counters import counters_at
from ..state.nic import nic_at
from ..state.objects import GID_ROW
from ..state.qp import QP_ROW, qp_row_at
from ..state.wire import wire_at
from ..state.worker import worker_at
from .execution import establish
from .responder import take_request
from .responses import is_response, take_response
from .ud_receive import take_datagram

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
def _is_of_peer(row, life):
    """Return whether a request is from the peer's current life, or from a later one that begins at the expected PSN.

    A later life that begins at another PSN belongs to another connection. Its first packets might be taken for
    duplicates of old ones, and so be acknowledged but never executed. UC has no duplicates.
    """
    q = qp_row_at(row)
    if life == q.peer_life or life == 0:
        return True
    if life < q.peer_life or (q.peer_life != 0 and q.service == ServiceType.RC and on_wire(life) != q.expect_psn):
        return False
    q.peer_life = life
    return True


@device_function
def has_many_peers(wire):
    """Return whether a wire leads to any number of peers. Then it names none, and every packet says whose it is."""
    w = wire_at(wire)
    return w.peer_high | w.peer_low == 0


@engine_function
def receive(nic, wire, packet, nbytes, peer_high, peer_low, life, at):
    """Take and count a packet of `nbytes`, whose ICRC was checked if the wire has one.

    `life` is the frame's, 0 on UDP; `at` is the packet's position on the wire.
    """
    counters_at(worker_at(nic).counters).rdma_rx_packets += 1
    link = 0
    if wire_at(wire).infiniband:
        link = _link_headers(nic, packet, nbytes)
        if link < 0:
            link = nbytes  # none of its bytes can be trusted
    row = addressee(nic, wire, packet + link, nbytes - link, peer_high, peer_low, at)
    if row != 0:
        hand_over(nic, row, wire, packet, link, nbytes - link, peer_high, peer_low, life)


@device_function
def addressee(nic, wire, bth, nbytes, peer_high, peer_low, at):
    """Return the row of the QP that expects a packet, `nbytes` from its BTH on. If none does, count it and return 0.

    `at` is the packet's position on the wire: a QP takes no packet that was on the wire before the QP was in RTR. Every
    length is checked before the bytes are read (IBTA 9.6.1, packet header validation).
    """
    n = worker_at(nic)
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
    datagrams = q.service == ServiceType.UD
    elsewhere = q.wire != wire or (has_many_peers(wire) and (q.peer_high != peer_high or q.peer_low != peer_low))
    if elsewhere and not datagrams:  # a datagram may come from anywhere
        c.rx_wrong_peer += 1
        return 0
    if be16(ld16(bth + BTH.pkey)) & PKEY_BASE_MASK != _DEFAULT_PKEY_BASE:
        c.rx_wrong_pkey += 1
        return 0
    if q.state != QpState.RTR and q.state != QpState.RTS:
        c.rx_wrong_state += 1
        return 0
    if at < q.rx_from:
        c.rx_stale += 1
        return 0
    service = ld8(bth + BTH.opcode) >> SERVICE_SHIFT
    of_manufacturer = service == MANUFACTURER and q.service == ServiceType.RC
    if service != (UD_SERVICE if datagrams else q.service) and not of_manufacturer:
        c.rx_malformed += 1
        return 0
    return row


@device_function
def take_checked(nic, row, wire, bth, nbytes, peer_high, peer_low):
    """Count a packet of a wire without link headers, and hand it to the QP in `row`, if `addressee` has found one.

    Its ICRC was checked. Return 1 if a QP has got it.
    """
    counters_at(worker_at(nic).counters).rdma_rx_packets += 1
    if row == 0:
        return 0
    hand_over(nic, row, wire, bth, 0, nbytes, peer_high, peer_low, 0)
    return 1


@device_function
def date_captured(nic, count):
    """Before `count` packets that have just arrived are captured, read the clock.

    The last turn's time may be from before a sleep.
    """
    n = worker_at(nic)
    if n.capture != 0 and n.virtual_time == 0 and count > 0:
        n.now = clock_ns()


@engine_function
def capture_arrived(nic, wire, packet, nbytes, peer_high, peer_low, damaged, sent):
    """Capture a packet of a wire whose frames don't say to which of our GIDs they were sent: its QP's path says it.

    `sent` is the frame's `source`, which its sender has set.
    """
    n = worker_at(nic)
    source = 0
    if nbytes >= BTH.size and not wire_at(wire).infiniband:
        qpn = be32(ld32(packet + BTH.resv_dest_qp)) & QPN_MASK
        q = qp_row_at(qp_row(nic, qpn))
        if q.qpn == qpn and q.wire == wire:
            peer_high, peer_low, source = q.peer_high, q.peer_low, q.source
    source |= traffic_of(sent)
    capture(n.capture, packet, nbytes, peer_high, peer_low, source, damaged, n.now, 0)


@device_function
def hand_over(nic, row, wire, packet, link, nbytes, peer_high, peer_low, life):
    """Hand a packet to the QP that `addressee` has found: `link` bytes of link headers, `nbytes` from its BTH on."""
    if qp_row_at(row).service == ServiceType.UD:
        take_datagram(nic, row, wire, packet, link, nbytes, peer_high, peer_low)
    else:
        _deliver(nic, row, packet + link, nbytes, life)


@device_function
def _operation(opcode, service):
    """Return the operation in an opcode, or RESERVED if it is one only in the range for manufacturers, or outside."""
    operation = opcode & OPERATION_MASK
    return operation if (opcode >> SERVICE_SHIFT) - service == service_bits(operation) else RESERVED


@engine_function
def _deliver(nic, row, bth, nbytes, life):
    """Deliver a packet of a connection, `nbytes` from its BTH on."""
    q = qp_row_at(row)
    c = counters_at(worker_at(nic).counters)
    pad = (ld8(bth + BTH.se_m_pad_tver) >> PAD_SHIFT) & 3
    word = be32(ld32(bth + BTH.ack_psn))
    psn = on_wire(word)
    operation = _operation(ld8(bth + BTH.opcode), q.service)
    if q.service != ServiceType.RC and not is_request(operation, q.service):
        c.rx_malformed += 1
        return
    if q.service == ServiceType.RC and is_response(operation):
        if q.state != QpState.RTS:
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
