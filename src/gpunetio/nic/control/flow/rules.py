"""The entries of a flow table in the engine's memory: one row per entry, and one hash table per mask.

Memory that the engine cannot reach yet is written directly. A change that makes it reachable, or modifies reachable
memory, is a single row that the engine writes between two turns. Thus the engine never sees a partial entry, and memory
that it can no longer reach may be freed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from ....formats.commands import Status
from ....memory import HostMemory
from ...engine.hardware import Engine
from ...state.flow import (
    DELETED, FLOW_ENTRY, FLOW_MASK, FLOW_TABLE_ROW, LOOKUP_WORDS, MAX_MASKS, SLOT, SLOT_HALF, SLOT_NUMBER, WORDS, Fate,
)
from ...steering.hashing import START, mix
from ...turn.commands import EngineCommand
from ..syndromes import CommandError, CommandSyndrome

_FEWEST_MASKS = 4  # from which lookups in a table are cached: with fewer masks, a search costs about as much
_FEWEST_SLOTS = 16


@dataclass(frozen=True)
class Decision:
    """What an entry does with a packet: the fate and its target, the counter's address, and the flow tag."""

    fate: Fate
    target: int = 0
    counter: int = 0
    tag: int = 0


def hash_of(values: np.ndarray) -> np.ndarray:
    """Return the hash of each row of words. All words must be compared words."""
    hashes = np.full(len(values), START, np.int64)
    for column in values.T:
        hashes = mix.py_func(hashes, column)
    return hashes


@dataclass
class _Mask:
    """A mask, its hash table, and the groups and entries that have the mask."""

    address: int  # of the FLOW_MASK
    compared: list[int]  # numbers of the words in which bits are compared
    slots: HostMemory
    table: np.ndarray  # the slots
    starts: list[int] = field(default_factory=list)  # first indices of the groups, in order
    entries: dict[bytes, list[int]] = field(default_factory=dict)  # value → indices, in order
    occupied: int = 0  # number of slots that do not end a search: used and deleted ones

    def probe(self, value: np.ndarray) -> tuple[int, Iterator[int]]:
        """Return the hash of a value, and the slots to probe for it, in order."""
        hash_, size = START, len(self.table)
        for word in value.tolist():
            hash_ = mix(hash_, word)  # the compiled function: for a single value, arrays take ten times as long
        return hash_, ((hash_ + i) % size for i in range(size))


def _new_slots(size: int) -> tuple[HostMemory, np.ndarray]:
    """Allocate memory for `size` slots. Return the memory, and the slots as an array."""
    memory = HostMemory(SLOT * size)
    return memory, memory.view(np.int64, 0, size)


def _numbers(words: list[int]) -> int:
    """Pack the numbers of words, 4 bits each, as the engine reads them."""
    return sum(word << 4 * i for i, word in enumerate(words))


def _slot(hash_: int, index: int) -> int:
    """Return the content of the slot of an entry: the high part of its hash, and its index plus 1."""
    return hash_ >> SLOT_HALF << SLOT_HALF | index + 1


def _slots_for(count: int) -> int:
    """Return the number of slots of a hash table that `count` values fill at most to a quarter."""
    return max(_FEWEST_SLOTS, 1 << (4 * count - 1).bit_length()) if count else _FEWEST_SLOTS


class FlowRules:
    """The entries of the table whose FLOW_TABLE_ROW is at `address`, at most `1 << log` entries.

    Callers must have checked all indices, masks and values.
    """

    def __init__(self, engine: Engine, address: int, table_id: int, level: int, log: int):
        self._engine, self._address = engine, address
        self._masks: dict[bytes, _Mask] = {}
        self._mask_of: dict[int, _Mask] = {}  # by index of the entry
        with ExitStack() as undo:
            self._entries = HostMemory(FLOW_ENTRY.size << log)  # the kernel allocates pages as entries are added
            undo.callback(self._entries.close)
            self._mask_rows = HostMemory(FLOW_MASK.size * MAX_MASKS)
            undo.pop_all()
        self._rows = self._entries.view(FLOW_ENTRY.dtype, 0, 1 << log)
        self._row = np.zeros((), FLOW_TABLE_ROW.dtype)
        self._row["table_id"], self._row["level"], self._row["log"] = table_id, level, log

    def close(self) -> None:
        """Free the memory. The engine must no longer reach the table."""
        for mask in self._masks.values():
            mask.slots.close()
        self._entries.close()
        self._mask_rows.close()

    def set_miss(self, miss: int) -> None:
        """Set the table for packets that match no entry: the address of its row, or 0 for none."""
        self._row["miss"] = miss
        self._write_table()

    # --- groups ----------------------------------------------------------------------------------------------------

    def add_group(self, words: np.ndarray, start: int) -> None:
        """Add a group with the mask `words` and indices from `start` on. CommandError beyond MAX_MASKS masks."""
        key = words.tobytes()
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._new_mask(words)
        bisect.insort(mask.starts, start)
        self._write_table()

    def remove_group(self, words: np.ndarray, start: int) -> None:
        """Remove a group. It must have no entries."""
        key = words.tobytes()
        mask = self._masks[key]
        mask.starts.remove(start)
        if mask.starts:
            self._write_table()
            return
        del self._masks[key]
        self._write_table()
        mask.slots.close()

    def _new_mask(self, words: np.ndarray) -> _Mask:
        used = {mask.address for mask in self._masks.values()}
        rows = (self._mask_rows.address + i * FLOW_MASK.size for i in range(MAX_MASKS))
        address = next((row for row in rows if row not in used), None)
        if address is None:
            raise CommandError(
                Status.NO_RESOURCES, CommandSyndrome.FLOW_MATCH,
                f"flow table {int(self._row['table_id']):#x} has groups with {MAX_MASKS} different masks, which is the "
                "limit: use another table for more",
            )
        compared = [i for i in range(WORDS) if words[i]]
        slots, table = _new_slots(_FEWEST_SLOTS)
        row = self._mask_rows.view(FLOW_MASK.dtype, address - self._mask_rows.address)[0]
        row["slots"], row["slot_mask"], row["mask"] = slots.address, _FEWEST_SLOTS - 1, words
        row["entries"] = self._entries.address
        row["word_count"], row["words"] = len(compared), _numbers(compared)
        return _Mask(address, compared, slots, table)

    def _write_table(self) -> None:
        masks = sorted(self._masks.values(), key=lambda mask: mask.starts[0])
        row = self._row
        row["mask_count"], row["firsts"], row["masks"] = len(masks), 0, 0
        row["firsts"][: len(masks)] = [mask.starts[0] for mask in masks]
        row["masks"][: len(masks)] = [mask.address for mask in masks]
        compared = [i for i in range(WORDS) if any(i in mask.compared for mask in masks)]
        remembered = len(masks) >= _FEWEST_MASKS and len(compared) <= LOOKUP_WORDS
        row["key_count"], row["key_words"] = len(compared) if remembered else 0, _numbers(compared)
        row["key_mask"] = 0
        for key in self._masks:
            row["key_mask"] |= np.frombuffer(key, np.int64)
        self._write(self._address, row)

    # --- entries ---------------------------------------------------------------------------------------------------

    def add(self, index: int, words: np.ndarray, value: np.ndarray, decision: Decision) -> None:
        """Add an entry. `words` is the mask of its group."""
        mask = self._masks[words.tobytes()]
        value = value[mask.compared]
        self._fill(self._rows[index], index, value, decision)
        self._mask_of[index] = mask
        same = mask.entries.setdefault(value.tobytes(), [])
        bisect.insort(same, index)
        if same[0] != index:
            return  # an entry with a lower index already matches the same packets
        if len(same) > 1:
            self._write_slot(mask, self._slot_of(mask, value), value, index)
        elif 2 * (mask.occupied + 1) > len(mask.table):
            self._rebuild(mask)
        else:
            _, slots = mask.probe(value)
            slot = next(slot for slot in slots if mask.table[slot] in (0, DELETED))
            mask.occupied += int(mask.table[slot]) == 0
            self._write_slot(mask, slot, value, index)

    def change(self, index: int, decision: Decision) -> None:
        """Change what an entry does."""
        row = self._rows[index].copy()
        self._fill(row, index, None, decision)
        self._write(self._entries.address + index * FLOW_ENTRY.size, row)

    def remove(self, index: int) -> None:
        """Remove an entry. If the engine has failed, the entry remains."""
        mask = self._mask_of[index]
        value = self._value_of(mask, index)
        same = mask.entries[value.tobytes()]
        if same[0] == index:
            slot = self._slot_of(mask, value)
            if len(same) > 1:
                self._write_slot(mask, slot, value, same[1])
            else:
                self._write(mask.slots.address + slot * SLOT, np.array([DELETED], np.int64))
        del self._mask_of[index]
        same.remove(index)
        if not same:
            del mask.entries[value.tobytes()]

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the FLOW_ENTRYs by index, and their values as words, 0 where a word is not compared."""
        indices = np.array(sorted(self._mask_of), np.int64)
        rows, words = self._rows[indices], np.zeros((len(indices), WORDS), np.int64)
        for mask in self._masks.values():
            some = np.searchsorted(indices, [index for same in mask.entries.values() for index in same])
            for column, word in enumerate(mask.compared):
                words[some, word] = rows["value"][some, column]
        return rows, words

    @staticmethod
    def _fill(row: np.void, index: int, value: np.ndarray | None, decision: Decision) -> None:
        row["index"], row["fate"], row["target"] = index, decision.fate, decision.target
        row["counter"], row["tag"] = decision.counter, decision.tag
        if value is not None:
            row["value"][: len(value)] = value

    def _value_of(self, mask: _Mask, index: int) -> np.ndarray:
        return self._rows[index]["value"][: len(mask.compared)].copy()

    def _slot_of(self, mask: _Mask, value: np.ndarray) -> int:
        """Return the slot of a value that is in the hash table."""
        hash_, slots = mask.probe(value)
        for slot in slots:
            found = int(mask.table[slot])
            index = (found & SLOT_NUMBER) - 1
            if found not in (0, DELETED) and found == _slot(hash_, index):
                if np.array_equal(self._value_of(mask, index), value):
                    return slot
        raise AssertionError("an entry is missing from its hash table")

    def _write_slot(self, mask: _Mask, slot: int, value: np.ndarray, index: int) -> None:
        """Write an entry's hash and index into a slot."""
        hash_, _ = mask.probe(value)
        self._write(mask.slots.address + slot * SLOT, np.array([_slot(hash_, index)], np.int64))

    def _rebuild(self, mask: _Mask) -> None:
        """Move the values of a mask into a new hash table, which they fill at most to a quarter."""
        indices = [same[0] for same in mask.entries.values()]
        size = _slots_for(len(indices))
        slots, table = _new_slots(size)
        hashes = hash_of(self._rows["value"][indices][:, : len(mask.compared)]).tolist()
        filled = [0] * size
        for index, hash_ in zip(indices, hashes, strict=True):
            at = hash_ % size
            while filled[at]:
                at = (at + 1) % size
            filled[at] = _slot(hash_, index)
        table[:] = filled
        self._write(mask.address, np.array([slots.address, size - 1], np.int64))
        old, mask.slots, mask.table, mask.occupied = mask.slots, slots, table, len(indices)
        old.close()

    def _write(self, address: int, row: np.ndarray | np.void) -> None:
        self._engine.post(EngineCommand.WRITE_ROW, address, np.asarray(row))
