"""The engine's side of the UDP wire: takes datagrams. It makes system calls, so the engine must be on a CPU."""

from __future__ import annotations

from ...fabric.capture import CaptureRing, capture
from ...fabric.udp_receive import check, found_empty, receive as receive_udp
from ...fabric.udp_records import DATAGRAM, ICRC_WRONG, Datagram, UdpEnd, mark
from ...fabric.udp_transmit import transmit
from ...jit.compile import engine_function
from ..state.counters import CounterSet
from ..state.qp import QpRow
from ..state.wire import WireState
from ..state.worker import WorkerState
from .delivery import BATCH, addressee, date_captured, receive, take_checked

ROUNDS = 16  # batches per socket and turn


@engine_function
def _collect_counts(worker: WorkerState, udp: UdpEnd) -> None:
    """Move the counts of the UDP wire into the NIC's counters."""
    counters = CounterSet(worker.counters)
    counters.rx_icrc_encapsulated += udp.rx_icrc_encapsulated
    counters.rx_malformed += udp.rx_malformed
    counters.rx_weak_icrc += udp.weak_icrc
    counters.tx_dropped += udp.tx_dropped
    udp.rx_icrc_encapsulated = 0
    udp.rx_malformed = 0
    udp.weak_icrc = 0
    udp.tx_dropped = 0


@engine_function
def _take(worker: WorkerState, wire: WireState, datagram: Datagram, at: int) -> int:
    """Take a packet, whose position on the wire is `at`. Return 1 if it is intact and for a QP of this NIC.

    Peer and QP are checked before the ICRC, so that packets of strangers cost little. A capture shows every packet that
    is intact.
    """
    worker.arrived_at = datagram.source
    if worker.capture != 0:
        if check(UdpEnd(wire.medium), datagram) == ICRC_WRONG:
            return 0
        capture(
            CaptureRing(worker.capture), datagram.packet, datagram.nbytes, datagram.peer_high, datagram.peer_low,
            datagram.source, 0, worker.now, 0,
        )
        receive(worker, wire, datagram.packet, datagram.nbytes, datagram.peer_high, datagram.peer_low, 0, at)
        return 1
    qp = QpRow(addressee(worker, wire, datagram.packet, datagram.nbytes, datagram.peer_high, datagram.peer_low, at))
    if qp != 0 and check(UdpEnd(wire.medium), datagram) == ICRC_WRONG:
        return 0
    return take_checked(worker, qp, wire, datagram.packet, datagram.nbytes, datagram.peer_high, datagram.peer_low)


@engine_function
def serve_socket(worker: WorkerState, wire: WireState, index: int) -> int:
    """Take a socket's share of packets in this turn. Return how many packets that was.

    The share ends with the batch that brings the BATCHth packet for a QP of this NIC, or after ROUNDS batches.
    Strangers' packets do not count against it: they would fill the socket's buffer, and packets for this NIC would be
    lost.
    """
    udp = UdpEnd(wire.medium)
    done = 0
    ours = 0
    for _ in range(ROUNDS):
        at = udp.position
        count = receive_udp(udp, index)
        date_captured(worker, count)
        for j in range(count):
            ours += _take(worker, wire, Datagram(udp.datagrams + j * DATAGRAM.size), at)
        done += count
        if udp.rx_more == 0 or ours >= BATCH:
            break
    return done


@engine_function
def take_datagrams(worker: WorkerState, wire: WireState) -> int:
    """Take the packets that have arrived at the wire's sockets. Return how many."""
    udp = UdpEnd(wire.medium)
    done = 0
    empty = 1
    for j in range(udp.socket_count):
        done += serve_socket(worker, wire, j)
        if udp.rx_more != 0:
            empty = 0
    worker.arrived_at = -1
    if empty != 0:
        found_empty(UdpEnd(wire.medium))
    if udp.rx_icrc_encapsulated | udp.rx_malformed | udp.weak_icrc | udp.tx_dropped:
        _collect_counts(worker, UdpEnd(wire.medium))
    return done


@engine_function
def send_out(worker: WorkerState, wire: WireState) -> int:
    """Send the frames that wait for the sockets."""
    return transmit(UdpEnd(wire.medium))


@engine_function
def arrivals(wire: WireState) -> int:
    """Return the position from which on everything has arrived after this call."""
    return mark(UdpEnd(wire.medium))


@engine_function
def unsent(wire: WireState) -> int:
    """Return the end of the pipe of frames that wait for the sockets."""
    return UdpEnd(wire.medium).tx
