"""A request as the requester hands it to the responder inside one NIC, where no packets are needed."""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .qp import QP_ROW
from .record import record

MAX_SEGMENTS = 64

WQE_BYTES = 1024  # the largest WQE: 16 basic blocks

MESSAGE = record("message", f"""
    opcode         i64      requester  formats.wqe.WqeOpcode
    src_qpn        i64      requester  number of the QP that sends
    dst_qpn        i64      requester  number of its peer
    index          i64      requester  index of the WQE
    raddr          i64      requester  remote virtual address
    rkey           i64      requester  its key
    nbytes         i64      requester  bytes of payload
    imm            i64      requester  immediate data
    # atomics, and how the payload lies
    compare        i64      requester  operand: what is compared
    swap_add       i64      requester  operand: what is swapped or added
    compare_mask   i64      requester  of a masked atomic: the bits that are compared
    swap_mask      i64      requester  of a masked atomic: the bits that are swapped; of an add: where its fields end
    solicited      i64      requester  not 0: the completion is solicited
    nsegments      i64      requester  entries of `segments`
    device         i64      requester  not 0: some segments are in device memory (memory/streams.py)
    # room
    payload        i64[8]   responder  what a CQE carries
    # segments
    segments       i64[{2 * MAX_SEGMENTS}] requester  pairs of address and bytes
    # of a datagram
    connection     raw[{QP_ROW.size}] requester  a QP_ROW, as if the QP were connected to the destination
    # the WQE
    wqe            raw[{WQE_BYTES}] requester  a WQE that wraps around the end of its ring, in one piece
""")

message_at: View = struct_view(MESSAGE)
