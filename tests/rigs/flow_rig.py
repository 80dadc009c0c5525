"""Flow tables of a software NIC, controlled through mailboxes."""

from typing import Any

from gpunetio.formats import flow
from gpunetio.formats.commands import Opcode
from gpunetio.formats.flow import (
    DEST_FORMAT,
    FLOW_COUNTER_LIST,
    FTE_MATCH_PARAM,
    DestinationType,
    FlowAction,
    MatchCriteria,
    MissAction,
)
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.nic.nic import SoftNic

OUTER, MISC = MatchCriteria.OUTER_HEADERS, MatchCriteria.MISC_PARAMETERS
TIR, TABLE = DestinationType.TIR, DestinationType.FLOW_TABLE


class Refused(Exception):
    """A mailbox was refused: status, syndrome, and words."""


class Steering:
    """Commands on the flow tables of a NIC."""

    def __init__(self, nic: SoftNic):
        self.nic = nic

    def execute(self, opcode: Opcode, tail: bytes = b"", room: int = 0, **fields: Any) -> bytes:
        boxes = mailboxes(opcode)
        room = room or boxes.answer.size
        out, words = self.nic.execute(bytes(boxes.request.pack(opcode=opcode, **fields)) + tail, room)
        if out[0]:
            raise Refused(out[0], int.from_bytes(out[4:8], "big"), words)
        return out

    def table(self, level: int = 0, log: int = 8, miss: int = 0, **context: Any) -> int:
        """Return the number of a new table."""
        if miss:
            context |= {"table_miss_action": MissAction.FORWARD, "table_miss_id": miss}
        out = self.execute(
            Opcode.CREATE_FLOW_TABLE, flow_table_context={"level": level, "log_size": log, **context}
        )
        return flow.CREATE_FLOW_TABLE_OUT.get(out, "table_id")

    def group(self, table: int, start: int, end: int, criteria: bytes = bytes(512), enable: int = OUTER | MISC) -> int:
        """Return the number of a new group. `criteria` is packed."""
        out = self.execute(
            Opcode.CREATE_FLOW_GROUP, table_id=table, start_flow_index=start, end_flow_index=end,
            match_criteria_enable=enable, match_criteria=FTE_MATCH_PARAM.unpack(criteria),
        )
        return flow.CREATE_FLOW_GROUP_OUT.get(out, "group_id")

    def set(
        self, table: int, group: int, index: int, value: bytes = bytes(512), *, op_mod: int = 0,
        action: int | None = None, to: tuple[DestinationType, int] | None = None, counter: int = 0, tag: int = 0,
        **fields: Any,
    ) -> None:
        """Make or change an entry that drops, or leads to `to`."""
        if action is None:
            action = (FlowAction.FWD_DEST if to else FlowAction.DROP) | (FlowAction.COUNT if counter else 0)
        items = b"".join((
            bytes(DEST_FORMAT.pack(destination_type=to[0], destination_id=to[1])) if to else b"",
            bytes(FLOW_COUNTER_LIST.pack(flow_counter_id=counter)) if counter else b"",
        ))
        context = {
            "group_id": group, "flow_tag": tag, "action": action, "destination_list_size": int(to is not None),
            "flow_counter_list_size": int(counter != 0), "match_value": FTE_MATCH_PARAM.unpack(value),
            **fields.pop("context", {}),
        }
        self.execute(
            Opcode.SET_FLOW_TABLE_ENTRY, items, op_mod=op_mod, table_id=table, flow_index=index, flow_context=context,
            **fields,
        )

    def delete(self, table: int, index: int) -> None:
        self.execute(Opcode.DELETE_FLOW_TABLE_ENTRY, table_id=table, flow_index=index)

    def root(self, table: int) -> None:
        self.execute(Opcode.SET_FLOW_TABLE_ROOT, op_mod=int(table == 0), table_id=table)

    def counter(self, **fields: Any) -> int:
        return flow.ALLOC_FLOW_COUNTER_OUT.get(self.execute(Opcode.ALLOC_FLOW_COUNTER, **fields), "flow_counter_id")

    def counts(self, counter: int, **fields: Any) -> tuple[int, int]:
        """Return packets and octets."""
        out = self.execute(Opcode.QUERY_FLOW_COUNTER, flow_counter_id=counter, **fields)
        statistics = flow.QUERY_FLOW_COUNTER_OUT.get(out, "flow_statistics")
        return statistics["packets"], statistics["octets"]


def match(outer: dict[str, Any] | None = None, misc: dict[str, Any] | None = None, **parts: Any) -> bytes:
    """Return packed match parameters."""
    return bytes(FTE_MATCH_PARAM.pack(outer_headers=outer or {}, misc_parameters=misc or {}, **parts))
