"""The command interpreter, which executes mailboxes as the firmware of a ConnectX does.

A handler checks everything before it changes anything. It prepares a new row, which the engine then writes into the
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...errors import TimedOutError
from ...formats import commands as cmd
from ...formats.commands import Opcode, Status
from .command import Call, Command, op_mod_of, opcode_of
from .syndromes import CommandError, CommandSyndrome


class CommandInterpreter:
    """Executes mailboxes by calling their handlers. `failed` is set once the device has failed."""

    def __init__(self, commands: Iterable[Command], write_back: Callable[[], None]):
        """`write_back` is `Engine.write_back`, which is called before queries."""
        self.failed = False
        self._write_back = write_back
        self._commands = {(int(command.opcode), command.op_mod): command for command in commands}
        self._modified = {opcode for opcode, op_mod in self._commands if op_mod is not None}

    def find(self, mailbox: bytes) -> Command | None:
        """Return the command of a mailbox, or None if the NIC has no such command."""
        opcode = opcode_of(mailbox)
        return self._commands.get((opcode, op_mod_of(mailbox) if opcode in self._modified else None))

    def execute(self, mailbox: bytes, out_size: int, command: Command | None = None) -> tuple[bytes, str]:
        """Execute a command. Return the output mailbox, and the reason for a refusal ("" if it was not refused).

        The output of a refused command has 16 bytes. Any other output is cut or padded to `out_size`. `command` is the
        result of `find`, if the caller has already called it.
        """
        try:
            command = command or self.find(mailbox)
            return self._dispatch(command, mailbox, out_size).ljust(out_size, b"\0")[:out_size], ""
        except CommandError as error:
            return bytes(cmd.OUT.pack(status=error.status, syndrome=error.syndrome)), error.detail
        except TimedOutError as error:
            out = cmd.OUT.pack(status=Status.INTERNAL_ERR, syndrome=CommandSyndrome.ENGINE_TIMEOUT)
            return bytes(out), str(error)

    def _dispatch(self, command: Command | None, mailbox: bytes, out_size: int) -> bytes:
        if command is None and opcode_of(mailbox) in self._modified:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD,
                f"op_mod {op_mod_of(mailbox)} of {Opcode(opcode_of(mailbox)).name} does not exist",
            )
        if command is None:
            raise CommandError(
                Status.BAD_OP, CommandSyndrome.UNKNOWN_OPCODE,
                f"opcode {opcode_of(mailbox):#05x} is not supported by the software NIC",
            )
        if self.failed and command.call is not Call.DESTROY:
            raise CommandError(Status.INTERNAL_ERR, CommandSyndrome.DEVICE_FAILED, "the device has failed: close it")
        name = command.opcode.name
        if len(mailbox) < command.mailbox.size:
            raise CommandError(
                Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT,
                f"{name} takes {command.mailbox.size} bytes, the input has {len(mailbox)}",
            )
        if out_size < command.answer_bytes:
            raise CommandError(
                Status.BAD_OUTPUT_LEN, CommandSyndrome.SHORT_OUTPUT,
                f"{name} answers {command.answer_bytes} bytes, the output has room for {out_size}",
            )
        if command.call is Call.QUERY:
            self._write_back()
        return command.execute(mailbox)
