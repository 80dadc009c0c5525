"""The engine's side of the LAN: every NIC is a station and its own switch. Frames go over wires of pipes.

A NIC remembers over which wire frames of a MAC have come. A frame to such a MAC goes over that wire; others go over all
wires of the LAN. As each pair of NICs has a wire, no NIC forwards what it gets, and there are no loops.
"""

from __future__ import annotations

from ...fabric.capture import capture_frame
from ...fabric.ethernet_records import ARRIVED, BATCH, arrived_at
from ...fabric.frames import ETHERNET_FRAME, PACKET, commit, consume, frame_at, next_frame, pipe_end_at, reserve_frame
from ...fabric.injector import icrc_fits
from ...formats.packet import ETHERNET, GROUP_MAC
from ...jit.compile import device_function, engine_function
from ...jit.ops import copy, ld16, ld32, ld64, ld_relaxed64, st64
from ..state.counters import COUNTERS, counters_at
from ..state.extensions import ETHERNET_QUEUES
from ..state.flow import flow_table_at
from ..state.lan import MAC_ROW, MACS, MAX_AGE_NS, PROBES, lan_at, mac_row_at
from ..state.nic import nic_at
from ..state.wire import WIRE, wire_at
from ..state.worker import worker_at
from ..steering.hashing import START, mix
from ..steering.steer import read_frames, turn_to
from .frame_sorting import decide


@device_function
def load_mac(address):
    """Return the MAC at an address as the tables have it."""
    return ld32(address) | ld16(address + 4) << 32


# --- which wire ----------------------------------------------------------------------------------------------------


@device_function
def _is_joined(wire):
    """Return whether there is a NIC at the other end of a wire that takes frames."""
    w = wire_at(wire)
    return w.takes_frames != 0 and w.broken == 0 and ld_relaxed64(w.takes_frames) != 0


@device_function
def _row_of(lan, first, i):
    return lan_at(lan).macs + ((first + i) & (MACS - 1)) * MAC_ROW.size


@engine_function
def learn(nic, mac, wire):
    """Remember over which wire a frame of this MAC came. If the MAC finds no row, it takes the oldest."""
    lan, first = nic_at(nic).lan, mix(START, mac)
    now = worker_at(nic).now
    row = _row_of(lan, first, 0)
    for i in range(PROBES):
        other = _row_of(lan, first, i)
        if mac_row_at(other).mac == mac:
            row = other
            break
        if mac_row_at(other).seen < mac_row_at(row).seen:
            row = other
    m = mac_row_at(row)
    m.mac, m.wire, m.seen = mac, wire, now


@engine_function
def wire_to(nic, mac):
    """Return the address of the wire to a MAC, or 0: none of its frames has come lately, or its NIC has left."""
    lan, first = nic_at(nic).lan, mix(START, mac)
    for i in range(PROBES):
        m = mac_row_at(_row_of(lan, first, i))
        if m.mac == mac and m.wire != 0:
            fresh = worker_at(nic).now - m.seen <= MAX_AGE_NS
            return m.wire if fresh and _is_joined(m.wire) else 0
    return 0


# --- sending -------------------------------------------------------------------------------------------------------


@engine_function
def frame_room(nic, wire, nbytes, mac):
    """Return the address where the bytes of the next frame are to be written: `nbytes`, to this MAC. `wire` is 0.

    There is always room. A frame for which a wire has none is lost there, so that no receiver stops a sender.
    """
    l = lan_at(nic_at(nic).lan)
    l.place = 0
    l.wire = wire_to(nic, mac) if mac & GROUP_MAC == 0 else 0
    if l.wire != 0:
        l.place = reserve_frame(l.wire + WIRE.tx, nbytes)
    return l.place + PACKET if l.place != 0 else l.room


@engine_function
def send_frame(nic, wire, nbytes):
    """Send the frame of `nbytes` that was written to where `frame_room` said. Its receivers see it after this turn."""
    n = worker_at(nic)
    l = lan_at(nic_at(nic).lan)
    if l.wire != 0 and l.place == 0:
        counters_at(n.counters).tx_frame_no_room += 1
        return 0
    frame = l.room
    if l.place != 0:
        frame = l.place + PACKET
        commit(l.wire + WIRE.tx)
    if n.capture != 0:
        capture_frame(n.capture, frame, nbytes, frame, 0, n.now, 1)
    if l.wire == 0:
        _flood(nic, nbytes)
    return 1


@engine_function
def _flood(nic, nbytes):
    """Send the frame in `room` over all wires of the LAN."""
    n = worker_at(nic)
    source = lan_at(nic_at(nic).lan).room
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if _is_joined(wire):
            frame = reserve_frame(wire + WIRE.tx, nbytes)
            if frame == 0:
                counters_at(n.counters).tx_frame_no_room += 1
            else:
                copy(frame + PACKET, source, nbytes)
                commit(wire + WIRE.tx)


# --- taking --------------------------------------------------------------------------------------------------------


@device_function
def _undamaged(nic, wire, frame, nbytes):
    """Return whether a frame's check sequence is right or absent. Only a fault injector adds one, an ICRC."""
    w = wire_at(wire)
    return frame_at(frame).icrc == 0 or icrc_fits(
        worker_at(nic).scratch, frame + PACKET, nbytes, w.peer_high, w.peer_low, w.here_high, w.here_low
    )  # fmt: skip


@engine_function
def _take_lan_frame(nic, wire, lan, frame, nbytes):
    """Take an Ethernet frame as one from any other Ethernet wire. It was read if there is a root table."""
    n = worker_at(nic)
    counters_at(n.counters).rx_frames += 1
    counters_at(n.counters).rx_frame_bytes += nbytes
    if n.capture != 0:
        capture_frame(n.capture, frame, nbytes, frame, 0, n.now, 0)
    fate = COUNTERS.rx_frame_malformed
    if lan != 0 and nbytes >= ETHERNET.size and _undamaged(nic, wire, frame - PACKET, nbytes):
        source = load_mac(frame + ETHERNET.source)
        if source & GROUP_MAC == 0 and source != 0 and n.link_down == 0 and wire_at(wire).takes_frames != 0:
            learn(nic, source, wire)
        fate = decide(nic, lan_at(lan).port, frame, nbytes, 0)
    st64(n.counters + fate, ld64(n.counters + fate) + 1)


@ETHERNET_QUEUES.function
def take_lan_frames(nic, wire, arrived, most):
    """Take the Ethernet frames that are next in the pipe, up to `most`. Return how many.

    The peer may still change their bytes: whoever reads a length in them checks what it has read.
    """
    end = wire + WIRE.rx
    count = 0
    while count < min(most, BATCH):
        place = next_frame(end)
        if place <= 0 or frame_at(place).reference != ETHERNET_FRAME:
            break
        a = arrived_at(arrived + count * ARRIVED.size)
        a.frame, a.nbytes = place + PACKET, pipe_end_at(end).nbytes
        count += 1
        consume(end)
    if flow_table_at(worker_at(nic).flow_tables).miss != 0:
        read_frames(nic, arrived, count)
    for i in range(count):
        a = arrived_at(arrived + i * ARRIVED.size)
        turn_to(nic, i)
        _take_lan_frame(nic, wire, nic_at(nic).lan, a.frame, a.nbytes)
    return count
