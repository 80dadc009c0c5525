"""Operations: what each opcode of a send queue means, in one table for all code that handles WQEs.

Python code reads rows (`OPERATIONS`, `PACKETS`). Compiled code reads columns: constant arrays with one value for each
WQE opcode (`column`) or packet opcode (`packet_column`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..enums import Access, WcOpcode, WrOpcode
from .commands import ServiceType
from .cqe import CqeOpcode
from .layout import Entry
from .packet import ATOMIC_ETH, IMM_DT, MASKED_ATOMIC_ETH, OPERATION_MASK, RETH, PacketOpcode
from .wqe import (
    ATOMIC_SEG,
    MASKED_CS32_SEG,
    MASKED_CS64_SEG,
    MASKED_FA32_SEG,
    MASKED_FA64_SEG,
    MMO_SEG,
    RADDR_SEG,
    WAIT_SEG,
    WqeOpcode,
)


class Answer(IntEnum):
    """What completes a request (IBTA 9.7.5)."""

    NONE   = 0  # nothing from the peer: the operation is local
    ACK    = 1  # UC, which has no acknowledgements, completes a request when it is sent
    READ   = 2  # a READ response
    ATOMIC = 3  # an atomic response


class Packets(NamedTuple):
    """The packets that carry a message, by their place in it.

    UC uses the same packets under its own service bits, and UD only `only`.
    """

    first: PacketOpcode
    middle: PacketOpcode
    last: PacketOpcode
    only: PacketOpcode


_CARRIERS = {
    "send":      Packets(*(PacketOpcode[f"RC_SEND_{place}"] for place in ("FIRST", "MIDDLE", "LAST", "ONLY"))),
    "send_imm":  Packets(*(PacketOpcode[f"RC_SEND_{place}"] for place in ("FIRST", "MIDDLE", "LAST_IMM", "ONLY_IMM"))),
    "write":     Packets(*(PacketOpcode[f"RC_WRITE_{place}"] for place in ("FIRST", "MIDDLE", "LAST", "ONLY"))),
    "write_imm": Packets(*(PacketOpcode[f"RC_WRITE_{place}"] for place in ("FIRST", "MIDDLE", "LAST_IMM", "ONLY_IMM"))),
    "read":      Packets(*(PacketOpcode.RC_READ_REQUEST,) * 4),
    "swap":      Packets(*(PacketOpcode.RC_COMPARE_SWAP,) * 4),
    "add":       Packets(*(PacketOpcode.RC_FETCH_ADD,) * 4),
    "masked_cs": Packets(*(PacketOpcode.MASKED_COMPARE_SWAP,) * 4),
    "masked_fa": Packets(*(PacketOpcode.MASKED_FETCH_ADD,) * 4),
}
READ_RESPONSE = Packets(*(PacketOpcode[f"RC_READ_RESPONSE_{place}"] for place in ("FIRST", "MIDDLE", "LAST", "ONLY")))

_BY_SIZE = {  # the operands of masked atomics, for words of 4 and of 8 bytes, as the opmod says
    "masked_cs": ((MASKED_CS32_SEG,), (MASKED_CS64_SEG, MASKED_CS64_SEG)),
    "masked_fa": ((MASKED_FA32_SEG,), (MASKED_FA64_SEG,)),
}

# segments    those after the control segment; `data*` is any number of data segments
# right       the remote right that the queue pair and the memory of the peer must grant
# receives    the CQE with which the operation completes a receive
# packets     a row of _CARRIERS; an operation without packets is local
# request     the opcode of the API, and the one in its completion
_TABLE = """
opcode           segments              right  receives      packets   answer services request              completion
NOP              -                     -      -             -         NONE   RC,UC,UD -                    -
WAIT             wait                  -      -             -         NONE   RC,UC,UD WAIT_CQ_PI           WAIT_CQ_PI
DUMP             data                  -      -             -         NONE   RC,UC,UD -                    -
MMO              mmo,data,data         -      -             -         NONE   RC       MEMCPY               MEMCPY
SEND             data*                 -      RESP_SEND     send      ACK    RC,UC,UD SEND                 SEND
SEND_IMM         data*                 -      RESP_SEND_IMM send_imm  ACK    RC,UC,UD SEND_WITH_IMM        SEND
RDMA_WRITE       raddr,data*           WRITE  -             write     ACK    RC,UC    RDMA_WRITE           RDMA_WRITE
RDMA_WRITE_IMM   raddr,data*           WRITE  RESP_WR_IMM   write_imm ACK    RC,UC    RDMA_WRITE_WITH_IMM  RDMA_WRITE
RDMA_READ        raddr,data*           READ   -             read      READ   RC       RDMA_READ            RDMA_READ
ATOMIC_CS        raddr,atomic,data*    ATOMIC -             swap      ATOMIC RC       ATOMIC_CMP_AND_SWP   COMP_SWAP
ATOMIC_FA        raddr,atomic,data*    ATOMIC -             add       ATOMIC RC       ATOMIC_FETCH_AND_ADD FETCH_ADD
ATOMIC_MASKED_CS raddr,masked_cs,data* ATOMIC -             masked_cs ATOMIC RC       -                    -
ATOMIC_MASKED_FA raddr,masked_fa,data* ATOMIC -             masked_fa ATOMIC RC       -                    -
"""


@dataclass(frozen=True)
class Operation:
    """A row of the table.

    `forms` are the segments between the control segment and the data; a masked atomic has two, one for each size of the
    word. `data` is how many data segments there are, or None for any number.
    """

    opcode: WqeOpcode
    forms: tuple[tuple[Entry, ...], ...]
    data: int | None
    right: Access
    receives: CqeOpcode | None
    packets: Packets | None
    answer: Answer
    services: frozenset[ServiceType]
    request: WrOpcode | None
    completion: WcOpcode | None

    @cached_property
    def segments(self) -> tuple[Entry, ...]:
        """The segments between the control segment and the data."""
        return self.forms[0]

    @cached_property
    def local(self) -> bool:
        """Whether the operation concerns this NIC only."""
        return self.answer == Answer.NONE

    @cached_property
    def remote(self) -> bool:
        """Whether the operation names memory of the peer."""
        return self.right != 0

    @cached_property
    def returns(self) -> bool:
        """Whether a response brings data. A fence waits for such requests (IBTA 10.8.3.3)."""
        return self.answer in (Answer.READ, Answer.ATOMIC)

    @cached_property
    def atomic(self) -> bool:
        """Whether the operation changes a word of the peer atomically."""
        return self.answer == Answer.ATOMIC

    @cached_property
    def masked(self) -> bool:
        """Whether the operation is a masked atomic, which mlx5 calls extended."""
        return len(self.forms) > 1

    @cached_property
    def imm(self) -> bool:
        """Whether the operation carries immediate data."""
        return self.receives in (CqeOpcode.RESP_WR_IMM, CqeOpcode.RESP_SEND_IMM)


_SEGMENTS = {"raddr": RADDR_SEG, "atomic": ATOMIC_SEG, "wait": WAIT_SEG, "mmo": MMO_SEG}


def _forms(names: list[str]) -> tuple[tuple[Entry, ...], ...]:
    """Return the lists of segments that these names stand for."""
    forms: tuple[tuple[Entry, ...], ...] = ((),)
    for name in names:
        forms = tuple(form + more for form in forms for more in _BY_SIZE.get(name) or ((_SEGMENTS[name],),))
    return forms


def _rows() -> dict[WqeOpcode, Operation]:
    table = {}
    for line in _TABLE.strip().splitlines()[1:]:
        opcode, segments, right, receives, packets, answer, services, request, completion = line.split()
        names = segments.split(",")
        table[WqeOpcode[opcode]] = Operation(
            WqeOpcode[opcode],
            _forms([name for name in names if name not in ("-", "data", "data*")]),
            None if "data*" in names else names.count("data"),
            Access(0) if right == "-" else Access[f"REMOTE_{right}"],
            None if receives == "-" else CqeOpcode[receives],
            None if packets == "-" else _CARRIERS[packets],
            Answer[answer],
            frozenset(ServiceType[name] for name in services.split(",")),
            None if request == "-" else WrOpcode[request],
            None if completion == "-" else WcOpcode[completion],
        )
    return table


OPERATIONS: dict[WqeOpcode, Operation] = _rows()


class Packet(NamedTuple):
    """The meaning of a request packet's opcode: the operation, the packet's place in its message, and its headers.

    `operation` is the one without immediate data: only the end of a message shows whether it has such data. The opcode
    of that packet also determines the CQE with which the message completes a receive (`receives`).
    """

    operation: Operation
    first: bool
    last: bool
    imm: bool
    receives: CqeOpcode | None
    headers: tuple[Entry, ...]


def _packet_rows() -> dict[PacketOpcode, Packet]:
    table: dict[PacketOpcode, Packet] = {}
    for operation in OPERATIONS.values():
        for place, opcode in (operation.packets._asdict() if operation.packets else {}).items():
            first, last = place in ("first", "only"), place in ("last", "only")
            imm = operation.imm and last
            headers = (RETH,) if operation.remote and first else ()
            if operation.atomic:
                headers = (MASKED_ATOMIC_ETH if operation.masked else ATOMIC_ETH,)
            plain = operation
            if imm:
                plain = table[operation.packets.first].operation  # type: ignore[union-attr]
                headers += (IMM_DT,)
            if opcode not in table or place == "only":
                table[opcode] = Packet(plain, first, last, imm, operation.receives if last else None, headers)
    return table


PACKETS: dict[PacketOpcode, Packet] = _packet_rows()


def column(value: Callable[[Operation], int]) -> np.ndarray:
    """Return a value of each operation, by WQE opcode, for compiled code. Opcodes without an operation have 0."""
    values = np.zeros(256, np.int16)
    for operation in OPERATIONS.values():
        values[operation.opcode] = value(operation)
    return values


def packet_column(value: Callable[[Packet], int]) -> np.ndarray:
    """Return a value of each request packet, by the operation in its opcode, for compiled code. Others have 0."""
    values = np.zeros(OPERATION_MASK + 1, np.int8)
    for opcode, packet in PACKETS.items():
        values[opcode & OPERATION_MASK] = value(packet)
    return values
