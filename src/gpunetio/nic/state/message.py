"""A request as the requester hands it to the responder inside one NIC, where no packets are needed."""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .qp import QP_ROW
from .record import State, requester, responder

MAX_SEGMENTS = 64

WQE_BYTES = 1024  # the largest WQE: 16 basic blocks


class Message(State):
    """A request, as the requester hands it to the responder inside a NIC."""

    opcode: I64 = requester("formats.wqe.WqeOpcode")
    src_qpn: I64 = requester("number of the QP that sends")
    dst_qpn: I64 = requester("number of its peer")
    index: I64 = requester("index of the WQE")
    raddr: I64 = requester("remote virtual address")
    rkey: I64 = requester("its key")
    nbytes: I64 = requester("bytes of payload")
    imm: I64 = requester("immediate data")
    # atomics, and how the payload lies
    compare: I64 = requester("operand: what is compared", line=True)
    swap_add: I64 = requester("operand: what is swapped or added")
    compare_mask: I64 = requester("of a masked atomic: the bits that are compared")
    swap_mask: I64 = requester("of a masked atomic: the bits that are swapped; of an add: where its fields end")
    solicited: I64 = requester("not 0: the completion is solicited")
    nsegments: I64 = requester("entries of `segments`")
    device: I64 = requester("not 0: some segments are in device memory (memory/streams.py)")
    # room
    payload: Annotated[int, "i64[8]"] = responder("what a CQE carries", line=True)
    # segments
    segments: Annotated[int, f"i64[{2 * MAX_SEGMENTS}]"] = requester("pairs of address and bytes", line=True)
    # of a datagram
    connection: Annotated[int, f"raw[{QP_ROW.size}]"] = requester(
        "a QP_ROW, as if the QP were connected to the destination", line=True
    )
    # the WQE
    wqe: Annotated[int, f"raw[{WQE_BYTES}]"] = requester(
        "a WQE that wraps around the end of its ring, in one piece", line=True
    )


MESSAGE = Message.entry

