"""A request as the requester hands it to the responder inside one NIC, where no packets are needed."""

from __future__ import annotations

from typing import Any

from ...jit.struct_view import struct_view
from ...formats.layout import Entry

MAX_SEGMENTS = 64

WQE_BYTES = 1024  # the largest WQE: 16 basic blocks

# `swap_add` and `compare` are an atomic's operands and, of a masked one, `swap_mask` and `compare_mask`; the field
# boundaries of a fetch and add are in `swap_mask`. `segments` are (address, bytes) pairs; `wqe` is room for a WQE that
# wraps around its ring, `payload` for what a CQE carries. `far` is 0 when all segments lie in host memory (movers.py).
MESSAGE = Entry("message", 192 + 16 * MAX_SEGMENTS + WQE_BYTES, """
    opcode         0  i64
    src_qpn        8  i64
    dst_qpn       16  i64
    index         24  i64
    raddr         32  i64
    rkey          40  i64
    nbytes        48  i64
    imm           56  i64
    compare       64  i64
    swap_add      72  i64
    solicited     80  i64
    nsegments     88  i64
    swap_mask     96  i64
    compare_mask 104  i64
    far          112  i64
    payload      128  i64[4]
    segments     192  i64
    wqe         1216  i64
""")

message_at: Any = struct_view(MESSAGE)
