"""What becomes of a frame by the flow tables.

Frames that arrive together are read together (`read_frames`), so the caches fetch what the tables say about one frame
while others are read.
"""

from __future__ import annotations

from ...fabric.ethernet_records import ARRIVED, arrived_at
from ...formats.packet import ETHERNET
from ...jit.compile import device_function, engine_function
from ...jit.ops import prefetch
from ..state.flow import MAX_JUMPS, PACKET, Fate, flow_counter_at, flow_entry_at, flow_table_at, packet_at
from ..state.nic import nic_at
from ..state.worker import worker_at
from .lookups import lookup, slots_of
from .parse import parse
from .rss import rss_hash
from .ways import begin, end, go, is_known, is_worth_a_look, note, way_of


@device_function
def _first_table(nic):
    """Return the address of the root, or of row 0, in which nothing is found."""
    tables = nic_at(nic).flow_tables
    root = flow_table_at(tables).miss
    return root if root != 0 else tables


@engine_function
def read_frame(nic, frame, nbytes):
    """Read a frame, make it the packet at hand, and look it up in the root table."""
    packet = worker_at(nic).packets
    worker_at(nic).packet = packet
    root = _first_table(nic)
    parse(packet, frame, nbytes)
    packet_at(packet).entry = lookup(nic, root, packet, slots_of(nic, root, packet))


@engine_function
def read_frames(nic, arrived, count):
    """Read the frames of ARRIVED records into the worker's PACKETs, and look them up in the root table.

    Whoever takes one of them turns to it before.
    """
    first = worker_at(nic).packets
    root = _first_table(nic)
    for i in range(count):
        a = arrived_at(arrived + i * ARRIVED.size)
        parse(first + i * PACKET.size, a.frame, a.nbytes)
    for i in range(count):
        packet = first + i * PACKET.size
        slots = slots_of(nic, root, packet)
        packet_at(packet).slots = slots
        if slots != 0:
            prefetch(slots)
    for i in range(count):
        packet = first + i * PACKET.size
        p = packet_at(packet)
        p.entry = lookup(nic, root, packet, p.slots)
        if p.entry != 0:
            prefetch(p.entry)


@device_function
def turn_to(nic, i):
    """Make frame i of those that were read together the packet at hand."""
    worker_at(nic).packet = worker_at(nic).packets + i * PACKET.size


@engine_function
def steer(nic, nbytes):
    """Do what the flow tables say with the packet at hand, a frame of `nbytes` bytes, and count it. Return its Fate.

    It was read in the same turn. Its PACKET then has its flow tag and, for the fate TIR, the TIR and its hash there.
    Only the first worker steers: it serves all wires, and it alone counts.
    """
    if nbytes < ETHERNET.size:
        return Fate.RUNT
    packet = worker_at(nic).packet
    entry = packet_at(packet).entry
    if (entry != 0 and flow_entry_at(entry).fate != Fate.JUMP) or not is_worth_a_look(nic):
        return _walk(nic, packet, nbytes, 0)
    way = way_of(nic, packet)
    if is_known(nic, way, packet):
        return go(nic, way, packet, nbytes)
    if not begin(nic, way):
        return _walk(nic, packet, nbytes, 0)
    fate = _walk(nic, packet, nbytes, way)
    end(nic, way, packet, fate)
    return fate


@engine_function
def _walk(nic, packet, nbytes, way):
    """Do what the flow tables say with a packet. Note what counts it in `way`, if that is not 0. Return its Fate."""
    p = packet_at(packet)
    table, entry = _first_table(nic), p.entry
    for _ in range(MAX_JUMPS):
        if entry == 0:
            table = flow_table_at(table).miss
        else:
            e = flow_entry_at(entry)
            if e.counter != 0:
                c = flow_counter_at(e.counter)
                c.packets += 1
                c.octets += nbytes
                if way != 0:
                    note(way, e.counter)
            if e.tag != 0:
                p.tag = e.tag
            if e.fate == Fate.TIR:
                p.tir = e.target
                p.hash = rss_hash(e.target, packet)
                return Fate.TIR
            if e.fate == Fate.DROP:
                return Fate.DROP
            table = e.target
        if table == 0:
            return Fate.MISS
        entry = lookup(nic, table, packet, slots_of(nic, table, packet))
    return Fate.LOOP
