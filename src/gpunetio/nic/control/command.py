"""What a command is, and what modules with handlers have in common."""

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
    """A command: the call that carries it, its opcode, its input mailbox, its handler, and the bytes that it answers.

    If calls share an opcode, `op_mod` of the input says which one it is for. What takes long, such as to compile a part
    of the engine, is done `before` the NIC is locked for the command.

    The handler takes the input and returns the output. It raises CommandError before it changes anything.
    """

    call: Call
    opcode: Opcode
    mailbox: BitStruct
    execute: Callable[[bytes], bytes]
    answer_bytes: int = OUT_BYTES
    op_mod: int | None = None
    before: Callable[[], None] = _nothing

    def input_for(self, names: Mapping[str, int]) -> bytes:
        """Return an input that has only the opcode and what names an object."""
        return bytes(self.mailbox.pack(opcode=self.opcode, **names))

    def named(self, request: bytes, answer: bytes = b"") -> dict[str, int]:
        """Return what names the object of a command, which may be new (`Mailboxes.named`)."""
        return mailboxes(self.opcode).named(request, answer)


class Handlers:
    """The handlers of one module: commands that belong together, and the capabilities that they give to the device."""

    def commands(self) -> Iterable[Command]:
        """Return the rows to register, one for each opcode."""
        return ()

    def command(self, call: Call) -> Command:
        """Return the command that creates or destroys an object."""
        return next(command for command in self.commands() if command.call is call)

    def capabilities(self) -> Capabilities:
        """Return the capability fields that announce these commands and their limits."""
        return {}

    def close(self) -> None:
        """Free what belongs to the handlers. The engine must have stopped."""


def opcode_of(mailbox: bytes) -> int:
    """Return the opcode, with which every input begins."""
    return int.from_bytes(mailbox[:2], "big")


def op_mod_of(mailbox: bytes) -> int:
    """Return the modifier of the opcode."""
    return int.from_bytes(mailbox[6:8], "big")
