"""Flow tables as the engine reads them, and the packet that it looks up in them.

A packet is matched by WORDS of 64 bits: the outer headers of fte_match_param, followed by the second VLAN tag of its
misc parameters. A packet, the mask of a group and the value of an entry have the same layout, in the byte order of
mailboxes. So a packet matches an entry if its masked words equal the entry's.
"""

from __future__ import annotations

from typing import Annotated

from enum import IntEnum

from ...formats.flow import FTE_MATCH_PARAM, FTE_MATCH_SET_LYR_2_4
from ...formats.layout import I32, I64
from .record import State, command, engine, host, nobody

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
    """What happens to a packet. An entry that leads to another table has JUMP."""

    MISS = 0  # no entry has decided: the NIC does what it does without flow tables
    TIR  = 1
    DROP = 2
    JUMP = 3
    RUNT = 4  # shorter than an Ethernet header
    LOOP = 5  # visited MAX_JUMPS tables


class FlowTableRow(State):
    """A flow table.

    Row 0 leads to all tables: it has no entries, and its `miss` is the root table.
    """

    table_id: I64 = command("number of the table; 0 in a free row, and in row 0")
    miss: I64 = command("address of the FLOW_TABLE_ROW for packets that match no entry; 0 is MISS")
    level: I64 = command("flow_table_context.level")
    log: I64 = command("logarithm of the entries that it has room for")
    mask_count: I64 = command("different masks of its groups")
    # by mask, in the order of the lowest index of an entry that can have it
    firsts: Annotated[int, f"i64[{MAX_MASKS}]"] = command("that index", line=True)
    masks: Annotated[int, f"i64[{MAX_MASKS}]"] = command("address of the FLOW_MASK")
    # what all of these masks compare
    key_count: I64 = command("words of which bits are compared; 0 if lookups are not cached", line=True)
    key_words: I64 = command("their numbers, four bits each, the first lowest")
    key_mask: Annotated[int, f"i64[{WORDS}]"] = command("bits that are compared")


FLOW_TABLE_ROW = FlowTableRow.entry


class FlowMask(State):
    """The entries of a table that have the same mask: a hash table of their values.

    It uses open addressing with linear probing. If several entries have the same value, it contains only the lowest. A
    slot consists of the upper half of the hash and a number: the index of an entry plus 1, or 0, which ends a search,
    or DELETED, which does not end it.
    """

    slots: I64 = command("address of the slots, 8 bytes each")
    slot_mask: I64 = command("selects a slot by hash")
    entries: I64 = command("address of the table's FLOW_ENTRYs")
    word_count: I64 = command("words of which bits are compared")
    words: I64 = command("their numbers, four bits each, the first lowest")
    mask: Annotated[int, f"i64[{WORDS}]"] = command("bits that are compared")


FLOW_MASK = FlowMask.entry

SLOT, SLOT_HALF, SLOT_NUMBER = 8, 32, 0xFFFFFFFF
DELETED = SLOT_NUMBER


class FlowEntry(State):
    """An entry of a flow table. The words that most entries compare share a cache line with what the entry does."""

    target: I64 = command("address of the TIR_ROW, or of the FLOW_TABLE_ROW")
    counter: I64 = command("address of the FLOW_COUNTER; 0 is none")
    index: I32 = command("flow_index; the lowest entry that matches decides")
    fate: I32 = command("TIR, DROP or JUMP")
    tag: I32 = command("flow tag; 0 leaves the tag of an earlier table")
    spare: I32 = nobody("0")
    value: Annotated[int, f"i64[{WORDS}]"] = command(
        "masked words of a packet that matches: those that are compared, in order"
    )


FLOW_ENTRY = FlowEntry.entry

LOG_LOOKUP_SETS, LOOKUP_WORDS = 15, 6

class Lookup(State):
    """A recent lookup in a table with several masks (steering/lookups.py).

    Lookups are kept in sets of two, one cache line each. A lookup holds for all packets with these words until the
    next command.
    """

    stamp: I64 = engine("commands executed when the result was stored, and the low bits of the table's number")
    found: I64 = engine("address of the FLOW_ENTRY; 0 if none matches")
    words: Annotated[int, f"i64[{LOOKUP_WORDS}]"] = engine("masked words of the packet")


LOOKUP = Lookup.entry

LOG_FLOW_CACHE, FLOW_CACHE_COUNTERS = 11, 4

class FlowCacheEntry(State):
    """The cached path of a flow through several tables (steering/flow_cache.py).

    It holds for all packets with these words and this `l4` until the next command.
    """

    stamp: I64 = engine("commands executed when the entry was inserted, plus 1; 0 in a free entry")
    l4: I64 = engine("as in a PACKET")
    words: Annotated[int, f"i64[{WORDS}]"] = engine("words of the packet")
    misses: I64 = engine("misses in this slot since its flow's last hit")
    fate: I64 = engine("Fate of the packet")
    tir: I64 = engine("as in a PACKET")
    hash: I64 = engine("as in a PACKET")
    tag: I64 = engine("as in a PACKET")
    counter_count: I64 = engine("counters on the path")
    counters: Annotated[int, f"i64[{FLOW_CACHE_COUNTERS}]"] = engine("addresses of these FLOW_COUNTERs")


FLOW_CACHE_ENTRY = FlowCacheEntry.entry


class FlowCounter(State, align=32):
    """A flow counter."""

    counter_id: I64 = host("number of the counter; 0 in a free row")
    packets: I64 = engine("packets since the row is in use")
    octets: I64 = engine("their bytes, without the frame check sequence")


FLOW_COUNTER = FlowCounter.entry


class Packet(State):
    """A packet that a worker looks up in flow tables."""

    words: Annotated[int, f"i64[{WORDS}]"] = engine("the header fields that entries match")
    l3: I64 = engine("offset of the IP header in the frame; 0 if there is none, or a damaged one")
    l4: I64 = engine("offset of the TCP or UDP header; 0 if there is none, or in a fragment")
    end: I64 = engine("end of the IP packet; padding may follow")
    tir: I64 = engine("address of the TIR_ROW of the TIR that it goes to; 0 is none")
    hash: I64 = engine("its hash, by which that TIR selects a queue")
    tag: I64 = engine("flow tag; 0 is none")
    lookup_set: I64 = engine("its set of LOOKUPs for the root table (steering/lookups.py); 0 is none")
    root_entry: I64 = engine("address of the FLOW_ENTRY of the root table that it matches; 0 is none")


PACKET = Packet.entry

