"""The mailboxes of a command: its input, its output, and the field that has the number of its object."""

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
        """Return the field with the object's number: in the output if the command creates it, else in the input."""
        named = (f.name for struct in self for f in struct.fields.values() if (f.offset, f.width) == _NUMBER)
        return next(named, None)


def mailboxes(opcode: Opcode) -> Mailboxes:
    """Return the mailboxes of a command, which `commands` declares under the command's name."""
    return Mailboxes(getattr(commands, f"{opcode.name}_IN"), getattr(commands, f"{opcode.name}_OUT", OUT))
