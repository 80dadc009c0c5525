"""The base of objects for Ethernet queues: they need an Ethernet port, have a context, and use other objects."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag

from ....formats.commands import Opcode, Status
from ....formats.layout import Entry, Fields
from ....formats.mailboxes import mailboxes
from ...engine.hardware import Hardware
from ...state.tables import Row, Table
from ...turn.commands import EngineCommand
from ..command import DONE, Capabilities, opcode_of
from ..objects import MailboxObjects, Uses
from ..syndromes import CommandError, CommandSyndrome


class EthernetObjects(MailboxObjects):
    """Objects of one type, which only an Ethernet port can have. `contexts` are as QUERY returns them, by number."""

    contexts: dict[int, bytearray]
    put_op: int = EngineCommand.WRITE_ROW  # the engine's command that writes the row of a new object
    remove_op: int = EngineCommand.WRITE_ROW  # and the command that clears the row

    def __init__(
        self, hardware: Hardware, name: str, entry: Entry, rows: int, no_such: CommandSyndrome, shared: bool = False
    ):
        super().__init__(Table(name, entry, rows, shared), no_such)
        self._port, self._engine = hardware.port, hardware.engine
        self.contexts = {}
        self._uses: dict[int, Uses] = {}

    def capabilities(self) -> Capabilities:
        return {} if self._port.no_ethernet else self.ethernet_capabilities()

    def ethernet_capabilities(self) -> Capabilities:
        """Return the capability fields of an Ethernet port."""
        return {}

    def need_ethernet(self) -> None:
        """Refuse the object on a port without Ethernet."""
        if why := self._port.no_ethernet:
            raise CommandError(
                Status.BAD_SYS_STATE, CommandSyndrome.NO_ETHERNET, f"{self.table.name}s need an Ethernet port: {why}"
            )

    def add(self, number: int, row: Row, uses: Uses, mailbox: bytes) -> bytes:
        """Add a new object. Return the output of the mailbox that creates it."""
        boxes = mailboxes(Opcode(opcode_of(mailbox)))
        self._engine.post(self.put_op, self.table.row_address(number), row)
        uses.hold(self.name_of(number))
        self._uses[number] = uses
        if context := boxes.request.fields.get("ctx"):
            start = context.offset // 8
            self.contexts[number] = bytearray(mailbox[start : start + context.width // 8])
        return bytes(boxes.answer.pack(**dict.fromkeys(boxes.numbers, number)))

    def replace(self, number: int, row: Row, uses: Uses | None = None) -> None:
        """Change an object between two WQEs: its row and, if `uses` is given, the objects that it uses."""
        self._engine.post(EngineCommand.WRITE_ROW, self.table.row_address(number), row)
        if uses is not None:
            self.replace_uses(number, uses)

    def replace_uses(self, number: int, uses: Uses) -> None:
        """Replace the objects that an object uses."""
        uses.hold(self.name_of(number))
        self._uses[number].release(self.name_of(number))
        self._uses[number] = uses

    def number_in(self, mailbox: bytes) -> int:
        """Return the number of the object that an input names. CommandError if there is no such object."""
        (number,) = mailboxes(Opcode(opcode_of(mailbox))).named(mailbox).values()
        self.need(number)
        return number

    def context_of(self, number: int) -> bytearray:
        """Return an object's current context, with the data that follows it in the output of its QUERY."""
        return bytearray(self.contexts[number])

    def query(self, mailbox: bytes) -> bytes:
        """Return the output of an object's QUERY, which contains its context."""
        number = self.number_in(mailbox)
        answer = mailboxes(Opcode(opcode_of(mailbox))).answer
        return bytes(answer.pack()[: answer.offset("ctx")] + self.context_of(number))

    def destroy(self, mailbox: bytes) -> bytes:
        """Destroy an object. CommandError if another object uses it."""
        number = self.number_in(mailbox)
        self.need_unused(number)
        self._engine.post(self.remove_op, self.table.row_address(number), self.new_row())
        self.contexts.pop(number, None)
        self._uses.pop(number).release(self.name_of(number))
        return DONE


def refuse_fields(struct: str, context: Fields, unsupported: Mapping[str, str]) -> None:
    """Refuse a context in which an unsupported field is set. `unsupported` maps fields to the features they request."""
    for name, what in unsupported.items():
        value = context[name]
        if any(value.values()) if isinstance(value, dict) else value:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNSUPPORTED_FIELD,
                f"{struct}.{name} = {value}: the software NIC has no {what}; it must be 0",
            )


def check_mask(mask: int, allowed: IntFlag) -> None:
    """Refuse a MODIFY bitmask with bits other than the allowed ones."""
    if other := mask & ~int(allowed):
        names = ", ".join(f"{bit.name} ({int(bit):#x})" for bit in type(allowed) if bit & allowed)
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.MODIFY_MASK,
            f"bitmask {mask:#x}: bits {other:#x} cannot be modified, only {names or 'the state'}",
        )
