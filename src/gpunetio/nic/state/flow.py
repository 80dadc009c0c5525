"""Flow tables as the engine reads them, and the packet that it looks up in them.

What a packet is matched by are WORDS of 64 bits: the outer headers of fte_match_param, and behind them the second VLAN
tag of its misc parameters. A packet, the mask of a group and the value of an entry have the same layout, in the byte
order of mailboxes. So a packet matches an entry if its words, masked, are the entry's.
"""

from __future__ import annotations

from enum import IntEnum

from ...formats.flow import FTE_MATCH_PARAM, FTE_MATCH_SET_LYR_2_4
from ...jit.struct_view import View, struct_view
from .record import record

_SECOND_TAG = 8  # bytes of the misc parameters, from `outer_second_prio` on
OUTER_BYTES = FTE_MATCH_SET_LYR_2_4.size
# Where the words are in fte_match_param: (first byte, bytes).
MATCHED = (
    (FTE_MATCH_PARAM.offset("outer_headers"), OUTER_BYTES),
    (FTE_MATCH_PARAM.offset("misc_parameters.outer_second_prio"), _SECOND_TAG),
)
WORDS = sum(size for _, size in MATCHED) // 8

LOG_MAX_TABLES = 10  # the low bits of a table's number select its row
MAX_MASKS = 64  # different masks in one table
MAX_JUMPS = 64  # tables that a packet visits: one of each level, unless entries ignore levels


class Fate(IntEnum):
    """What becomes of a packet. An entry that leads to another table has JUMP."""

    MISS = 0  # no entry has decided: the NIC does what it does without flow tables
    TIR  = 1
    DROP = 2
    JUMP = 3
    RUNT = 4  # shorter than an Ethernet header
    LOOP = 5  # visited MAX_JUMPS tables


# Row 0 is the entry to all tables: it has no entries, and its miss leads to the root.
FLOW_TABLE_ROW = record("flow_table_row", f"""
    table_id       i64      command    number of the table; 0 in a free row, and in row 0
    miss           i64      command    address of the FLOW_TABLE_ROW for what matches no entry; 0 is MISS
    level          i64      command    flow_table_context.level
    log            i64      command    logarithm of the entries that it has room for
    mask_count     i64      command    different masks of its groups
    # by mask, in the order of the lowest index of an entry that can have it
    firsts         i64[{MAX_MASKS}]  command    that index
    masks          i64[{MAX_MASKS}]  command    address of the FLOW_MASK
    # what all of these masks compare
    key_count      i64      command    words of which bits are compared; 0 if lookups are not remembered
    key_words      i64      command    their numbers, four bits each, the first lowest
    key_mask       i64[{WORDS}]  command    bits that are compared
""")

# All entries of a table with the same mask: a hash table of their values, by open addressing with linear probing. Of
# several entries with one value, the lowest is in it. A slot is the upper half of the hash, and a number: the index of
# an entry plus 1, or 0, which ends a search, or DELETED, which does not.
FLOW_MASK = record("flow_mask", f"""
    slots          i64      command    address of the slots, 8 bytes each
    slot_mask      i64      command    selects a slot by hash
    entries        i64      command    address of the table's FLOW_ENTRYs
    word_count     i64      command    words of which bits are compared
    words          i64      command    their numbers, four bits each, the first lowest
    mask           i64[{WORDS}]   command    bits that are compared
""")

SLOT, SLOT_HALF, SLOT_NUMBER = 8, 32, 0xFFFFFFFF
DELETED = SLOT_NUMBER

# What most entries compare is on the first cache line, with what they do.
FLOW_ENTRY = record("flow_entry", f"""
    target         i64      command    address of the TIR_ROW, or of the FLOW_TABLE_ROW
    counter        i64      command    address of the FLOW_COUNTER; 0 is none
    index          i32      command    flow_index; the lowest entry that matches decides
    fate           i32      command    TIR, DROP or JUMP
    tag            i32      command    flow tag; 0 leaves the tag of an earlier table
    spare          i32      nobody     0
    value          i64[{WORDS}]   command    masked words of a packet that matches: those that are compared, in order
""")

# The last lookups in tables of several masks (steering/lookups.py): sets of two slots, a cache line each. What was
# found is true of the packets with these words, as long as no command has come.
LOG_LOOKUP_SETS, LOOKUP_WORDS = 15, 6
LOOKUP = record("lookup", f"""
    stamp          i64      engine     commands that had been executed, and the low bits of the table's number
    entry          i64      engine     address of the FLOW_ENTRY; 0 if none matches
    words          i64[{LOOKUP_WORDS}]   engine     masked words of the packet
""")

# The last ways of packets through several tables (steering/ways.py). A way is that of all packets with these words and
# this `l4`, as long as no command has come.
LOG_WAYS, WAY_COUNTERS = 11, 4
FLOW_WAY = record("flow_way", f"""
    stamp          i64      engine     commands that had been executed, plus 1; 0 if the row has no way
    l4             i64      engine     as in a PACKET
    words          i64[{WORDS}]   engine     words of the packet
    missed         i64      engine     other packets that have looked here since the last one of this way
    fate           i64      engine     what became of the packet
    tir            i64      engine     as in a PACKET
    hash           i64      engine     as in a PACKET
    tag            i64      engine     as in a PACKET
    counted        i64      engine     entries on the way that count
    counters       i64[{WAY_COUNTERS}]   engine     addresses of their FLOW_COUNTERs
""")

FLOW_COUNTER = record("flow_counter", """
    counter_id     i64      host       number of the counter; 0 in a free row
    packets        i64      engine     packets since the row is in use
    octets         i64      engine     their bytes, without the frame check sequence
""", align=32)

# The packet at hand of a worker.
PACKET = record("packet", f"""
    words          i64[{WORDS}]   engine     what it is matched by
    l3             i64      engine     offset of the IP header in the frame; 0 if there is none, or a damaged one
    l4             i64      engine     offset of the TCP or UDP header; 0 if there is none, or in a fragment
    end            i64      engine     end of the IP packet; padding may follow
    tir            i64      engine     address of the TIR_ROW of the TIR that it goes to; 0 is none
    hash           i64      engine     its hash, by which that TIR selects a queue
    tag            i64      engine     flow tag; 0 is none
    slots          i64      engine     where the root table remembers it (steering/lookups.py); 0 is nowhere
    entry          i64      engine     address of the FLOW_ENTRY of the root table that it matches; 0 is none
""")

flow_table_at: View = struct_view(FLOW_TABLE_ROW)
flow_mask_at: View = struct_view(FLOW_MASK)
flow_entry_at: View = struct_view(FLOW_ENTRY)
lookup_at: View = struct_view(LOOKUP)
flow_way_at: View = struct_view(FLOW_WAY)
flow_counter_at: View = struct_view(FLOW_COUNTER)
packet_at: View = struct_view(PACKET)
