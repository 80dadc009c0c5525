"""Commands, and the base class of the modules that handle them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ...formats import commands as cmd
from ...formats.commands import CapClass, Opcode
from ...formats.layout import BitStruct, Fields
from ...formats.mailboxes import mailboxes

OUT_BYTES: int = cmd.OUT.size
DONE = bytes(OUT_BYTES)  # the answer of a command that returns no data

Capabilities = Mapping[CapClass, Mapping[str, int | Fields]]  # fields of each class of capabilities


class Call(Enum):
    """The DEVX call that carries a command."""

    CREATE = "devx_obj_create"
    MODIFY = "devx_obj_modify"
    QUERY = "devx_obj_query"
    DESTROY = "devx_obj_destroy"
    GENERAL = "general_cmd"  # concerns no object


def _nothing() -> None: ...


@dataclass(frozen=True)
class Command:
    """A command: its DEVX call, opcode, input mailbox, handler, and the size of its output in bytes.

    If several commands share an opcode, `op_mod` of the input selects the command. `before` runs before the NIC is
    locked for the command, for slow steps such as compiling a part of the engine.

    The handler gets the input and returns the output. It raises CommandError before it changes anything.
    """

    call: Call
    opcode: Opcode
    mailbox: BitStruct
    execute: Callable[[bytes], bytes]
    answer_bytes: int = OUT_BYTES
    op_mod: int | None = None
    before: Callable[[], None] = _nothing

    def input_for(self, names: Mapping[str, int]) -> bytes:
        """Return an input with only the opcode and the fields that name an object."""
        return bytes(self.mailbox.pack(opcode=self.opcode, **names))

    def named(self, request: bytes, answer: bytes = b"") -> dict[str, int]:
        """Return the fields that name the command's object, which may be new (`Mailboxes.named`)."""
        return mailboxes(self.opcode).named(request, answer)


class Handlers:
    """The handlers of one module: related commands, and the capabilities that announce them."""

    def commands(self) -> Iterable[Command]:
        """Return the commands to register."""
        return ()

    def command(self, call: Call) -> Command:
        """Return the command for a call such as CREATE or DESTROY."""
        return next(command for command in self.commands() if command.call is call)

    def capabilities(self) -> Capabilities:
        """Return the capability fields that announce these commands and their limits."""
        return {}

    def close(self) -> None:
        """Free the handlers' memory. The engine must have stopped."""


def opcode_of(mailbox: bytes) -> int:
    """Return the opcode of an input mailbox."""
    return int.from_bytes(mailbox[:2], "big")


def op_mod_of(mailbox: bytes) -> int:
    """Return the opcode modifier (op_mod) of an input mailbox."""
    return int.from_bytes(mailbox[6:8], "big")
