"""The engine's side of the UDP wire: system calls, so for an engine on a CPU only."""

from __future__ import annotations

from ..device.compile import engine_function
from ..device.ops import clock_ns, ld64
from ..fabric.capture import capture
from ..fabric.udp_receive import receive as receive_udp
from ..fabric.udp_records import DATAGRAM, datagram_at, udp_wire_at
from ..fabric.udp_transmit import transmit
from .tables import UDP, counters_at, nic_at, wire_at
from .wires import receive


@engine_function
def _collect_counts(nic, udp):
    """Move what the sockets' side has counted into the NIC's counters."""
    c = counters_at(nic_at(nic).counters)
    u = udp_wire_at(udp)
    c.rx_icrc_encapsulated += u.rx_icrc_encapsulated
    c.rx_malformed += u.rx_malformed
    c.rx_weak_icrc += u.weak_icrc
    c.tx_dropped += u.tx_dropped
    u.rx_icrc_encapsulated = 0
    u.rx_malformed = 0
    u.weak_icrc = 0
    u.tx_dropped = 0


@engine_function
def receive_datagrams(nic):
    """Take what has arrived at the sockets: how many packets."""
    n = nic_at(nic)
    done = 0
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        w = wire_at(wire)
        if w.kind != UDP or n.paused or n.holding:
            continue
        u = udp_wire_at(w.udp)
        at = u.position
        count = receive_udp(w.udp)
        if n.capture != 0 and n.virtual_time == 0 and count > 0:
            n.now = clock_ns()  # that of the last turn may be from before a sleep
        for j in range(count):
            d = datagram_at(u.datagrams + j * DATAGRAM.size)
            if n.capture != 0:
                capture(n.capture, d.packet, d.nbytes, d.peer_high, d.peer_low, d.source, 0, n.now, 0)
            receive(nic, wire, d.packet, d.nbytes, d.peer_high, d.peer_low, 0, at)
        if u.rx_icrc_encapsulated | u.rx_malformed | u.weak_icrc | u.tx_dropped:
            _collect_counts(nic, w.udp)
        done += count
    return done


@engine_function
def send_datagrams(nic):
    """Send the frames that the NIC has left for the sockets."""
    n = nic_at(nic)
    for i in range(n.wire_count):
        w = wire_at(ld64(n.wires + 8 * i))
        if w.kind == UDP:
            transmit(w.udp)
