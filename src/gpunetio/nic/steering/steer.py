"""Which entry of the flow tables decides about a frame, and what becomes of it.

A table has a hash table for each mask, so a lookup costs as much as the table has different masks, however many entries
there are. Masks come in the order of their lowest entry: once an entry is found, those that begin behind it are not
looked at.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64
from ..state.flow import (
    DELETED, FLOW_ENTRY, FLOW_MASK, FLOW_TABLE_ROW, MAX_JUMPS, SLOT, SLOT_HALF, SLOT_NUMBER, Fate, flow_counter_at,
    flow_entry_at, flow_mask_at, flow_table_at, packet_at,
)  # fmt: skip
from ..state.nic import nic_at
from ..state.worker import worker_at
from .hashing import START, mix
from .parse import parse
from .rss import rss_hash


@device_function
def _has_value(mask, packet, entry):
    """Return whether the masked words of a packet are the entry's."""
    m = flow_mask_at(mask)
    words = m.words
    for i in range(m.word_count):
        at = (words & 0xF) * 8
        words >>= 4
        if ld64(packet + at) & ld64(mask + FLOW_MASK.mask + at) != ld64(entry + FLOW_ENTRY.value + 8 * i):
            return False
    return True


@engine_function
def _find(mask, packet):
    """Return the address of the lowest entry with this mask that matches a packet, or 0."""
    m = flow_mask_at(mask)
    hash_ = START
    words = m.words
    for _ in range(m.word_count):
        at = (words & 0xF) * 8
        words >>= 4
        hash_ = mix(hash_, ld64(packet + at) & ld64(mask + FLOW_MASK.mask + at))
    at = hash_ & m.slot_mask
    while True:  # at least half of the slots end a search
        slot = ld64(m.slots + at * SLOT)
        if slot == 0:
            return 0
        number = slot & SLOT_NUMBER
        if slot >> SLOT_HALF == hash_ >> SLOT_HALF and number != DELETED:
            entry = m.entries + (number - 1) * FLOW_ENTRY.size
            if _has_value(mask, packet, entry):
                return entry
        at = at + 1 & m.slot_mask


@engine_function
def lookup(table, packet):
    """Return the address of the lowest entry of a table that matches a packet, or 0."""
    best = 0
    for i in range(flow_table_at(table).mask_count):
        if best != 0 and flow_entry_at(best).index < ld64(table + FLOW_TABLE_ROW.firsts + 8 * i):
            break
        found = _find(ld64(table + FLOW_TABLE_ROW.masks + 8 * i), packet)
        if found != 0 and (best == 0 or flow_entry_at(found).index < flow_entry_at(best).index):
            best = found
    return best


@engine_function
def steer(nic, frame, nbytes):
    """Look a frame of `nbytes` bytes up in the flow tables, and count it. Return its Fate.

    The worker's PACKET has its headers, its flow tag and, for the fate TIR, the TIR and its hash there. Only the first
    worker steers: it serves all wires, and it alone counts.
    """
    packet = worker_at(nic).packet
    if parse(packet, frame, nbytes) == 0:
        return Fate.RUNT
    p = packet_at(packet)
    table = flow_table_at(nic_at(nic).flow_tables).miss
    for _ in range(MAX_JUMPS):
        if table == 0:
            return Fate.MISS
        entry = lookup(table, packet)
        if entry == 0:
            table = flow_table_at(table).miss
            continue
        e = flow_entry_at(entry)
        if e.counter != 0:
            c = flow_counter_at(e.counter)
            c.packets += 1
            c.octets += nbytes
        if e.tag != 0:
            p.tag = e.tag
        if e.fate == Fate.TIR:
            p.tir = e.target
            p.hash = rss_hash(e.target, packet)
            return Fate.TIR
        if e.fate == Fate.DROP:
            return Fate.DROP
        table = e.target
    return Fate.MISS if table == 0 else Fate.LOOP
