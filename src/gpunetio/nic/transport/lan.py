"""The engine's side of the LAN: every NIC is a station and its own switch. Frames go over wires of pipes.

A NIC remembers over which wire frames of a MAC have come. A frame to such a MAC goes over that wire; others go over all
wires of the LAN. As each pair of NICs has a wire, no NIC forwards what it gets, and there are no loops.
"""

from __future__ import annotations

from ...fabric.capture import CaptureRing, capture_frame
from ...fabric.ethernet_records import ARRIVED, BATCH, Arrived, EthernetEnd
from ...fabric.frames import ETHERNET_FRAME, PACKET, Frame, PipeEnd, commit, consume, next_frame, reserve_frame
from ...fabric.injector import icrc_fits
from ...formats.packet import ETHERNET, GROUP_MAC
from ...jit.compile import device_function, engine_function
from ...jit.ops import copy, ld16, ld32, ld64, ld8, ld_relaxed64, on_host, st64
from ..state.counters import COUNTERS, CounterSet
from ..state.extensions import ETHERNET_QUEUES
from ..state.flow import FlowTableRow
from ..state.lan import MACS, MAC_ROW, MAX_AGE_NS, PROBES, LanState, MacRow
from ..state.wire import WIRE, WireState
from ..state.worker import WorkerState
from ..steering.hashing import START, mix
from ..steering.steer import look_up_frames, select_frame
from .frame_sorting import decide


@device_function
def load_mac(address: int) -> int:
    """Return the MAC at an address as the tables have it."""
    if on_host():
        return ld32(address) | ld16(address + 4) << 32
    mac = 0
    for i in range(6):  # a GPU loads a word only from a multiple of its size, and a program's frame may begin anywhere
        mac |= ld8(address + i) << 8 * i
    return mac


# --- which wire ----------------------------------------------------------------------------------------------------


@device_function
def _is_joined(wire: WireState) -> bool:
    """Return whether there is a NIC at the other end of a wire that takes frames."""
    return wire.takes_frames != 0 and wire.broken == 0 and ld_relaxed64(wire.takes_frames) != 0


@device_function
def _row_of(lan: LanState, first: int, i: int) -> MacRow:
    return MacRow(lan.macs + ((first + i) & (MACS - 1)) * MAC_ROW.size)


@engine_function
def learn(worker: WorkerState, mac: int, wire: WireState) -> None:
    """Remember over which wire a frame of this MAC came. If the MAC finds no row, it takes the oldest."""
    lan, first = worker.lan, mix(START, mac)
    now = worker.now
    row = _row_of(LanState(lan), first, 0)
    for i in range(PROBES):
        other = _row_of(LanState(lan), first, i)
        if MacRow(other).mac == mac:
            row = other
            break
        if MacRow(other).seen < MacRow(row).seen:
            row = other
    m = MacRow(row)
    m.mac, m.wire, m.seen = mac, wire, now


@engine_function
def wire_to(worker: WorkerState, mac: int) -> int:
    """Return the address of the wire to a MAC, or 0: none of its frames has come lately, or its NIC has left."""
    lan, first = worker.lan, mix(START, mac)
    for i in range(PROBES):
        row = _row_of(LanState(lan), first, i)
        if row.mac == mac and row.wire != 0:
            fresh = worker.now - row.seen <= MAX_AGE_NS
            return row.wire if fresh and _is_joined(WireState(row.wire)) else 0
    return 0


# --- sending -------------------------------------------------------------------------------------------------------


@engine_function
def frame_room(worker: WorkerState, wire: WireState, nbytes: int, mac: int) -> int:
    """Return the address where the bytes of the next frame are to be written: `nbytes`, to this MAC. `wire` is 0.

    There is always room. A frame for which a wire has none is lost there, so that no receiver stops a sender.
    """
    lan = LanState(worker.lan)
    lan.place = 0
    lan.wire = wire_to(worker, mac) if mac & GROUP_MAC == 0 else 0
    if lan.wire != 0:
        lan.place = reserve_frame(PipeEnd(lan.wire + WIRE.tx), nbytes)
    return lan.place + PACKET if lan.place != 0 else lan.room


@engine_function
def send_frame(worker: WorkerState, wire: WireState, nbytes: int) -> int:
    """Send the frame of `nbytes` that was written to where `frame_room` said. Its receivers see it after this turn."""
    lan = LanState(worker.lan)
    if lan.wire != 0 and lan.place == 0:
        CounterSet(worker.counters).tx_frame_no_room += 1
        return 0
    frame = lan.room
    if lan.place != 0:
        frame = lan.place + PACKET
        commit(PipeEnd(lan.wire + WIRE.tx))
    if worker.capture != 0:
        capture_frame(CaptureRing(worker.capture), frame, nbytes, frame, 0, worker.now, 1)
    if lan.wire == 0:
        _flood(worker, nbytes)
    return 1


@engine_function
def _flood(worker: WorkerState, nbytes: int) -> None:
    """Send the frame in `room` over all wires of the LAN."""
    source = LanState(worker.lan).room
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        if _is_joined(wire):
            frame = reserve_frame(PipeEnd(wire + WIRE.tx), nbytes)
            if frame == 0:
                CounterSet(worker.counters).tx_frame_no_room += 1
            else:
                copy(frame + PACKET, source, nbytes)
                commit(PipeEnd(wire + WIRE.tx))


# --- taking --------------------------------------------------------------------------------------------------------


@device_function
def _undamaged(worker: WorkerState, wire: WireState, frame: Frame, nbytes: int) -> bool:
    """Return whether a frame's check sequence is right or absent. Only a fault injector adds one, an ICRC."""
    return frame.icrc == 0 or icrc_fits(
        worker.scratch, frame + PACKET, nbytes, wire.peer_high, wire.peer_low, wire.here_high, wire.here_low
    )


@engine_function
def _take_lan_frame(worker: WorkerState, wire: WireState, lan: LanState, frame: int, nbytes: int) -> None:
    """Take an Ethernet frame as one from any other Ethernet wire. It was read if there is a root table."""
    CounterSet(worker.counters).rx_frames += 1
    CounterSet(worker.counters).rx_frame_bytes += nbytes
    if worker.capture != 0:
        capture_frame(CaptureRing(worker.capture), frame, nbytes, frame, 0, worker.now, 0)
    fate = COUNTERS.rx_frame_malformed
    if lan != 0 and nbytes >= ETHERNET.size and _undamaged(worker, wire, Frame(frame - PACKET), nbytes):
        source = load_mac(frame + ETHERNET.source)
        if source & GROUP_MAC == 0 and source != 0 and worker.link_down == 0 and wire.takes_frames != 0:
            learn(worker, source, wire)
        fate = decide(worker, EthernetEnd(lan.port), frame, nbytes, 0)
    st64(worker.counters + fate, ld64(worker.counters + fate) + 1)


@ETHERNET_QUEUES.function
def take_lan_frames(worker: WorkerState, wire: WireState, arrived: int, most: int) -> int:
    """Take the Ethernet frames that are next in the pipe, up to `most`. Return how many.

    The peer may still change their bytes: whoever reads a length in them checks what it has read.
    """
    end = wire + WIRE.rx
    count = 0
    while count < min(most, BATCH):
        place = next_frame(end)
        if place <= 0 or Frame(place).reference != ETHERNET_FRAME:
            break
        a = Arrived(arrived + count * ARRIVED.size)
        a.frame, a.nbytes = place + PACKET, PipeEnd(end).nbytes
        count += 1
        consume(end)
    if FlowTableRow(worker.flow_tables).miss != 0:
        look_up_frames(worker, arrived, count)
    for i in range(count):
        a = Arrived(arrived + i * ARRIVED.size)
        select_frame(worker, i)
        _take_lan_frame(worker, wire, LanState(worker.lan), a.frame, a.nbytes)
    return count
