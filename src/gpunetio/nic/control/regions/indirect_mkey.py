"""Indirect memory keys, which name a region under another key and address: CREATE_MKEY with KSM entries, DESTROY_MKEY.

To the engine, an indirect key is a row like any other, which names the same memory under other virtual addresses.
Therefore all entries of the list must refer to the same region, without gaps.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ....enums import Access
from ....formats import commands as cmd
from ....formats.commands import CapClass, MkeyAccessMode, Opcode, Status
from ....formats.contexts import KLM
from ....formats.layout import Fields
from ...engine.hardware import Engine
from ...state.objects import MKEY_ROW
from ...state.tables import MkeyTable, Row
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command, Handlers
from ..objects import log_of
from ..syndromes import CommandError, CommandSyndrome
from .pd import ProtectionDomains
from .reach import signed

MOST_ENTRIES = 1 << 16
_FIRST_INDEX = 2  # key 0x100 ends a scatter list
_RIGHTS = {
    "lw": Access.LOCAL_WRITE, "rw": Access.REMOTE_WRITE, "rr": Access.REMOTE_READ, "a": Access.REMOTE_ATOMIC,
}


def _refused(detail: str, syndrome: CommandSyndrome = CommandSyndrome.UNSUPPORTED_FIELD) -> CommandError:
    return CommandError(Status.BAD_PARAM, syndrome, detail)


class _Indirect(NamedTuple):
    """An indirect key, the key of the region that it refers to, and its PD."""

    key: int
    region: int
    pdn: int


class IndirectKeys(Handlers):
    """The indirect keys of a NIC, by index. They share the table of memory keys with regions."""

    def __init__(self, engine: Engine, table: MkeyTable, pds: ProtectionDomains):
        self._engine, self._table, self._pds = engine, table, pds
        self._keys: dict[int, _Indirect] = {}

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE, Opcode.CREATE_MKEY, cmd.CREATE_MKEY_IN, self._create, cmd.CREATE_MKEY_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_MKEY, cmd.DESTROY_MKEY_IN, self._destroy),
        )

    def capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {
            "fixed_buffer_size": 1, "log_max_klm_list_size": log_of(MOST_ENTRIES),
        }}

    def disable(self, region: int) -> list[tuple[int, int, Row]]:
        """Return the commands for `Engine.post_alone` that disable all indirect keys of a region.

        The region is about to be deregistered or changed.
        """
        rows = [self._table.copy(key.key) for key in self._keys.values() if key.region == region]
        for row in rows:
            row["nbytes"] = row["access"] = row["delta"] = 0
        return [(EngineCommand.WRITE_ROW, self._table.row_address(int(row["key"])), row) for row in rows]

    def _create(self, mailbox: bytes) -> bytes:
        context = cmd.CREATE_MKEY_IN.unpack(mailbox)["memory_key_mkey_entry"]
        mode = context["access_mode_4_2"] << 2 | context["access_mode_1_0"]
        if mode != MkeyAccessMode.KSM:
            raise _refused(f"mkc.access_mode = {mode}: CREATE_MKEY makes keys of other keys only (KSM)")
        self._pds.need(context["pd"])
        row, region = self._row_of(context, _list_in(mailbox))
        index = self._table.free_slot(_FIRST_INDEX + secrets.randbelow(self._table.mask - _FIRST_INDEX))
        if index is None or index < _FIRST_INDEX:
            raise CommandError(
                Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL, f"all {self._table.mask} memory keys are in use"
            )
        key = index << 8 | context["mkey_7_0"]
        row["key"] = key
        self._engine.post_alone((EngineCommand.WRITE_ROW, self._table.row_address(key), row))
        self._pds.hold(context["pd"])
        self._keys[index] = _Indirect(key, region, context["pd"])
        return bytes(cmd.CREATE_MKEY_OUT.pack(mkey_index=index))

    def _row_of(self, context: Fields, entries: list[Fields]) -> tuple[Row, int]:
        """Return the row for a context and its list of entries, and the key of the region that they refer to."""
        size, region, first = 1 << context["log_entity_size"], entries[0]["mkey"], entries[0]["address"]
        if region not in self._table:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_MKEY, f"entry 0: there is no memory key {region:#x}"
            )
        for n, entry in enumerate(entries):
            if entry["mkey"] != region or entry["address"] != first + n * size:
                raise _refused(
                    f"entry {n} has key {entry['mkey']:#x} and address {entry['address']:#x}: all entries must lead to "
                    f"one region, each {size:#x} bytes behind the one before"
                )
        row = self._table.copy(region)
        if int(row["pdn"]) != context["pd"]:
            raise _refused(f"memory key {region:#x} belongs to PD {int(row['pdn']):#x}, not to {context['pd']:#x}")
        shift = context["start_addr"] - first
        start = max(context["start_addr"], int(row["iova"]) + shift)
        end = min(context["start_addr"] + min(context["len"], len(entries) * size),
                  int(row["iova"]) + int(row["nbytes"]) + shift)
        if end <= start:
            raise _refused(
                f"[{context['start_addr']:#x}, +{context['len']:#x}) leads to no byte of memory key {region:#x}",
                CommandSyndrome.MKEY_RANGE,
            )
        rights = sum((right for name, right in _RIGHTS.items() if context[name]), Access(0))
        row["access"] = int(row["access"]) & int(rights)
        row["delta"] = signed(int(row["delta"]) - shift)
        row["iova"], row["nbytes"], row["granted"] = signed(start), end - start, 0
        return row, region

    def _destroy(self, mailbox: bytes) -> bytes:
        index = cmd.DESTROY_MKEY_IN.get(mailbox, "mkey_index")
        if index not in self._keys:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_MKEY, f"there is no indirect memory key {index:#x}"
            )
        gone = self._keys[index]
        row = np.zeros((), MKEY_ROW.dtype)
        self._engine.post_alone((EngineCommand.WRITE_ROW, self._table.row_address(gone.key), row))
        self._pds.release(gone.pdn)
        del self._keys[index]
        return DONE


def _list_in(mailbox: bytes) -> list[Fields]:
    """Return the entries of the list in a mailbox."""
    count = cmd.CREATE_MKEY_IN.get(mailbox, "translations_octword_actual_size")
    data = mailbox[cmd.CREATE_MKEY_IN.size :]
    there = len(data) // KLM.size
    if not 0 < count <= min(MOST_ENTRIES, there):
        raise _refused(
            f"translations_octword_actual_size = {count}: give 1 to {MOST_ENTRIES} entries; the mailbox has {there}"
        )
    return [KLM.unpack(data[at : at + KLM.size]) for at in range(0, count * KLM.size, KLM.size)]
