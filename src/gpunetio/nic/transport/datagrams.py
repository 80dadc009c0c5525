"""The engine's side of the UDP wire: takes datagrams. It makes system calls, so the engine must be on a CPU."""

from __future__ import annotations

from ...fabric.capture import capture
from ...fabric.udp_receive import check, found_empty, receive as receive_udp
from ...fabric.udp_records import DATAGRAM, ICRC_WRONG, datagram_at, mark, udp_wire_at
from ...fabric.udp_transmit import transmit
from ...jit.compile import engine_function
from ..state.counters import CounterSet
from ..state.qp import QpRow
from ..state.wire import WireState
from ..state.worker import WorkerState
from .delivery import BATCH, addressee, date_captured, receive, take_checked

ROUNDS = 16  # batches per socket and turn


@engine_function
def _collect_counts(worker: WorkerState, udp: int) -> None:
    """Move the counts of the UDP wire into the NIC's counters."""
    counters = CounterSet(worker.counters)
    u = udp_wire_at(udp)
    counters.rx_icrc_encapsulated += u.rx_icrc_encapsulated
    counters.rx_malformed += u.rx_malformed
    counters.rx_weak_icrc += u.weak_icrc
    counters.tx_dropped += u.tx_dropped
    u.rx_icrc_encapsulated = 0
    u.rx_malformed = 0
    u.weak_icrc = 0
    u.tx_dropped = 0


@engine_function
def _take(worker: WorkerState, wire: WireState, datagram: int, at: int) -> int:
    """Take a packet, whose position on the wire is `at`. Return 1 if it is intact and for a QP of this NIC.

    Peer and QP are checked before the ICRC, so that packets of strangers cost little. A capture shows every packet that
    is intact.
    """
    d = datagram_at(datagram)
    worker.arrived_at = d.source
    if worker.capture != 0:
        if check(wire.medium, datagram) == ICRC_WRONG:
            return 0
        capture(worker.capture, d.packet, d.nbytes, d.peer_high, d.peer_low, d.source, 0, worker.now, 0)
        receive(worker, wire, d.packet, d.nbytes, d.peer_high, d.peer_low, 0, at)
        return 1
    qp = QpRow(addressee(worker, wire, d.packet, d.nbytes, d.peer_high, d.peer_low, at))
    if qp != 0 and check(wire.medium, datagram) == ICRC_WRONG:
        return 0
    return take_checked(worker, qp, wire, d.packet, d.nbytes, d.peer_high, d.peer_low)


@engine_function
def serve_socket(worker: WorkerState, wire: WireState, index: int) -> int:
    """Take a socket's share of packets in this turn. Return how many packets that was.

    The share ends with the batch that brings the BATCHth packet for a QP of this NIC, or after ROUNDS batches.
    Strangers' packets do not count against it: they would fill the socket's buffer, and packets for this NIC would be
    lost.
    """
    udp = wire.medium
    u = udp_wire_at(udp)
    done = 0
    ours = 0
    for _ in range(ROUNDS):
        at = u.position
        count = receive_udp(udp, index)
        date_captured(worker, count)
        for j in range(count):
            ours += _take(worker, wire, u.datagrams + j * DATAGRAM.size, at)
        done += count
        if u.rx_more == 0 or ours >= BATCH:
            break
    return done


@engine_function
def take_datagrams(worker: WorkerState, wire: WireState) -> int:
    """Take the packets that have arrived at the wire's sockets. Return how many."""
    u = udp_wire_at(wire.medium)
    done = 0
    empty = 1
    for j in range(u.socket_count):
        done += serve_socket(worker, wire, j)
        if u.rx_more != 0:
            empty = 0
    worker.arrived_at = -1
    if empty != 0:
        found_empty(wire.medium)
    if u.rx_icrc_encapsulated | u.rx_malformed | u.weak_icrc | u.tx_dropped:
        _collect_counts(worker, wire.medium)
    return done


@engine_function
def send_out(worker: WorkerState, wire: WireState) -> int:
    """Send the frames that wait for the sockets."""
    return transmit(wire.medium)


@engine_function
def arrivals(wire: WireState) -> int:
    """Return the position from which on everything has arrived after this call."""
    return mark(wire.medium)


@engine_function
def unsent(wire: WireState) -> int:
    """Return the end of the pipe of frames that wait for the sockets."""
    return udp_wire_at(wire.medium).tx
