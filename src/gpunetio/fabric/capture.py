"""Copies of the packets that cross a port, in a pipe to the writer of a file (pcap.py). A full pipe loses packets."""

from __future__ import annotations

from typing import Annotated

from ..formats.layout import I64, Record
from ..jit.compile import engine_function
from ..jit.ops import copy
from .frames import PACKET, PipeEnd, commit, publish, reserve


class CaptureRing(Record, size=128):
    """Where packets are captured.

    Filled by the engine: a PIPE_END, followed by the count of packets that found no room.
    """

    end: Annotated[int, "raw[64]"] = 0
    lost: I64 = 64


CAPTURE = CaptureRing.entry


class Captured(Record, size=64):
    """A captured packet.

    Starts as a FRAME does, as pipes require. `time_ns` is the engine's clock. `source` is the index of this end's GID,
    with the packet's traffic class, hop limit and flow label (`frames.with_traffic`); or WHOLE_FRAME for an Ethernet
    frame, which has its headers and its ICRC. `damaged`: the ICRC was wrong.
    """

    stride: I64 = 0
    nbytes: I64 = 8
    peer_high: I64 = 16
    peer_low: I64 = 24
    source: I64 = 32
    damaged: I64 = 40
    time_ns: I64 = 48
    outgoing: I64 = 56


CAPTURED = Captured.entry

WHOLE_FRAME = -1  # source


@engine_function
def capture(
    to: CaptureRing, packet: int, nbytes: int, peer_high: int, peer_low: int, source: int, damaged: int, time_ns: int,
    outgoing: int,
) -> None:
    """Copy a packet, without its ICRC, into the pipe of the CAPTURE at `to`."""
    slot = Captured(reserve(PipeEnd(to + CAPTURE.end), nbytes))
    if slot == 0:
        to.lost += 1
        return
    slot.nbytes, slot.peer_high, slot.peer_low, slot.source = nbytes, peer_high, peer_low, source
    slot.damaged, slot.time_ns, slot.outgoing = damaged, time_ns, outgoing
    copy(slot + PACKET, packet, nbytes)
    commit(PipeEnd(to + CAPTURE.end))
    publish(PipeEnd(to + CAPTURE.end))


@engine_function
def capture_frame(
    to: CaptureRing, head: int, head_bytes: int, body: int, body_bytes: int, time_ns: int, outgoing: int
) -> None:
    """Copy an Ethernet frame, which is in two pieces, into the pipe of the CAPTURE at `to`."""
    nbytes = head_bytes + body_bytes
    slot = Captured(reserve(PipeEnd(to + CAPTURE.end), nbytes))
    if slot == 0:
        to.lost += 1
        return
    slot.nbytes, slot.peer_high, slot.peer_low, slot.source = nbytes, 0, 0, WHOLE_FRAME
    slot.damaged, slot.time_ns, slot.outgoing = 0, time_ns, outgoing
    copy(slot + PACKET, head, head_bytes)
    copy(slot + PACKET + head_bytes, body, body_bytes)
    commit(PipeEnd(to + CAPTURE.end))
    publish(PipeEnd(to + CAPTURE.end))
