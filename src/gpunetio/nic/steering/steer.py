"""Look up frames in the flow tables, and execute the entries that match.

Frames that arrive together are parsed together (`look_up_frames`), so the CPU caches fetch the table rows for one frame
while other frames are parsed.
"""

from __future__ import annotations

from ...fabric.ethernet_records import ARRIVED, Arrived
from ...formats.packet import ETHERNET
from ...jit.compile import device_function, engine_function
from ...jit.ops import prefetch
from ..state.ethernet_queues import TirRow
from ..state.flow import MAX_JUMPS, PACKET, Fate, FlowCacheEntry, FlowCounter, FlowEntry, FlowTableRow, Lookup, Packet
from ..state.worker import WorkerState
from .flow_cache import add_counter, claim, hits, insert, may_look_up, replay, slot_for
from .lookups import lookup, lookup_set_of
from .parse import parse
from .rss import rss_hash


@device_function
def _root_table(worker: WorkerState) -> int:
    """Return the address of the root table, or of row 0, which has no entries. The miss of row 0 is the root table."""
    tables = worker.flow_tables
    root = FlowTableRow(tables).miss
    return root if root != 0 else tables


@engine_function
def look_up_frame(worker: WorkerState, frame: int, nbytes: int) -> None:
    """Parse a frame, make it the packet at hand, and look it up in the root table."""
    packet = worker.packets
    worker.packet = packet
    root = FlowTableRow(_root_table(worker))
    parse(Packet(packet), frame, nbytes)
    Packet(packet).root_entry = lookup(worker, root, packet, Lookup(lookup_set_of(worker, root, packet)))


@engine_function
def look_up_frames(worker: WorkerState, arrived: int, count: int) -> None:
    """Parse the frames of ARRIVED records into the worker's PACKETs, and look them up in the root table.

    The caller selects each frame (`select_frame`) before it processes the frame.
    """
    first = worker.packets
    root = FlowTableRow(_root_table(worker))
    for i in range(count):
        a = Arrived(arrived + i * ARRIVED.size)
        parse(Packet(first + i * PACKET.size), a.frame, a.nbytes)
    for i in range(count):
        packet = first + i * PACKET.size
        lookup_set = lookup_set_of(worker, root, packet)
        Packet(packet).lookup_set = lookup_set
        if lookup_set != 0:
            prefetch(lookup_set)
    for i in range(count):
        packet = first + i * PACKET.size
        p = Packet(packet)
        p.root_entry = lookup(worker, root, packet, Lookup(p.lookup_set))
        if p.root_entry != 0:
            prefetch(p.root_entry)


@device_function
def select_frame(worker: WorkerState, i: int) -> None:
    """Make frame `i` of those that were looked up together the packet at hand."""
    worker.packet = worker.packets + i * PACKET.size


@engine_function
def look_up_fate(worker: WorkerState, nbytes: int) -> int:
    """Execute the flow table entries for the packet at hand, a frame of `nbytes` bytes. Return its Fate.

    The packet must have been looked up in the root table in the same turn. This sets its flow tag and, for the fate
    TIR, the TIR and the hash, and updates the flow counters. Only the first worker calls this: it serves all wires.
    """
    if nbytes < ETHERNET.size:
        return Fate.RUNT
    packet = Packet(worker.packet)
    entry = FlowEntry(packet.root_entry)
    if (entry != 0 and entry.fate != Fate.JUMP) or not may_look_up(worker):
        return _execute_entries(worker, packet, nbytes, 0)
    cached = slot_for(worker, packet)
    if hits(worker, cached, packet):
        return replay(worker, cached, packet, nbytes)
    if not claim(worker, cached):
        return _execute_entries(worker, packet, nbytes, 0)
    fate = _execute_entries(worker, packet, nbytes, cached)
    insert(worker, cached, packet, fate)
    return fate


@engine_function
def _execute_entries(worker: WorkerState, packet: Packet, nbytes: int, cached: FlowCacheEntry) -> int:
    """Execute a packet's entries, table by table. Record their counters in `cached`, if not 0. Return the Fate."""
    table, entry = _root_table(worker), packet.root_entry
    for _ in range(MAX_JUMPS):
        if entry == 0:
            table = FlowTableRow(table).miss
        else:
            e = FlowEntry(entry)
            if e.counter != 0:
                counter = FlowCounter(e.counter)
                counter.packets += 1
                counter.octets += nbytes
                if cached != 0:
                    add_counter(cached, e.counter)
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
        entry = lookup(worker, FlowTableRow(table), packet, Lookup(lookup_set_of(worker, FlowTableRow(table), packet)))
    return Fate.LOOP
