"""Hand segments of known connections to the HTTP server."""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function
from ..eth import headers
from ..formats.cqe import RxChecksum
from ..formats.packet import TCP_FLAGS_MASK
from ..jit.ops import ld_fixed32, ld_fixed64
from .connection import HTTP, LANE, MOST_PAYLOAD, SEGMENT, SLOTS, Http, Segment

_RIGHT = int(RxChecksum.L3_OK | RxChecksum.L4_OK)


@device_function
def _fill(segment: Segment, tag: int, tcp: int, payload: int, nbytes: int) -> None:
    t = headers.tcp_at(tcp)
    segment.tag, segment.nbytes = tag, nbytes
    segment.sequence, segment.acknowledgement = t.sequence, t.acknowledgement
    segment.window, segment.flags = t.window, t.offset_flags & TCP_FLAGS_MASK
    dev.copy(segment + SEGMENT.payload, payload, nbytes)


@device_function
def put_segment(ring: dev.DevSemaphore, lane: int, tag: int, tcp: int, payload: int, nbytes: int) -> bool:
    """Hand a segment with up to MOST_PAYLOAD bytes to a lane of the server. Return whether there was room."""
    item = dev.sem_take(ring, lane)
    if item < 0:
        return False
    _fill(Segment(dev.sem_info(ring, item)), tag, tcp, payload, nbytes)
    dev.sem_set_status(ring, item, dev.SEM_READY)
    return True


@device_function
def _hand_over(http: Http, lane: int, tag: int, frame: int, nbytes: int) -> bool:
    """Hand a frame to a lane of the server. Return whether there was room, or nothing to hand over."""
    protocol, _, tcp, length = headers.l4_of(frame, nbytes)
    if protocol != headers.IP_PROTOCOL_TCP:
        return True
    payload, left = headers.tcp_payload(tcp, length)
    if left < 0 or left > MOST_PAYLOAD:
        return True
    return put_segment(ld_fixed64(http + HTTP.from_kernels), lane, tag, tcp, payload, left)


@device_function
def hand_over(
    http: Http, queue: int, rxq: dev.EthRxq, first: int, received: int, attrs: int, thread: int, threads: int
) -> None:
    """Hand those packets of a burst to the server that belong to known connections and have correct checksums.

    Thread i of the block does this for lanes i, i + threads, …, so packets of a connection keep their order. The
    packets are copied, so their places may be given back afterwards. A segment for which a ring has no room is dropped,
    as a router would do, and counted.
    """
    lanes, queues = ld_fixed32(http + HTTP.lanes_num), ld_fixed32(http + HTTP.queues_num)
    for lane in range(queue + queues * thread, lanes, queues * threads):
        row = ld_fixed64(http + HTTP.lanes) + lane * LANE.size
        handed = 0
        for i in range(received):
            attr = dev.attr_at(attrs + i * dev.ATTR_BYTES)
            tag = attr.flow_tag
            if tag == 0 or (tag & SLOTS - 1) % lanes != lane or attr.checks & _RIGHT != _RIGHT:
                continue
            if _hand_over(http, lane, tag, dev.rxq_packet(rxq, first + i), attr.bytes):
                handed = 1
            else:
                dev.st64(row + LANE.dropped, dev.ld64(row + LANE.dropped) + 1)
        if handed != 0:
            dev.wake(row + LANE.nap)
