"""What becomes of a frame by the flow tables.

Frames that arrive together are read together (`read_frames`), so the caches fetch what the tables say about one frame
while others are read.
"""

from __future__ import annotations

from ...fabric.ethernet_records import ARRIVED, arrived_at
from ...formats.packet import ETHERNET
from ...jit.compile import device_function, engine_function
from ...jit.ops import prefetch
from ..state.ethernet_queues import TirRow
from ..state.flow import MAX_JUMPS, PACKET, Fate, FlowCounter, FlowEntry, FlowTableRow, FlowWay, Lookup, Packet
from ..state.worker import WorkerState
from .lookups import lookup, slots_of
from .parse import parse
from .rss import rss_hash
from .ways import begin, end, go, is_known, is_worth_a_look, note, way_of


@device_function
def _first_table(worker: WorkerState) -> int:
    """Return the address of the root, or of row 0, in which nothing is found."""
    tables = worker.flow_tables
    root = FlowTableRow(tables).miss
    return root if root != 0 else tables


@engine_function
def read_frame(worker: WorkerState, frame: int, nbytes: int) -> None:
    """Read a frame, make it the packet at hand, and look it up in the root table."""
    packet = worker.packets
    worker.packet = packet
    root = FlowTableRow(_first_table(worker))
    parse(Packet(packet), frame, nbytes)
    Packet(packet).root_entry = lookup(worker, root, packet, Lookup(slots_of(worker, root, packet)))


@engine_function
def read_frames(worker: WorkerState, arrived: int, count: int) -> None:
    """Read the frames of ARRIVED records into the worker's PACKETs, and look them up in the root table.

    Whoever takes one of them turns to it before.
    """
    first = worker.packets
    root = FlowTableRow(_first_table(worker))
    for i in range(count):
        a = arrived_at(arrived + i * ARRIVED.size)
        parse(Packet(first + i * PACKET.size), a.frame, a.nbytes)
    for i in range(count):
        packet = first + i * PACKET.size
        slots = slots_of(worker, root, packet)
        Packet(packet).slots = slots
        if slots != 0:
            prefetch(slots)
    for i in range(count):
        packet = first + i * PACKET.size
        p = Packet(packet)
        p.root_entry = lookup(worker, root, packet, Lookup(p.slots))
        if p.root_entry != 0:
            prefetch(p.root_entry)


@device_function
def turn_to(worker: WorkerState, i: int) -> None:
    """Make frame i of those that were read together the packet at hand."""
    worker.packet = worker.packets + i * PACKET.size


@engine_function
def steer(worker: WorkerState, nbytes: int) -> int:
    """Do what the flow tables say with the packet at hand, a frame of `nbytes` bytes, and count it. Return its Fate.

    It was read in the same turn. Its PACKET then has its flow tag and, for the fate TIR, the TIR and its hash there.
    Only the first worker steers: it serves all wires, and it alone counts.
    """
    if nbytes < ETHERNET.size:
        return Fate.RUNT
    packet = Packet(worker.packet)
    entry = FlowEntry(packet.root_entry)
    if (entry != 0 and entry.fate != Fate.JUMP) or not is_worth_a_look(worker):
        return _walk(worker, packet, nbytes, 0)
    way = FlowWay(way_of(worker, packet))
    if is_known(worker, way, packet):
        return go(worker, way, packet, nbytes)
    if not begin(worker, way):
        return _walk(worker, packet, nbytes, 0)
    fate = _walk(worker, packet, nbytes, way)
    end(worker, way, packet, fate)
    return fate


@engine_function
def _walk(worker: WorkerState, packet: Packet, nbytes: int, way: FlowWay) -> int:
    """Do what the flow tables say with a packet. Note what counts it in `way`, if that is not 0. Return its Fate."""
    table, entry = _first_table(worker), packet.root_entry
    for _ in range(MAX_JUMPS):
        if entry == 0:
            table = FlowTableRow(table).miss
        else:
            e = FlowEntry(entry)
            if e.counter != 0:
                counter = FlowCounter(e.counter)
                counter.packets += 1
                counter.octets += nbytes
                if way != 0:
                    note(way, e.counter)
            if e.tag != 0:
                packet.tag = e.tag
            if e.fate == Fate.TIR:
                packet.tir = e.target
                packet.hash = rss_hash(TirRow(e.target), packet)
                return Fate.TIR
            if e.fate == Fate.DROP:
                return Fate.DROP
            table = e.target
        if table == 0:
            return Fate.MISS
        entry = lookup(worker, FlowTableRow(table), packet, Lookup(slots_of(worker, FlowTableRow(table), packet)))
    return Fate.LOOP
