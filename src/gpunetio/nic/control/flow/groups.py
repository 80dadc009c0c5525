"""Flow groups: CREATE_FLOW_GROUP, QUERY_FLOW_GROUP, DESTROY_FLOW_GROUP."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from ....formats import flow
from ....formats.commands import Opcode, Status
from ....formats.flow import GroupType
from ....formats.layout import BitStruct
from ..command import DONE, Call, Command, Handlers
from ..syndromes import CommandError, CommandSyndrome
from .match import PARAM_BYTES, check_criteria, words_of
from .tables import FlowGroup, FlowTable, FlowTables

_CRITERIA = flow.CREATE_FLOW_GROUP_IN.offset("match_criteria")


class FlowGroups(Handlers):
    """The groups of all flow tables. Each table numbers its groups separately."""

    def __init__(self, tables: FlowTables):
        self._tables = tables

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_FLOW_GROUP,  flow.CREATE_FLOW_GROUP_IN,  self._create),
            Command(Call.QUERY,   Opcode.QUERY_FLOW_GROUP,   flow.QUERY_FLOW_GROUP_IN,   self._query,
                    flow.QUERY_FLOW_GROUP_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_FLOW_GROUP, flow.DESTROY_FLOW_GROUP_IN, self._destroy),
        )

    @staticmethod
    def of(table: FlowTable, number: int) -> FlowGroup:
        """Return a group of a table by number. CommandError if the table has no such group."""
        if number not in table.groups:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_GROUP, f"{table.name} has no group {number:#x}"
            )
        return table.groups[number]

    def _create(self, mailbox: bytes) -> bytes:
        get = flow.CREATE_FLOW_GROUP_IN.get
        table = self._tables.in_mailbox(flow.CREATE_FLOW_GROUP_IN, mailbox)
        for name in ("group_type", "match_definer_id", "source_eswitch_owner_vhca_id_valid"):
            if value := get(mailbox, name):
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.FLOW_GROUP,
                    f"{name} {value} is not supported: a group has the type {GroupType.TCAM_SUBTABLE.name} (0), and "
                    "its mask is in match_criteria",
                )
        start, end = get(mailbox, "start_flow_index"), get(mailbox, "end_flow_index")
        _check_range(table, start, end)
        enable, criteria = get(mailbox, "match_criteria_enable"), mailbox[_CRITERIA : _CRITERIA + PARAM_BYTES]
        check_criteria(enable, criteria)
        words = words_of(criteria)
        number = next(number for number in count(1) if number not in table.groups)
        table.rules.add_group(words, start)
        table.groups[number] = FlowGroup(number, start, end, enable, bytes(criteria), words)
        return bytes(flow.CREATE_FLOW_GROUP_OUT.pack(group_id=number))

    def _query(self, mailbox: bytes) -> bytes:
        group = self._in_mailbox(flow.QUERY_FLOW_GROUP_IN, mailbox)[1]
        out = flow.QUERY_FLOW_GROUP_OUT.pack(
            start_flow_index=group.start, end_flow_index=group.end, match_criteria_enable=group.enable
        )
        out[_CRITERIA : _CRITERIA + PARAM_BYTES] = group.criteria
        return bytes(out)

    def _destroy(self, mailbox: bytes) -> bytes:
        table, group = self._in_mailbox(flow.DESTROY_FLOW_GROUP_IN, mailbox)
        if group.entries:
            raise CommandError(
                Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
                f"group {group.number:#x} of {table.name} has {group.entries} entries: delete them first",
            )
        table.rules.remove_group(group.words, group.start)
        del table.groups[group.number]
        return DONE

    def _in_mailbox(self, struct: BitStruct, mailbox: bytes) -> tuple[FlowTable, FlowGroup]:
        table = self._tables.in_mailbox(struct, mailbox)
        return table, self.of(table, struct.get(mailbox, "group_id"))


def _check_range(table: FlowTable, start: int, end: int) -> None:
    """Refuse indices that are outside the table or belong to other groups."""
    if not start <= end < 1 << table.log:
        raise CommandError(
            Status.BAD_INDEX, CommandSyndrome.FLOW_GROUP,
            f"start_flow_index {start}, end_flow_index {end}: {table.name} has the indices 0 to {(1 << table.log) - 1}",
        )
    for group in table.groups.values():
        if start <= group.end and group.start <= end:
            raise CommandError(
                Status.BAD_INDEX, CommandSyndrome.FLOW_GROUP,
                f"start_flow_index {start}, end_flow_index {end}: group {group.number:#x} of {table.name} has "
                f"{group.start} to {group.end}",
            )
