"""Validates packets that arrive on any wire, and delivers them to their QPs (IBTA 9.6.1)."""

from __future__ import annotations

from ...fabric.capture import CaptureRing, capture
from ...fabric.frames import traffic_of
from ...formats.commands import QpState, ServiceType
from ...formats.packet import (
    BTH, DEFAULT_PKEY, GRH, GRH_NEXT_HEADER, ICRC_SIZE, LNH_GLOBAL, LNH_LOCAL, LRH, MANUFACTURER, OPERATION_MASK,
    PAD_SHIFT, PKEY_BASE_MASK, QPN_MASK, RESERVED, SERVICE_SHIFT, TVER_MASK, UD_SERVICE,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, clock_ns, ld16, ld32, ld64, ld8
from ..queues.operations import is_request, service_bits
from ..queues.psn import on_wire
from ..state.counters import CounterSet
from ..state.objects import GID_ROW
from ..state.qp import QP_ROW, QpRow
from ..state.wire import WireState
from ..state.worker import WorkerState
from .execution import establish
from .responder import take_request
from .responses import is_response, take_response
from .ud_receive import take_datagram

_DEFAULT_PKEY_BASE = DEFAULT_PKEY & PKEY_BASE_MASK
_LVER_MASK, _LNH_MASK, _LENGTH_MASK = 0x0F, 0x03, 0x07FF
_GRH_VERSION = 6
BATCH = 64  # packets of one wire in a turn


@device_function
def qp_row(worker: WorkerState, qpn: int) -> QpRow:
    """Return the row where `qpn` would be."""
    return QpRow(worker.qps + (qpn & worker.qp_mask) * QP_ROW.size)


@device_function
def _link_headers(worker: WorkerState, packet: int, nbytes: int) -> int:
    """Return the bytes of InfiniBand link headers before the BTH, or -1 if they are invalid or for another port.

    IBTA 7.7.4 to 7.7.8 specify the LRH checks, 9.6.1.2 those of the GRH.
    """
    if nbytes < LRH.size or be16(ld16(packet + LRH.dlid)) != worker.lid:
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
    gid = worker.gids + GID_ROW.gid  # an InfiniBand port has only this one
    if ld64(gid) != ld64(grh + GRH.dgid) or ld64(gid + 8) != ld64(grh + GRH.dgid + 8):
        return -1
    return LRH.size + GRH.size


@device_function
def _is_of_peer(qp: QpRow, life: int) -> bool:
    """Return whether a request is from the peer's current life, or from a later one that begins at the expected PSN.

    A later life that begins at another PSN belongs to another connection. Its first packets might be taken for
    duplicates of old ones, and so be acknowledged but never executed. UC has no duplicates.
    """
    if life == qp.peer_life or life == 0:
        return True
    if life < qp.peer_life or (qp.peer_life != 0 and qp.service == ServiceType.RC and on_wire(life) != qp.expect_psn):
        return False
    qp.peer_life = life
    return True


@device_function
def has_many_peers(wire: WireState) -> bool:
    """Return whether a wire leads to any number of peers. Then it names none, and every packet says whose it is."""
    return wire.peer_high | wire.peer_low == 0


@engine_function
def receive(
    worker: WorkerState, wire: WireState, packet: int, nbytes: int, peer_high: int, peer_low: int, life: int, at: int
) -> None:
    """Take and count a packet of `nbytes`, whose ICRC was checked if the wire has one.

    `life` is the frame's, 0 on UDP; `at` is the packet's position on the wire.
    """
    CounterSet(worker.counters).rdma_rx_packets += 1
    link = 0
    if wire.infiniband:
        link = _link_headers(worker, packet, nbytes)
        if link < 0:
            link = nbytes  # none of its bytes can be trusted
    qp = QpRow(addressee(worker, wire, packet + link, nbytes - link, peer_high, peer_low, at))
    if qp != 0:
        hand_over(worker, qp, wire, packet, link, nbytes - link, peer_high, peer_low, life)


@device_function
def addressee(
    worker: WorkerState, wire: WireState, bth: int, nbytes: int, peer_high: int, peer_low: int, at: int
) -> int:
    """Return the row of the QP that expects a packet, `nbytes` from its BTH on. If none does, count it and return 0.

    `at` is the packet's position on the wire: a QP takes no packet that was on the wire before the QP was in RTR. Every
    length is checked before the bytes are read (IBTA 9.6.1, packet header validation).
    """
    counters = CounterSet(worker.counters)
    if worker.link_down:
        counters.rx_link_down += 1
        return 0
    if nbytes < BTH.size:
        counters.rx_malformed += 1
        return 0
    if ld8(bth + BTH.se_m_pad_tver) & TVER_MASK != 0 or nbytes & 3 != 0:
        counters.rx_malformed += 1
        return 0
    qpn = be32(ld32(bth + BTH.resv_dest_qp)) & QPN_MASK
    qp = qp_row(worker, qpn)
    if qp.qpn != qpn or qpn == 0:
        counters.rx_no_qp += 1
        return 0
    datagrams = qp.service == ServiceType.UD
    elsewhere = qp.wire != wire or (has_many_peers(wire) and (qp.peer_high != peer_high or qp.peer_low != peer_low))
    if elsewhere and not datagrams:  # a datagram may come from anywhere
        counters.rx_wrong_peer += 1
        return 0
    if be16(ld16(bth + BTH.pkey)) & PKEY_BASE_MASK != _DEFAULT_PKEY_BASE:
        counters.rx_wrong_pkey += 1
        return 0
    if qp.state != QpState.RTR and qp.state != QpState.RTS:
        counters.rx_wrong_state += 1
        return 0
    if at < qp.rx_from:
        counters.rx_stale += 1
        return 0
    service = ld8(bth + BTH.opcode) >> SERVICE_SHIFT
    of_manufacturer = service == MANUFACTURER and qp.service == ServiceType.RC
    if service != (UD_SERVICE if datagrams else qp.service) and not of_manufacturer:
        counters.rx_malformed += 1
        return 0
    return qp


@device_function
def take_checked(
    worker: WorkerState, qp: QpRow, wire: WireState, bth: int, nbytes: int, peer_high: int, peer_low: int
) -> int:
    """Count a packet of a wire without link headers, and hand it to the QP in `qp`, if `addressee` has found one.

    Its ICRC was checked. Return 1 if a QP has got it.
    """
    CounterSet(worker.counters).rdma_rx_packets += 1
    if qp == 0:
        return 0
    hand_over(worker, qp, wire, bth, 0, nbytes, peer_high, peer_low, 0)
    return 1


@device_function
def date_captured(worker: WorkerState, count: int) -> None:
    """Before `count` packets that have just arrived are captured, read the clock.

    The last turn's time may be from before a sleep.
    """
    if worker.capture != 0 and worker.virtual_time == 0 and count > 0:
        worker.now = clock_ns()


@engine_function
def capture_arrived(
    worker: WorkerState, wire: WireState, packet: int, nbytes: int, peer_high: int, peer_low: int, damaged: int,
    sent: int,
) -> None:
    """Capture a packet of a wire whose frames don't say to which of our GIDs they were sent: its QP's path says it.

    `sent` is the frame's `source`, which its sender has set.
    """
    source = 0
    if nbytes >= BTH.size and not wire.infiniband:
        qpn = be32(ld32(packet + BTH.resv_dest_qp)) & QPN_MASK
        qp = qp_row(worker, qpn)
        if qp.qpn == qpn and qp.wire == wire:
            peer_high, peer_low, source = qp.peer_high, qp.peer_low, qp.source
    source |= traffic_of(sent)
    capture(CaptureRing(worker.capture), packet, nbytes, peer_high, peer_low, source, damaged, worker.now, 0)


@device_function
def hand_over(
    worker: WorkerState, qp: QpRow, wire: WireState, packet: int, link: int, nbytes: int, peer_high: int,
    peer_low: int, life: int,
) -> None:
    """Hand a packet to the QP that `addressee` has found: `link` bytes of link headers, `nbytes` from its BTH on."""
    if qp.service == ServiceType.UD:
        take_datagram(worker, qp, wire, packet, link, nbytes, peer_high, peer_low)
    else:
        _deliver(worker, qp, packet + link, nbytes, life)


@device_function
def _operation(opcode: int, service: int) -> int:
    """Return the operation in an opcode, or RESERVED if it is one only in the range for manufacturers, or outside."""
    operation = opcode & OPERATION_MASK
    return operation if (opcode >> SERVICE_SHIFT) - service == service_bits(operation) else RESERVED


@engine_function
def _deliver(worker: WorkerState, qp: QpRow, bth: int, nbytes: int, life: int) -> None:
    """Deliver a packet of a connection, `nbytes` from its BTH on."""
    counters = CounterSet(worker.counters)
    pad = (ld8(bth + BTH.se_m_pad_tver) >> PAD_SHIFT) & 3
    word = be32(ld32(bth + BTH.ack_psn))
    psn = on_wire(word)
    operation = _operation(ld8(bth + BTH.opcode), qp.service)
    if qp.service != ServiceType.RC and not is_request(operation, qp.service):
        counters.rx_malformed += 1
        return
    if qp.service == ServiceType.RC and is_response(operation):
        if qp.state != QpState.RTS:
            counters.rx_wrong_state += 1
        elif life != qp.life and life != 0:
            counters.rx_stale += 1
        else:
            take_response(worker, qp, operation, psn, bth, nbytes, pad)
        return
    if not _is_of_peer(qp, life):
        counters.rx_stale += 1
        return
    establish(worker, qp)
    take_request(worker, qp, operation, psn, word >> 31, bth, nbytes, pad)
