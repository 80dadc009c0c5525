"""The in-process wire: two NICs of one process hand each other whole messages, and bytes move without packets.

Each end has a ring for its requests and one for its replies. A request names the requester's memory segments, which
the responder's engine reads or writes itself; so every request gets exactly one reply, and the requester keeps the
memory until then.
"""

from __future__ import annotations

from ..device.views import struct_view
from ..formats.layout import Entry
from ..memory import HostMemory, round_up
from .ring import RING

MAX_SEGMENTS = 64

WQE_BYTES = 1024  # the largest WQE: 16 basic blocks

# A request, or inside one NIC the hand-over from requester to responder. `segments` are (address, bytes) pairs;
# `wqe` is room for a WQE that wraps around its ring, so that inline data stays put until the reply.
MESSAGE = Entry("message", 128 + 16 * MAX_SEGMENTS + WQE_BYTES, """
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
    psn           96  i64
    segments     128  i64
    wqe         1152  i64
""")

# `reason` is 0 or why the responder refused (nic/reasons.py), with the details for the requester's log.
REPLY = Entry("reply", 128, """
    src_qpn        0  i64
    index          8  i64
    reason        16  i64
    psn           24  i64
    rnr_timer     32  i64
    key           40  i64
    addr          48  i64
    nbytes        56  i64
    extra0        64  i64
    extra1        72  i64
""")

WIRE_END = Entry("wire_end", 64, """
    requests_out   0  i64
    requests_in    8  i64
    replies_out   16  i64
    replies_in    24  i64
    peer_closed   32  i64
""")

message_at = struct_view(MESSAGE)
reply_at = struct_view(REPLY)
wire_end_at = struct_view(WIRE_END)

CAPACITY = 128  # messages in flight per direction


class InProcessWire:
    """A wire with two ends; `ends` are the addresses of their WIRE_END records."""

    def __init__(self):
        self._memory = HostMemory(2 * (WIRE_END.size + self._ring_size(MESSAGE) + self._ring_size(REPLY)))
        self._used = 0
        self.ends = (self._take(WIRE_END.size), self._take(WIRE_END.size))
        rings = [(self._ring(MESSAGE), self._ring(REPLY)) for _ in self.ends]
        self._records = []
        for side, address in enumerate(self.ends):
            record = self._memory.view(WIRE_END.dtype, address - self._memory.address)[0]
            record["requests_out"], record["replies_out"] = rings[side]
            record["requests_in"], record["replies_in"] = rings[1 - side]
            self._records.append(record)

    def close_end(self, end: int) -> None:
        """Tell the other end that nobody will answer any more."""
        self._records[1 - self.ends.index(end)]["peer_closed"] = 1

    def close(self) -> None:
        """Release the wire's memory; both NICs have forgotten it."""
        self._memory.close()

    @staticmethod
    def _ring_size(entry: Entry) -> int:
        return round_up(RING.size + CAPACITY * entry.size, 64)

    def _take(self, nbytes: int) -> int:
        address = self._memory.address + self._used
        self._used += nbytes
        return address

    def _ring(self, entry: Entry) -> int:
        address = self._take(self._ring_size(entry))
        ring = self._memory.view(RING.dtype, address - self._memory.address)[0]
        ring["slots"], ring["slot_size"], ring["capacity"] = address + RING.size, entry.size, CAPACITY
        return address
