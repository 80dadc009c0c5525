"""Copies of the packets that cross a port, in a pipe to the writer of a file (pcap.py). A full pipe loses packets."""

from __future__ import annotations


from ..jit.compile import engine_function
from ..jit.ops import copy
from ..jit.struct_view import View, struct_view
from ..formats.layout import Entry
from .frames import PACKET, commit, publish, reserve

# Filled by the engine: a PIPE_END, followed by the count of packets that found no room.
CAPTURE = Entry("capture", 128, """
    end            0  raw[64]
    lost          64  i64
""")

# Starts as a FRAME does, as pipes require. `time_ns` is the engine's clock. `source` is the index of this end's GID,
# with the packet's traffic class, hop limit and flow label (`frames.with_traffic`); or WHOLE_FRAME for an Ethernet
# frame, which has its headers and its ICRC. `damaged`: the ICRC was wrong.
CAPTURED = Entry("captured", 64, """
    stride         0  i64
    nbytes         8  i64
    peer_high     16  i64
    peer_low      24  i64
    source        32  i64
    damaged       40  i64
    time_ns       48  i64
    outgoing      56  i64
""")

WHOLE_FRAME = -1  # source

capture_at: View = struct_view(CAPTURE)
captured_at: View = struct_view(CAPTURED)


@engine_function
def capture(
    to: int, packet: int, nbytes: int, peer_high: int, peer_low: int, source: int, damaged: int, time_ns: int,
    outgoing: int,
) -> None:
    """Copy a packet, without its ICRC, into the pipe of the CAPTURE at `to`."""
    slot = reserve(to + CAPTURE.end, nbytes)
    if slot == 0:
        capture_at(to).lost += 1
        return
    c = captured_at(slot)
    c.nbytes, c.peer_high, c.peer_low, c.source = nbytes, peer_high, peer_low, source
    c.damaged, c.time_ns, c.outgoing = damaged, time_ns, outgoing
    copy(slot + PACKET, packet, nbytes)
    commit(to + CAPTURE.end)
    publish(to + CAPTURE.end)


@engine_function
def capture_frame(to: int, head: int, head_bytes: int, body: int, body_bytes: int, time_ns: int, outgoing: int) -> None:
    """Copy an Ethernet frame, which is in two pieces, into the pipe of the CAPTURE at `to`."""
    nbytes = head_bytes + body_bytes
    slot = reserve(to + CAPTURE.end, nbytes)
    if slot == 0:
        capture_at(to).lost += 1
        return
    c = captured_at(slot)
    c.nbytes, c.peer_high, c.peer_low, c.source = nbytes, 0, 0, WHOLE_FRAME
    c.damaged, c.time_ns, c.outgoing = 0, time_ns, outgoing
    copy(slot + PACKET, head, head_bytes)
    copy(slot + PACKET + head_bytes, body, body_bytes)
    commit(to + CAPTURE.end)
    publish(to + CAPTURE.end)
