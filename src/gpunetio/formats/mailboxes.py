"""The mailboxes of a command: its input, its output, and the field that has the number of its object."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from . import commands, flow
from . import ethernet_queues as ethernet
from .commands import OUT, Opcode
from .layout import BitStruct

_MODULES = commands, ethernet, flow  # that declare mailboxes
_NUMBERS = {  # the fields that name a command's object (PRM, "Command Reference")
    "cqn", "qpn", "rmpn", "transport_domain", "tisn", "tirn", "rqtn", "sqn", "rqn", "counter_set_id", "table_id",
    "group_id", "flow_index", "flow_counter_id", "mkey_index",
}
_CREATE = "CREATE_", "ALLOC_"


@cache
def _numbers_of(struct: BitStruct) -> tuple[str, ...]:
    return tuple(name for name in struct.fields if name in _NUMBERS)


class Mailboxes(NamedTuple):
    """Input and output of a command."""

    request: BitStruct
    answer: BitStruct

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the fields that name the object: its number and, inside a flow table, the table's as well."""
        return tuple(name for struct in self for name in _numbers_of(struct))

    def named(self, request: bytes, answer: bytes = b"") -> dict[str, int]:
        """Return the fields that name the object: assigned ones from the answer, the others from the request."""
        boxes = (self.request, request), (self.answer, answer)
        return {name: struct.get(box, name) for struct, box in boxes for name in _numbers_of(struct)}


@cache
def mailboxes(opcode: Opcode) -> Mailboxes:
    """Return the mailboxes of a command, which a module of this package declares under the command's name."""
    request = next(found for module in _MODULES if (found := getattr(module, f"{opcode.name}_IN", None)))
    answers = (getattr(module, f"{opcode.name}_OUT", None) for module in _MODULES)
    return Mailboxes(request, next(filter(None, answers), OUT))


def created_by(command: str) -> str | None:
    """Return the kind of object that a command makes, such as "CQ" for "CREATE_CQ". None if it makes none."""
    if command == Opcode.SET_FLOW_TABLE_ENTRY.name:
        return "FLOW_TABLE_ENTRY"
    return next((command.removeprefix(prefix) for prefix in _CREATE if command.startswith(prefix)), None)
