"""A pipe of frames with one producer and one consumer, possibly in two processes, in memory that both can access.

A frame is a FRAME record followed by the packet, from its BTH to the end of its padding. Frames vary in length and
follow one another. The two ends share positions and frames, but no pointers: each end keeps its own
PIPE_END, and the consumer trusts nothing that would lead it out of the pipe.

This code uses no CPU-only features, so either end may be a GPU.
"""

from __future__ import annotations

import numpy as np

from ..formats.layout import I32, I64, Entry, Record
from ..formats.packet import BTH, FLOW_LABEL_MASK, ICRC_SIZE, QPN_MASK
from ..jit.compile import device_function, engine_function
from ..jit.ops import be32, ld32, ld_acquire64, ld_relaxed64, prefetch, st_release64

# Positions count bytes and never wrap. `asleep` is set by a consumer that waits in the kernel and wants to be woken,
# `takes_frames` by one that also accepts Ethernet frames.
#
# Where the consumer accesses memory of the producer's NIC without frames (nic/control/regions/reach.py), `withdrawn`
# counts how often the producer withdrew a right, and `failed` how many of its queue pairs have failed. `answered` is
# the value of `withdrawn` that the consumer has acted on.
PIPE = Entry("pipe", 192, """
    head           0  i64
    tail          64  i64
    asleep       128  i64
    takes_frames 136  i64
    withdrawn    144  i64
    failed       152  i64
    answered     160  i64
""")


class PipeEnd(Record, size=64):
    """An end of a pipe.

    `position` is this end's own; `seen` is the other end's, as last seen; `reserved` bytes are the producer's open
    frame. `nbytes` is the packet's length as the consumer checked it: the length in the frame may change afterwards.
    """

    pipe: I64 = 0
    data: I64 = 8
    capacity: I64 = 16
    position: I64 = 24
    seen: I64 = 32
    reserved: I64 = 40
    nbytes: I64 = 48


PIPE_END = PipeEnd.entry


class Frame(Record, size=64):
    """A frame in a pipe: what stands before its packet.

    `peer` is the GID of the other end: the destination of an outgoing frame, the source of one that arrived. `source`
    has the egress, which mostly is this end's index in the GID table (fabric/udp.py), and the fields that routers
    read: traffic class, hop limit and flow label (`with_traffic`). `icrc` says that four bytes of ICRC follow the
    packet. `corrupt`, set by the fault injector, is 1 + the bit to flip after the ICRC has been computed.

    `life` distinguishes a queue pair's packets from those that it sent before its last reset. Requests and their
    responses carry the requester's. Packets on a network have no field for it, so it is lost where the pipe ends. 0
    means unknown.

    `reference` is 0 when the payload is in the frame. Otherwise the payload is in memory that the producer has
    granted: `reference` holds the number of the grant, bytes, and offset. With ETHERNET_FRAME, the frame does not hold
    a packet of a queue pair, but an Ethernet frame, from its MACs on and without a check sequence, and has no peer.
    The bytes before the Ethernet frame, which include the end of `life`, are then a VIRTIO_NET (ethernet_records.py),
    which wires to the kernel pass on with the frame. Its `flags` and `gso_type` are 0 once the frame is reserved;
    while they are, the rest is ignored.

    The packet starts 4 bytes after a multiple of 16, so that what follows its 12-byte BTH is aligned.
    """

    stride: I64 = 0
    nbytes: I64 = 8
    peer_high: I64 = 16
    peer_low: I64 = 24
    source: I64 = 32
    icrc: I32 = 40
    corrupt: I32 = 44
    reference: I64 = 48
    life: I64 = 56


FRAME = Frame.entry

PACKET = 68  # where the packet begins
LINE = 64
LEAST_GRANTED = 512  # bytes of payload; copying fewer is cheaper than a reference
GRANTED_SHIFT, GRANT_SHIFT = 34, 47  # bit positions in a reference: bytes, number of the grant
MAX_GRANTED, MAX_GRANT = 1 << GRANTED_SHIFT, (1 << 16) - 1
SKIP = -1  # in nbytes: nothing more before the end of the pipe
RECALLED = 0  # in nbytes: do not send this frame
ETHERNET_FRAME = -1  # in reference

_EGRESS_MASK, _CLASS_SHIFT, _HOP_SHIFT, _LABEL_SHIFT = 0xFFFF, 16, 24, 32
HOP_LIMIT = 64  # for paths that have none


@device_function
def with_traffic(egress: int, traffic_class: int, hop_limit: int, flow_label: int) -> int:
    """Return the `source` of frames with this `egress`."""
    return egress | traffic_class << _CLASS_SHIFT | hop_limit << _HOP_SHIFT | flow_label << _LABEL_SHIFT


@device_function
def egress_of(source: int) -> int:
    """Return the egress of a frame."""
    return source & _EGRESS_MASK


@device_function
def traffic_of(source: int) -> int:
    """Return a `source` without its egress."""
    return source & ~_EGRESS_MASK


@device_function
def class_of(source: int) -> int:
    """Return the traffic class of a frame (RFC 2474)."""
    return source >> _CLASS_SHIFT & 0xFF


@device_function
def hop_limit_of(source: int) -> int:
    """Return the hop limit of a frame."""
    hops = source >> _HOP_SHIFT & 0xFF
    return hops if hops != 0 else HOP_LIMIT


@device_function
def label_of(source: int) -> int:
    """Return the flow label of a frame (RFC 6437)."""
    return source >> _LABEL_SHIFT & FLOW_LABEL_MASK


def pipe_size(capacity: int) -> int:
    """Return the bytes of memory for a pipe with room for `capacity` bytes of frames, a power of two."""
    return PIPE.size + capacity


def pipe_end(pipe: int, capacity: int) -> np.ndarray:
    """Return a PIPE_END record at the beginning of the pipe at address `pipe`."""
    end = np.zeros((), PIPE_END.dtype)
    end["pipe"], end["data"], end["capacity"] = pipe, pipe + PIPE.size, capacity
    return end


@device_function
def reserve(end: PipeEnd, nbytes: int) -> int:
    """Reserve room for a frame whose packet has up to `nbytes` (and an ICRC).

    Return the frame's address, or 0 when the pipe is full. Reserving again before `commit` gives the same room.
    """
    stride = (PACKET + nbytes + ICRC_SIZE + LINE - 1) & -LINE
    offset = end.position & (end.capacity - 1)
    rest = end.capacity - offset
    needed = stride if stride <= rest else rest + stride
    if end.position + needed - end.seen > end.capacity:
        end.seen = ld_acquire64(end.pipe + PIPE.tail)
        if end.position + needed - end.seen > end.capacity:
            return 0
    if stride > rest:
        Frame(end.data + offset).stride = rest
        Frame(end.data + offset).nbytes = SKIP
        end.position += rest
        offset = 0
    end.reserved = stride
    frame = Frame(end.data + offset)
    frame.stride = stride
    frame.icrc = 0
    frame.corrupt = 0
    frame.reference = 0
    frame.life = 0
    return frame


@device_function
def reserve_frame(end: PipeEnd, nbytes: int) -> int:
    """Reserve room for an Ethernet frame of `nbytes`, and fill in everything but its bytes.

    Return the FRAME's address, or 0 when there is no room. Ethernet frames get half of the pipe, so that packets of
    queue pairs find room however many frames wait.
    """
    stride = (PACKET + nbytes + ICRC_SIZE + LINE - 1) & -LINE
    most = (end.capacity >> 1) - 2 * stride  # `reserve` may have to skip the end of the pipe
    if end.position - end.seen > most:
        end.seen = ld_acquire64(end.pipe + PIPE.tail)
        if end.position - end.seen > most:
            return 0
    frame = Frame(reserve(end, nbytes))
    frame.nbytes, frame.reference = nbytes, ETHERNET_FRAME
    frame.peer_high, frame.peer_low, frame.source = 0, 0, 0
    return frame


@device_function
def refer(end: PipeEnd, reference: int) -> None:
    """Store a reference in the reserved frame, whose payload is elsewhere."""
    Frame(end.data + (end.position & (end.capacity - 1))).reference = reference


@device_function
def commit(end: PipeEnd) -> None:
    """Commit the reserved and filled frame. The consumer sees it after `publish`."""
    end.position += end.reserved
    end.reserved = 0


@device_function
def publish(end: PipeEnd) -> None:
    """Let the consumer see all committed frames."""
    st_release64(end.pipe + PIPE.head, end.position)


@device_function
def next_frame(end: PipeEnd) -> int:
    """Return the oldest frame, 0 when there is none, or -1 if the producer has written invalid data.

    The end's `nbytes` becomes the length of its packet.
    """
    while True:
        if end.position == end.seen:
            end.seen = ld_acquire64(end.pipe + PIPE.head)
            if end.position == end.seen:
                return 0
            if end.seen < end.position or end.seen - end.position > end.capacity:
                return -1
        offset = end.position & (end.capacity - 1)
        frame = end.data + offset
        stride = ld_relaxed64(frame + FRAME.stride)
        nbytes = ld_relaxed64(frame + FRAME.nbytes)
        room = min(end.capacity - offset, end.seen - end.position)
        if stride <= 0 or stride > room or stride & (LINE - 1) != 0:
            return -1
        if nbytes != SKIP:
            if nbytes < 0 or nbytes > stride - PACKET - ICRC_SIZE:
                return -1
            end.reserved, end.nbytes = stride, nbytes
            ahead = end.position + 2 * stride
            # most likely the frame after the next one, which is still in the cache of the producer's core
            if ahead < end.seen:
                ahead = end.data + (ahead & (end.capacity - 1))
                prefetch(ahead)
                prefetch(ahead + LINE)
            return frame
        end.position += stride


@device_function
def consume(end: PipeEnd) -> None:
    """Consume the frame that `next_frame` returned. The producer gets the room back after `release`."""
    end.position += end.reserved
    end.reserved = 0


@device_function
def release(end: PipeEnd) -> None:
    """Give the room of all consumed frames back to the producer."""
    st_release64(end.pipe + PIPE.tail, end.position)


@device_function
def leads_to(frame: Frame, headers: int, qpn: int, peer_high: int, peer_low: int) -> bool:
    """Return whether a frame goes to this QP of this peer. `headers` bytes of link headers precede its BTH."""
    return (
        frame.peer_high == peer_high
        and frame.peer_low == peer_low
        and frame.nbytes >= headers + BTH.size
        and be32(ld32(frame + PACKET + headers + BTH.resv_dest_qp)) & QPN_MASK == qpn
    )


@engine_function
def recall(end: PipeEnd, headers: int, qpn: int, peer_high: int, peer_low: int) -> None:
    """Recall the frames to a QP that the consumer's `end` has not consumed. The caller must own both ends."""
    at, head = end.position, ld_acquire64(end.pipe + PIPE.head)
    while at < head:
        frame = Frame(end.data + (at & (end.capacity - 1)))
        if leads_to(frame, headers, qpn, peer_high, peer_low):
            frame.nbytes = RECALLED
        at += frame.stride
