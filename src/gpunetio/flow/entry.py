"""Create and change entries of flow tables with PRM commands."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.commands import OUT, Opcode
from ..formats.flow import (
    DEST_FORMAT,
    FLOW_CONTEXT,
    FLOW_COUNTER_LIST,
    DestinationType,
    EntryChange,
    EntryModify,
    FlowAction,
)
from ..formats.flow import SET_FLOW_TABLE_ENTRY_IN as SET
from ..verbs import Context, DevxObject
from ..verbs.commands import command
from .matching import PARAM_BYTES, Match
from .table import Place

_CONTEXT = SET.offset("flow_context")
_VALUE = _CONTEXT + FLOW_CONTEXT.offset("match_value")


@dataclass(frozen=True)
class Forward:
    """A destination: its type and number. `tag` is the flow tag for its packets; 0 is none."""

    kind: DestinationType
    number: int
    tag: int = 0


def set_entry(
    ctx: Context, table: int, place: Place, match: Match, forward: Forward | None, counter: int | None = None,
) -> DevxObject:
    """Create an entry that forwards or drops packets. It may forward to a table of any level."""
    mailbox = _mailbox(table, place, match, forward, counter)
    with command(f"a rule for {match}"):
        return ctx.devx.create_raw(mailbox, OUT.size)


def change_entry(
    made: DevxObject, table: int, place: Place, match: Match, forward: Forward | None, counter: int | None
) -> None:
    """Change the destination of an entry atomically."""
    changes = EntryModify.ACTION | EntryModify.FLOW_TAG | EntryModify.DEST_LIST | EntryModify.COUNTERS
    mailbox = _mailbox(table, place, match, forward, counter)
    SET.update(mailbox, op_mod=EntryChange.MODIFY, modify_enable_mask=changes)
    with command(f"a rule for {match}"):
        made.modify_raw(mailbox, OUT.size)


def _mailbox(table: int, place: Place, match: Match, forward: Forward | None, counter: int | None) -> bytearray:
    action = FlowAction.DROP if forward is None else FlowAction.FWD_DEST
    mailbox = SET.pack(
        opcode=Opcode.SET_FLOW_TABLE_ENTRY, table_id=table, flow_index=place.index,
        ignore_flow_level=int(forward is not None and forward.kind == DestinationType.FLOW_TABLE),
    )
    FLOW_CONTEXT.update(
        mailbox, _CONTEXT, group_id=place.group_id, action=action | (FlowAction.COUNT if counter is not None else 0),
        flow_tag=forward.tag if forward else 0, destination_list_size=int(forward is not None),
        flow_counter_list_size=int(counter is not None),
    )
    mailbox[_VALUE : _VALUE + PARAM_BYTES] = match.value.to_bytes(PARAM_BYTES, "big")
    if forward is not None:
        mailbox += DEST_FORMAT.pack(destination_type=forward.kind, destination_id=forward.number)
    if counter is not None:
        mailbox += FLOW_COUNTER_LIST.pack(flow_counter_id=counter)
    return mailbox
