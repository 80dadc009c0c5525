"""Lookups in one flow table: find the lowest entry that matches a packet, and cache the result.

A table has one hash table per mask, so the cost of a search depends on the number of different masks, not of entries.
Masks are sorted by their lowest entry: once an entry is found, masks whose entries all come after it are skipped.
Tables with several masks have a lookup cache, so a flow of packets costs one search.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, st64
from ..state.flow import (
    DELETED, FLOW_ENTRY, FLOW_MASK, FLOW_TABLE_ROW, LOG_LOOKUP_SETS, LOG_MAX_TABLES, LOOKUP, SLOT, SLOT_HALF,
    SLOT_NUMBER, FlowEntry, FlowMask, FlowTableRow, Lookup,
)
from ..state.worker import WorkerState
from .hashing import START, mix

_SET_MASK, _TABLE_MASK = (1 << LOG_LOOKUP_SETS) - 1, (1 << LOG_MAX_TABLES) - 1


@device_function
def _matches(mask: FlowMask, packet: int, entry: int) -> bool:
    """Return whether the masked words of a packet equal the entry's."""
    words = mask.words
    for i in range(mask.word_count):
        at = (words & 0xF) * 8
        words >>= 4
        if ld64(packet + at) & ld64(mask + FLOW_MASK.mask + at) != ld64(entry + FLOW_ENTRY.value + 8 * i):
            return False
    return True


@engine_function
def _find(mask: FlowMask, packet: int) -> int:
    """Return the address of the lowest entry with this mask that matches a packet, or 0."""
    hash_ = START
    words = mask.words
    for _ in range(mask.word_count):
        at = (words & 0xF) * 8
        words >>= 4
        hash_ = mix(hash_, ld64(packet + at) & ld64(mask + FLOW_MASK.mask + at))
    at = hash_ & mask.slot_mask
    while True:  # at least half of the slots end a search
        slot = ld64(mask.slots + at * SLOT)
        if slot == 0:
            return 0
        number = slot & SLOT_NUMBER
        if slot >> SLOT_HALF == hash_ >> SLOT_HALF and number != DELETED:
            entry = mask.entries + (number - 1) * FLOW_ENTRY.size
            if _matches(mask, packet, entry):
                return entry
        at = at + 1 & mask.slot_mask


@engine_function
def search(table: FlowTableRow, packet: int) -> int:
    """Return the address of the lowest entry of a table that matches a packet, or 0."""
    best = 0
    for i in range(table.mask_count):
        if best != 0 and FlowEntry(best).index < ld64(table + FLOW_TABLE_ROW.firsts + 8 * i):
            break
        found = _find(FlowMask(ld64(table + FLOW_TABLE_ROW.masks + 8 * i)), packet)
        if found != 0 and (best == 0 or FlowEntry(found).index < FlowEntry(best).index):
            best = found
    return best


@device_function
def _hits(slot: Lookup, stamp: int, table: FlowTableRow, packet: int) -> bool:
    """Return whether a LOOKUP holds the result for a packet in a table."""
    if slot.stamp != stamp:
        return False
    words = table.key_words
    for i in range(table.key_count):
        at = (words & 0xF) * 8
        words >>= 4
        if ld64(packet + at) & ld64(table + FLOW_TABLE_ROW.key_mask + at) != ld64(slot + LOOKUP.words + 8 * i):
            return False
    return True


@engine_function
def _insert(first: Lookup, stamp: int, table: FlowTableRow, packet: int, entry: int) -> None:
    """Store a result in the first LOOKUP of a set. The LOOKUP that was there moves to the second."""
    for offset in range(0, LOOKUP.size, 8):
        st64(first + LOOKUP.size + offset, ld64(first + offset))
    words = table.key_words
    for i in range(table.key_count):
        at = (words & 0xF) * 8
        words >>= 4
        st64(first + LOOKUP.words + 8 * i, ld64(packet + at) & ld64(table + FLOW_TABLE_ROW.key_mask + at))
    first.stamp, first.found = stamp, entry


@engine_function
def lookup_set_of(worker: WorkerState, table: FlowTableRow, packet: int) -> int:
    """Return the address of the set of LOOKUPs that may hold a packet's result; 0 if the table has no lookup cache."""
    if table.key_count == 0:
        return 0
    hash_ = START
    words = table.key_words
    for _ in range(table.key_count):
        at = (words & 0xF) * 8
        words >>= 4
        hash_ = mix(hash_, ld64(packet + at) & ld64(table + FLOW_TABLE_ROW.key_mask + at))
    return worker.lookups + (hash_ & _SET_MASK) * (2 * LOOKUP.size)


@engine_function
def lookup(worker: WorkerState, table: FlowTableRow, packet: int, lookup_set: Lookup) -> int:
    """Return the address of the lowest entry of a table that matches a packet, or 0.

    `lookup_set` is what `lookup_set_of` returns for the packet.
    """
    if lookup_set == 0:
        return search(table, packet)
    stamp = worker.command_done << LOG_MAX_TABLES | table.table_id & _TABLE_MASK
    if _hits(lookup_set, stamp, table, packet):
        return lookup_set.found
    if _hits(Lookup(lookup_set + LOOKUP.size), stamp, table, packet):
        return Lookup(lookup_set + LOOKUP.size).found
    entry = search(table, packet)
    _insert(lookup_set, stamp, table, packet, entry)
    return entry
