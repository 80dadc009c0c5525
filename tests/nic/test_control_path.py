"""What the modules of nic/control register: commands, by opcode and by call, and capabilities."""

from collections import Counter
from collections.abc import Iterator

import pytest

from gpunetio import verbs
from gpunetio.formats.commands import Opcode
from gpunetio.formats.layout import BitStruct
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.nic.control.command import Call, Command
from gpunetio.nic.control.control_path import ControlPath

CREATED = {
    Opcode.CREATE_MKEY, Opcode.CREATE_CQ, Opcode.CREATE_QP, Opcode.CREATE_RMP, Opcode.ALLOC_TRANSPORT_DOMAIN,
    Opcode.ALLOC_Q_COUNTER,
    Opcode.CREATE_TIS, Opcode.CREATE_SQ, Opcode.CREATE_RQ, Opcode.CREATE_RQT, Opcode.CREATE_TIR,
    Opcode.CREATE_FLOW_TABLE, Opcode.CREATE_FLOW_GROUP, Opcode.SET_FLOW_TABLE_ENTRY, Opcode.ALLOC_FLOW_COUNTER,
}
TWICE = {Opcode.SET_FLOW_TABLE_ENTRY}  # creates and modifies, by op_mod
PLACES = {(0x48, 24), (0x58, 8), (0xF8, 8)}  # of an object's number in mailboxes: bit offset, width
TABLE, GROUP = {"table_id": (0xA8, 24)}, {"table_id": (0xA8, 24), "group_id": (0xC0, 32)}
ENTRY = {"table_id": (0xA8, 24), "flow_index": (0x100, 32)}
NAMES = {  # what names objects of steering, in the input and in the answer: bit offset, width
    Opcode.CREATE_FLOW_TABLE: ({}, {"table_id": (0x48, 24)}), Opcode.MODIFY_FLOW_TABLE: (TABLE, {}),
    Opcode.QUERY_FLOW_TABLE: (TABLE, {}), Opcode.DESTROY_FLOW_TABLE: (TABLE, {}),
    Opcode.CREATE_FLOW_GROUP: (TABLE, {"group_id": (0x48, 24)}), Opcode.QUERY_FLOW_GROUP: (GROUP, {}),
    Opcode.DESTROY_FLOW_GROUP: (GROUP, {}), Opcode.SET_FLOW_TABLE_ENTRY: (ENTRY, {}),
    Opcode.QUERY_FLOW_TABLE_ENTRY: (ENTRY, {}), Opcode.DELETE_FLOW_TABLE_ENTRY: (ENTRY, {}),
    Opcode.ALLOC_FLOW_COUNTER: ({}, {"flow_counter_id": (0x40, 32)}),
    Opcode.QUERY_FLOW_COUNTER: ({"flow_counter_id": (0xE0, 32)}, {}),
    Opcode.DEALLOC_FLOW_COUNTER: ({"flow_counter_id": (0x40, 32)}, {}),
}


@pytest.fixture(scope="module")
def control() -> Iterator[ControlPath]:
    with verbs.open("soft0") as ctx:
        yield ctx.provider.nic.control  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def commands(control) -> list[Command]:
    return [command for part in control.handlers for command in part.commands()]


def test_every_opcode_has_one_command(commands):
    assert Counter(command.opcode for command in commands) == Counter([*Opcode, *TWICE])


def test_the_interpreter_finds_each_by_its_mailbox(control, commands):
    for command in commands:
        mailbox = command.mailbox.pack(opcode=command.opcode)
        mailbox[6:8] = (command.op_mod or 0).to_bytes(2, "big")
        found = control.interpreter.find(mailbox)
        assert (found.opcode, found.call) == (command.opcode, command.call)


def numbered(struct: BitStruct, place: tuple[int, int], number: int) -> bytes:
    """Return a mailbox with only a number in it, at (bit offset, width)."""
    return (number << 8 * struct.size - sum(place)).to_bytes(struct.size, "big")


def test_mailboxes_name_their_object(commands):
    """The provider reads the number of a new object there, and writes it there to destroy the object."""
    about = [command for command in commands if command.call is not Call.GENERAL and command.opcode not in NAMES]
    assert len(about) > 10
    for command in about:
        boxes = mailboxes(command.opcode)
        struct = boxes.answer if command.call is Call.CREATE else boxes.request
        (place,) = {(field.offset, field.width) for field in struct.fields.values()} & PLACES
        number = (1 << place[1]) - 2
        mailbox = numbered(struct, place, number)
        creates = command.call is Call.CREATE
        named = command.named(bytes(boxes.request.size), mailbox) if creates else command.named(mailbox)
        assert list(named.values()) == [number], command.opcode
        if command.call is not Call.CREATE:
            with_opcode = int.from_bytes(mailbox, "big") | command.opcode << 8 * struct.size - 16
            assert command.input_for(named) == with_opcode.to_bytes(struct.size, "big"), command.opcode


def test_mailboxes_of_steering_name_their_object(commands):
    """A group and an entry are named by their table as well."""
    found = [command for command in commands if command.opcode in NAMES]
    assert {command.opcode for command in found} == NAMES.keys()
    for command in found:
        request, answer = NAMES[command.opcode]
        boxes = mailboxes(command.opcode)
        expected, parts = {}, []
        for struct, places in zip(boxes, (request, answer), strict=True):
            numbers = {name: number for number, name in enumerate(places, 5)}
            parts.append(bytes(map(sum, zip(
                *(numbered(struct, place, numbers[name]) for name, place in places.items()), bytes(struct.size),
                strict=True,
            ))))
            expected |= numbers
        assert command.named(*parts) == expected, command.opcode


def test_kinds_that_mailboxes_create_are_destroyed_by_mailboxes(control):
    assert set(control.kinds) == CREATED
    for kind in control.kinds.values():
        destroy = kind.command(Call.DESTROY)
        mailbox = destroy.input_for(destroy.named(bytes(destroy.mailbox.size)))
        assert len(mailbox) == destroy.mailbox.size
        assert Opcode(int.from_bytes(mailbox[:2], "big")) is destroy.opcode


def test_each_capability_is_announced_once(control):
    """`pack_capabilities` would keep the last of two values."""
    announced = Counter(
        (kind, name) for part in control.handlers for kind, fields in part.capabilities().items() for name in fields
    )
    assert announced.most_common(1)[0][1] == 1
