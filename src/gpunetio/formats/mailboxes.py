"""The mailboxes of a command: what it takes, what it answers, and which field numbers the object that it is about."""

from __future__ import annotations

from typing import NamedTuple

from . import commands
from .commands import OUT, Opcode
from .layout import BitStruct

_NUMBER = 0x48, 24  # bit offset and width of the object's number, where a mailbox has one (PRM, "Command Reference")


class Mailboxes(NamedTuple):
    """Input and output of a command."""

    request: BitStruct
    answer: BitStruct

    @property
    def number(self) -> str | None:
        """The field with the object's number: of the output when the command creates the object, else of the input."""
        named = (f.name for struct in self for f in struct.fields.values() if (f.offset, f.width) == _NUMBER)
        return next(named, None)


def mailboxes(opcode: Opcode) -> Mailboxes:
    """Return the mailboxes of a command, which `commands` declares under the command's name."""
    return Mailboxes(getattr(commands, f"{opcode.name}_IN"), getattr(commands, f"{opcode.name}_OUT", OUT))
