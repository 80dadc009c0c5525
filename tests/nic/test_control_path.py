"""What the modules of nic/control register: commands, by opcode and by call, and capabilities."""

from collections import Counter
from collections.abc import Iterator

import pytest

from gpunetio import verbs
from gpunetio.formats import commands as cmd
from gpunetio.formats.commands import Opcode
from gpunetio.nic.control.command import OBJECT_NUMBER, Call, Command
from gpunetio.nic.control.control_path import ControlPath

NUMBERS = ("cqn", "qpn", "rmpn")
ANSWERS = {
    Opcode.CREATE_CQ: cmd.CREATE_CQ_OUT, Opcode.CREATE_QP: cmd.CREATE_QP_OUT, Opcode.CREATE_RMP: cmd.CREATE_RMP_OUT,
}  # fmt: skip


@pytest.fixture(scope="module")
def control() -> Iterator[ControlPath]:
    with verbs.open("soft0") as ctx:
        yield ctx.provider.nic.control  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def commands(control) -> list[Command]:
    return [command for part in control.handlers for command in part.commands()]


def test_every_opcode_has_one_command(commands):
    assert Counter(command.opcode for command in commands) == Counter(Opcode)


def test_the_interpreter_finds_each_by_its_mailbox(control, commands):
    for command in commands:
        found = control.interpreter.find(bytes(command.mailbox.pack(opcode=command.opcode)))
        assert (found.opcode, found.call) == (command.opcode, command.call)


def test_mailboxes_name_their_object_in_the_same_place(commands):
    """The provider reads the number there, and writes it there to destroy an object."""
    formats = {command.opcode: command.mailbox for command in commands if command.call in (Call.MODIFY, Call.QUERY)}
    formats |= {command.opcode: command.mailbox for command in commands if command.call is Call.DESTROY}
    formats |= {command.opcode: ANSWERS[command.opcode] for command in commands if command.call is Call.CREATE}
    assert len(formats) > 10
    for opcode, struct in formats.items():
        (field,) = (name for name in NUMBERS if name in struct.fields)
        mailbox = bytearray(struct.size)
        mailbox[OBJECT_NUMBER] = (0xABCDEF).to_bytes(3, "big")
        assert struct.get(mailbox, field) == 0xABCDEF, opcode


def test_kinds_that_mailboxes_create_are_destroyed_by_mailboxes(control):
    assert set(control.queues) == set(ANSWERS)
    for queues in control.queues.values():
        destroy = queues.command(Call.DESTROY)
        mailbox = destroy.input_for(5)
        assert len(mailbox) == destroy.mailbox.size
        assert Opcode(int.from_bytes(mailbox[:2], "big")) is destroy.opcode


def test_each_capability_is_announced_once(control):
    """`pack_capabilities` would keep the last of two values."""
    announced = Counter(
        (kind, name) for part in control.handlers for kind, fields in part.capabilities().items() for name in fields
    )
    assert announced.most_common(1)[0][1] == 1
