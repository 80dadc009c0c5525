"""Flow table entries: SET_FLOW_TABLE_ENTRY, QUERY_FLOW_TABLE_ENTRY, DELETE_FLOW_TABLE_ENTRY."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ....formats import flow
from ....formats.commands import Opcode, Status
from ....formats.flow import (
    DEST_FORMAT, FLOW_CONTEXT, FLOW_COUNTER_LIST, DestinationType, EntryChange, EntryModify, FlowAction,
)
from ....formats.layout import BitStruct, Fields
from ...state.flow import Fate
from ..command import DONE, Call, Command, Handlers
from ..objects import MailboxObjects, Uses
from ..syndromes import CommandError, CommandSyndrome
from .counters import FlowCounters
from .groups import FlowGroups
from .match import PARAM_BYTES, check_value, words_of
from .rules import Decision
from .tables import FlowTable, FlowTables

# Plain ints, because comparing them is much faster than comparing flags.
_DROP, _FWD_DEST = int(FlowAction.DROP), int(FlowAction.FWD_DEST)
_SUPPORTED = int(FlowAction.DROP | FlowAction.FWD_DEST | FlowAction.COUNT)
_MODIFIABLE = int(EntryModify.ACTION | EntryModify.FLOW_TAG | EntryModify.DEST_LIST | EntryModify.COUNTERS)
_CONTEXT = flow.SET_FLOW_TABLE_ENTRY_IN.offset("flow_context")
_VALUE = _CONTEXT + FLOW_CONTEXT.offset("match_value")
_LIST = flow.SET_FLOW_TABLE_ENTRY_IN.size
_ITEM = DEST_FORMAT.size  # as long as a FLOW_COUNTER_LIST


@dataclass(frozen=True)
class _FlowContext:
    """What an entry does, as set by the flow_context of a mailbox."""

    action: int
    tag: int
    destinations: bytes  # the list of DEST_FORMATs
    counters: bytes  # the list of FLOW_COUNTER_LISTs
    ignore_level: int


@dataclass
class _Entry:
    """An entry: its group, its match value, what it does, and the objects that it uses."""

    group: int
    value: bytes
    context: _FlowContext
    uses: Uses


class FlowEntries(Handlers):
    """The entries of all flow tables, by table and index."""

    def __init__(self, tables: FlowTables, counters: FlowCounters, tirs: MailboxObjects):
        self._tables, self._counters, self._tirs = tables, counters, tirs
        self._known: dict[tuple[int, int], _Entry] = {}

    def commands(self) -> Iterable[Command]:
        opcode, mailbox = Opcode.SET_FLOW_TABLE_ENTRY, flow.SET_FLOW_TABLE_ENTRY_IN
        return (
            Command(Call.CREATE,  opcode, mailbox, self._create, op_mod=EntryChange.CREATE),
            Command(Call.MODIFY,  opcode, mailbox, self._modify, op_mod=EntryChange.MODIFY),
            Command(Call.QUERY,   Opcode.QUERY_FLOW_TABLE_ENTRY,  flow.QUERY_FLOW_TABLE_ENTRY_IN, self._query,
                    flow.QUERY_FLOW_TABLE_ENTRY_OUT.size),
            Command(Call.DESTROY, Opcode.DELETE_FLOW_TABLE_ENTRY, flow.DELETE_FLOW_TABLE_ENTRY_IN, self._delete),
        )

    def _create(self, mailbox: bytes) -> bytes:
        get = flow.SET_FLOW_TABLE_ENTRY_IN.get
        table, index = self._tables.in_mailbox(flow.SET_FLOW_TABLE_ENTRY_IN, mailbox), get(mailbox, "flow_index")
        group = FlowGroups.of(table, get(mailbox, "flow_context.group_id"))
        if not group.start <= index <= group.end:
            raise CommandError(
                Status.BAD_INDEX, CommandSyndrome.FLOW_INDEX,
                f"flow_index {index}: group {group.number:#x} of {table.name} has {group.start} to {group.end}",
            )
        if (table.number, index) in self._known:
            raise CommandError(
                Status.BAD_INDEX, CommandSyndrome.FLOW_INDEX,
                f"flow_index {index} of {table.name} has an entry already: op_mod 1 changes it",
            )
        value = bytes(mailbox[_VALUE : _VALUE + PARAM_BYTES])
        check_value(value, group.criteria)
        context = _read_context(mailbox)
        decision, uses = self._decide(table, context)
        table.rules.add(index, group.words, words_of(value), decision)
        group.entries += 1
        self._known[table.number, index] = _Entry(group.number, value, context, uses)
        uses.hold(_name(table, index))
        return DONE

    def _modify(self, mailbox: bytes) -> bytes:
        get = flow.SET_FLOW_TABLE_ENTRY_IN.get
        table, index, entry = self._in_mailbox(flow.SET_FLOW_TABLE_ENTRY_IN, mailbox)
        changes = get(mailbox, "modify_enable_mask")
        if changes & ~_MODIFIABLE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION,
                f"modify_enable_mask {changes:#x}: it has ACTION (1), FLOW_TAG (2), DEST_LIST (4) and COUNTERS (8)",
            )
        new, context = _read_context(mailbox), entry.context
        if changes & EntryModify.ACTION:
            context = replace(context, action=new.action)
        if changes & EntryModify.FLOW_TAG:
            context = replace(context, tag=new.tag)
        if changes & EntryModify.DEST_LIST:
            context = replace(context, destinations=new.destinations, ignore_level=new.ignore_level)
        if changes & EntryModify.COUNTERS:
            context = replace(context, counters=new.counters)
        decision, uses = self._decide(table, context)
        table.rules.change(index, decision)
        before, entry.uses, entry.context = entry.uses, uses, context
        uses.hold(_name(table, index))
        before.release(_name(table, index))
        return DONE

    def _query(self, mailbox: bytes) -> bytes:
        _, _, entry = self._in_mailbox(flow.QUERY_FLOW_TABLE_ENTRY_IN, mailbox)
        context = entry.context
        out = flow.QUERY_FLOW_TABLE_ENTRY_OUT.pack(
            flow_context={
                "group_id": entry.group, "flow_tag": context.tag, "action": context.action,
                "destination_list_size": len(context.destinations) // _ITEM,
                "flow_counter_list_size": len(context.counters) // _ITEM,
            },
            list=context.destinations + context.counters,
        )
        out[_VALUE : _VALUE + PARAM_BYTES] = entry.value
        return bytes(out)

    def _delete(self, mailbox: bytes) -> bytes:
        table, index, entry = self._in_mailbox(flow.DELETE_FLOW_TABLE_ENTRY_IN, mailbox)
        table.rules.remove(index)
        table.groups[entry.group].entries -= 1
        del self._known[table.number, index]
        entry.uses.release(_name(table, index))
        return DONE

    def _in_mailbox(self, struct: BitStruct, mailbox: bytes) -> tuple[FlowTable, int, _Entry]:
        table, index = self._tables.in_mailbox(struct, mailbox), struct.get(mailbox, "flow_index")
        if (table.number, index) not in self._known:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_ENTRY, f"{table.name} has no entry {index}"
            )
        return table, index, self._known[table.number, index]

    # --- the action of an entry ------------------------------------------------------------------------------------

    def _decide(self, table: FlowTable, context: _FlowContext) -> tuple[Decision, Uses]:
        """Check an entry's action. Return its decision, and the objects that it uses. CommandError if it is invalid."""
        action = context.action
        if others := action & ~_SUPPORTED:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION,
                f"action {action:#x}: {FlowAction(others)!r} is not supported, only DROP (2), FWD_DEST (4), COUNT (8)",
            )
        if (action & _DROP != 0) == (action & _FWD_DEST != 0):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION,
                f"action {action:#x}: an entry has exactly one of DROP (2) and FWD_DEST (4)",
            )
        uses, counter = Uses(), 0
        for name, bit, items in (
            ("flow_counter_list_size", FlowAction.COUNT, context.counters),
            ("destination_list_size", FlowAction.FWD_DEST, context.destinations),
        ):
            expected = 1 if action & int(bit) else 0
            if len(items) != expected * _ITEM:
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION,
                    f"{name} {len(items) // _ITEM}: action {action:#x}, which {'has' if expected else 'lacks'} "
                    f"{bit.name} ({int(bit)}), takes {expected}",
                )
        if context.counters:
            number = FLOW_COUNTER_LIST.get(context.counters, "flow_counter_id")
            counter = self._counters.need(number)
            uses.named.append((self._counters, number))
        if action & _DROP:
            return Decision(Fate.DROP, 0, counter, context.tag), uses
        fate, target, use = self._destination(table, DEST_FORMAT.unpack(context.destinations), context.ignore_level)
        uses.named.append(use)
        return Decision(fate, target, counter, context.tag), uses

    def _destination(
        self, table: FlowTable, destination: Fields, ignore_level: int
    ) -> tuple[Fate, int, tuple[MailboxObjects, int]]:
        """Return the fate and target of an entry that forwards, and the object that it forwards to."""
        kind, number = destination["destination_type"], destination["destination_id"]
        if destination["vhca_id_valid"] or destination["packet_reformat"]:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_DESTINATION,
                "vhca_id_valid and packet_reformat of a destination are not supported",
            )
        if kind == DestinationType.TIR:
            return Fate.TIR, self._tirs.need(number), (self._tirs, number)
        if kind == DestinationType.FLOW_TABLE:
            if ignore_level:
                self._tables.need(number)
            else:
                self._tables.need_next(table.level, number, "destination_id")
            return Fate.JUMP, self._tables.table.row_address(number), (self._tables, number)
        name = DestinationType(kind).name if kind in list(DestinationType) else "unknown"
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.FLOW_DESTINATION,
            f"destination_type {kind} ({name}): an entry of a NIC_RX table leads to a FLOW_TABLE (1) or a TIR (2)",
        )


def _name(table: FlowTable, index: int) -> str:
    return f"entry {index} of {table.name}"


def _read_context(mailbox: bytes) -> _FlowContext:
    """Read what an entry does from the flow_context of a mailbox. CommandError if the mailbox lacks its lists."""
    get = flow.SET_FLOW_TABLE_ENTRY_IN.get
    if get(mailbox, "flow_context.extended_destination"):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.FLOW_DESTINATION,
            "extended_destination is not supported: destinations have 8 bytes",
        )
    destinations = get(mailbox, "flow_context.destination_list_size")
    counters = get(mailbox, "flow_context.flow_counter_list_size")
    middle, end = _LIST + destinations * _ITEM, _LIST + (destinations + counters) * _ITEM
    if len(mailbox) < end:
        raise CommandError(
            Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT,
            f"destination_list_size {destinations}, flow_counter_list_size {counters}: the input takes {end} bytes and "
            f"has {len(mailbox)}",
        )
    return _FlowContext(
        get(mailbox, "flow_context.action"), get(mailbox, "flow_context.flow_tag"), bytes(mailbox[_LIST:middle]),
        bytes(mailbox[middle:end]), get(mailbox, "ignore_flow_level"),
    )
