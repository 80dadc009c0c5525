"""The entry of a flow table that matches a packet, and a memory of what was found last.

A table has a hash table for each mask, so a search costs as much as the table has different masks, however many entries
there are. Masks come in the order of their lowest entry: once an entry is found, those that begin behind it are not
looked at. Tables with several masks remember what they have found, so a flow of packets costs one search.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, st64
from ..state.flow import (
    DELETED, FLOW_ENTRY, FLOW_MASK, FLOW_TABLE_ROW, LOG_LOOKUP_SETS, LOG_MAX_TABLES, LOOKUP, SLOT, SLOT_HALF,
    SLOT_NUMBER, flow_entry_at, flow_mask_at, flow_table_at, lookup_at,
)  # fmt: skip
from ..state.nic import nic_at
from ..state.worker import worker_at
from .hashing import START, mix

_SET_MASK, _TABLE_MASK = (1 << LOG_LOOKUP_SETS) - 1, (1 << LOG_MAX_TABLES) - 1


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
def search(table, packet):
    """Return the address of the lowest entry of a table that matches a packet, or 0."""
    best = 0
    for i in range(flow_table_at(table).mask_count):
        if best != 0 and flow_entry_at(best).index < ld64(table + FLOW_TABLE_ROW.firsts + 8 * i):
            break
        found = _find(ld64(table + FLOW_TABLE_ROW.masks + 8 * i), packet)
        if found != 0 and (best == 0 or flow_entry_at(found).index < flow_entry_at(best).index):
            best = found
    return best


@device_function
def _is_of(slot, stamp, table, packet):
    """Return whether a LOOKUP tells what a packet finds in a table."""
    if lookup_at(slot).stamp != stamp:
        return False
    t = flow_table_at(table)
    words = t.key_words
    for i in range(t.key_count):
        at = (words & 0xF) * 8
        words >>= 4
        if ld64(packet + at) & ld64(table + FLOW_TABLE_ROW.key_mask + at) != ld64(slot + LOOKUP.words + 8 * i):
            return False
    return True


@engine_function
def _remember(slots, stamp, table, packet, entry):
    """Put what a packet has found into the first slot of a set. What is there moves to the second."""
    for offset in range(0, LOOKUP.size, 8):
        st64(slots + LOOKUP.size + offset, ld64(slots + offset))
    t = flow_table_at(table)
    words = t.key_words
    for i in range(t.key_count):
        at = (words & 0xF) * 8
        words >>= 4
        st64(slots + LOOKUP.words + 8 * i, ld64(packet + at) & ld64(table + FLOW_TABLE_ROW.key_mask + at))
    first = lookup_at(slots)
    first.stamp, first.entry = stamp, entry


@engine_function
def slots_of(nic, table, packet):
    """Return the address of the set of LOOKUPs in which a table remembers a packet; 0 if it remembers none."""
    t = flow_table_at(table)
    if t.key_count == 0:
        return 0
    hash_ = START
    words = t.key_words
    for _ in range(t.key_count):
        at = (words & 0xF) * 8
        words >>= 4
        hash_ = mix(hash_, ld64(packet + at) & ld64(table + FLOW_TABLE_ROW.key_mask + at))
    return nic_at(nic).lookups + (hash_ & _SET_MASK) * (2 * LOOKUP.size)


@engine_function
def lookup(nic, table, packet, slots):
    """Return the address of the lowest entry of a table that matches a packet, or 0. `slots` is from `slots_of`."""
    if slots == 0:
        return search(table, packet)
    stamp = worker_at(nic).command_done << LOG_MAX_TABLES | flow_table_at(table).table_id & _TABLE_MASK
    if _is_of(slots, stamp, table, packet):
        return lookup_at(slots).entry
    if _is_of(slots + LOOKUP.size, stamp, table, packet):
        return lookup_at(slots + LOOKUP.size).entry
    entry = search(table, packet)
    _remember(slots, stamp, table, packet, entry)
    return entry
