"""What a command is, and what modules with handlers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ...formats import commands as cmd
from ...formats.commands import CapClass, Opcode
from ...formats.layout import BitStruct

OUT_BYTES: int = cmd.OUT.size
DONE = bytes(OUT_BYTES)  # the answer of a command that returns no data

OBJECT_NUMBER = slice(9, 12)  # the bytes with an object's number: in inputs, and in the answers that create objects

Capabilities = Mapping[CapClass, Mapping[str, int]]  # fields of each class of capabilities


class Call(Enum):
    """The DEVX call that carries a command."""

    CREATE = "devx_obj_create"
    MODIFY = "devx_obj_modify"
    QUERY = "devx_obj_query"
    DESTROY = "devx_obj_destroy"
    GENERAL = "general_cmd"  # concerns no object


@dataclass(frozen=True)
class Command:
    """A command: the call that carries it, its opcode, its input mailbox, its handler, and the bytes that it answers.

    The handler takes the input and returns the output. It raises CommandError before it changes anything.
    """

    call: Call
    opcode: Opcode
    mailbox: BitStruct
    execute: Callable[[bytes], bytes]
    answer_bytes: int = OUT_BYTES

    def input_for(self, number: int) -> bytes:
        """Return an input that has only the opcode and the number of an object."""
        mailbox = self.mailbox.pack(opcode=self.opcode)
        mailbox[OBJECT_NUMBER] = number.to_bytes(3, "big")
        return bytes(mailbox)


class Handlers:
    """The handlers of one module: commands that belong together, and the capabilities that they give to the device."""

    def commands(self) -> Iterable[Command]:
        """Return the rows to register, one for each opcode."""
        return ()

    def capabilities(self) -> Capabilities:
        """Return the capability fields that announce these commands and their limits."""
        return {}

    def close(self) -> None:
        """Free what belongs to the handlers. The engine must have stopped."""


def opcode_of(mailbox: bytes) -> int:
    """Return the opcode, with which every input begins."""
    return int.from_bytes(mailbox[:2], "big")
