"""The table of operations against an independent transcription of the specifications (tests/data), and its readers."""

import csv
import re

import pytest

from gpunetio.enums import WrOpcode
from gpunetio.formats import commands, operations
from gpunetio.formats.operations import OPERATIONS, PACKETS, Operation
from gpunetio.formats.packet import OPERATION_MASK, PacketOpcode
from gpunetio.formats.wqe import SEGMENT
from repository import DATA, ROOT

TABLE = DATA / "operations.csv"
DOCUMENT = ROOT / "docs" / "soft-nic.md"
with TABLE.open(newline="") as lines:
    ROWS = {int(row["opcode"], 16): row for row in csv.DictReader(lines)}


def test_the_same_opcodes():
    assert sorted(OPERATIONS) == sorted(ROWS)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.opcode.name)
def test_row(operation: Operation):
    row = ROWS[operation.opcode]
    sizes = [1 + sum(entry.size for entry in form) // SEGMENT + (operation.data or 0) for form in operation.forms]
    assert sizes == [int(row[name]) for name in ("segments", "wide_segments") if row[name]]
    assert operation.right == int(row["remote_right"])
    assert operation.receives == (int(row["receive_cqe"]) if row["receive_cqe"] else None)
    assert operation.answer.name.lower() == (row["response"] or "none")
    assert {service.name.lower() for service in operation.services} == set(row["services"].split())
    places = [int(row[place], 16) for place in ("first", "middle", "last", "only") if row[place]]
    assert list(operation.packets or ()) == places


def test_a_local_operation_asks_nothing_of_the_peer():
    for operation in OPERATIONS.values():
        if operation.local:
            assert (operation.right, operation.receives, operation.packets) == (0, None, None)
            assert operation.data is not None


def test_each_request_of_the_api_has_one_row():
    asked = [operation.request for operation in OPERATIONS.values() if operation.request is not None]
    assert sorted(asked) == sorted(WrOpcode)
    for operation in OPERATIONS.values():
        assert (operation.request is None) == (operation.completion is None)


def test_each_request_packet_has_one_row():
    responses = {*operations.READ_RESPONSE, PacketOpcode.RC_ACKNOWLEDGE, PacketOpcode.RC_ATOMIC_ACKNOWLEDGE}
    of_rc = {opcode for opcode in PacketOpcode if opcode >> 5 == commands.ServiceType.RC}
    ours = {opcode for opcode in PacketOpcode if opcode >= 0xC0}  # which IBTA leaves to manufacturers
    assert PACKETS.keys() == of_rc - responses | ours
    assert not {opcode & OPERATION_MASK for opcode in ours} & (of_rc | responses)
    # IBTA table 38 names the place in the message, the immediate data and the extended transport headers.
    for opcode, packet in PACKETS.items():
        name = opcode.name
        assert packet.imm == name.endswith("_IMM")
        message = "SEND" in name or "WRITE" in name
        assert packet.first == (not message or "FIRST" in name or "ONLY" in name)
        assert packet.last == (not message or "LAST" in name or "ONLY" in name)
        headers = ["reth"] if re.search("WRITE_(FIRST|ONLY)|READ_REQUEST", name) else []
        headers += ["atomic_eth"] if re.search("RC_(COMPARE_SWAP|FETCH_ADD)", name) else []
        headers += ["masked_atomic_eth"] if name.startswith("MASKED") else []
        headers += ["imm_dt"] if packet.imm else []
        assert [type(entry).__name__ for entry in packet.headers] == headers
        assert packet.operation.opcode.name.split("_")[-1] in name or packet.operation.atomic


def test_columns():
    rights = operations.column(lambda operation: operation.right)
    assert len(rights) == 256  # an opcode has 8 bits: no index is outside
    assert {opcode: int(right) for opcode, right in enumerate(rights) if right} == {
        opcode: operation.right for opcode, operation in OPERATIONS.items() if operation.right
    }
    firsts = operations.packet_column(lambda packet: packet.first)
    rows = {opcode & OPERATION_MASK: packet for opcode, packet in PACKETS.items()}
    assert len(rows) == len(PACKETS)
    assert [bool(first) for first in firsts] == [
        opcode in rows and rows[opcode].first for opcode in range(OPERATION_MASK + 1)
    ]


# --- the table in the documents --------------------------------------------------------------------------------------


def named(form: tuple, data: int | None) -> str:
    """The segments of a WQE in words."""
    names = ["control", *(type(entry).__name__.removesuffix("_seg") for entry in form)]
    return ", ".join(names + (["data …"] if data is None else ["data"] * data))


def documented(operation: Operation) -> str:
    """The line of the documents' table."""
    cells = [
        f"{operation.opcode.name}, {operation.opcode:#04x}",
        " or ".join(named(form, operation.data) for form in operation.forms),
        operation.right.name or "" if operation.right else "",
        operation.receives.name if operation.receives else "",
        {"NONE": "local", "ACK": "acknowledgement", "READ": "READ response", "ATOMIC": "atomic response"}[
            operation.answer.name
        ],
        ", ".join(sorted(service.name for service in operation.services)),
        operation.request.name if operation.request is not None else "",
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_documents_list_the_rows():
    lines = [documented(operation) for operation in OPERATIONS.values()]
    text = DOCUMENT.read_text()
    start = text.index("| opcode | segments |")
    listed = text[start : text.index("\n\n", start)].splitlines()[2:]
    assert listed == lines, "write this table into docs/soft-nic.md:\n" + "\n".join(lines)
