"""TSO: one WQE, whose payload the NIC cuts into TCP segments of `mss` bytes behind the same headers."""

from __future__ import annotations

from ...formats.packet import (
    ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHERNET, IP_PROTOCOL_TCP, IPV4, IPV6, TCP, TCP_CWR, TCP_FIN, TCP_OFFSET_SHIFT,
    TCP_PSH,
)  # fmt: skip
from ...formats.wqe import EthChecksum
from ...jit.compile import engine_function
from ...jit.ops import be16, be32, ld8, ld16, ld32, st16, st32
from ..observe import refuse
from ..state.ethernet import sq_row_at
from ..state.flow import packet_at
from ..state.message import MESSAGE, message_at
from ..state.worker import worker_at
from ..steering.parse import PROTOCOL, parse
from .eth_frame import SENT, build_frame, leave, tag_bytes, write_checksums

LOG_MAX_TSO = 18  # of the bytes of a TSO's payload


@engine_function
def _set_length(frame, nbytes, number):
    """Set the length of the IP header, and the number of an IPv4 packet, for a segment (RFC 791, RFC 8200)."""
    l3 = ETHERNET.size + tag_bytes(frame, nbytes)
    kind = be16(ld16(frame + l3 - 2))
    ip = frame + l3
    if kind == ETHER_TYPE_IPV4:
        st16(ip + IPV4.total_length, be16(nbytes - l3))
        st16(ip + IPV4.identification, be16(be16(ld16(ip + IPV4.identification)) + number & 0xFFFF))
    elif kind == ETHER_TYPE_IPV6:
        st16(ip + IPV6.payload_length, be16(nbytes - l3 - IPV6.size))


@engine_function
def _set_tcp(tcp, offset, first, last):
    """Set the sequence number and the flags of a segment, whose payload begins at `offset` of the whole.

    FIN and PSH are for the end of the payload (RFC 9293 3.10.4), CWR for its first segment (RFC 3168 6.1.2).
    """
    st32(tcp + TCP.sequence, be32(be32(ld32(tcp + TCP.sequence)) + offset & 0xFFFF_FFFF))
    flags = be16(ld16(tcp + TCP.offset_flags))
    if not last:
        flags &= ~(TCP_FIN | TCP_PSH)
    if not first:
        flags &= ~TCP_CWR
    st16(tcp + TCP.offset_flags, be16(flags & 0xFFFF))


@engine_function
def send_segments(nic, row, head, head_bytes, mss):
    """Send the segments that were not sent yet, of what the message lists. Return SENT, NO_ROOM, or minus a reason."""
    n = worker_at(nic)
    s = sq_row_at(row)
    payload = message_at(n.message).nbytes
    if payload > 1 << LOG_MAX_TSO:
        return -refuse.too_long_to_send(nic, payload, 1 << LOG_MAX_TSO)
    if mss == 0 or head_bytes < ETHERNET.size + IPV4.size + TCP.size:
        return -refuse.segmentation_headers(nic, mss, head_bytes)
    count = max((payload + mss - 1) // mss, 1)
    while s.packets < count:
        offset = s.packets * mss
        nbytes = min(payload - offset, mss)
        total = head_bytes + nbytes
        frame = build_frame(nic, row, head, head_bytes, n.message + MESSAGE.segments, offset, nbytes, 0)
        if frame <= 0:
            return frame
        _set_length(frame, total, s.packets)
        parse(n.packet, frame, total)
        l4 = packet_at(n.packet).l4
        tcp = frame + l4
        whole = l4 != 0 and ld8(n.packet + PROTOCOL) == IP_PROTOCOL_TCP
        if not whole or l4 + (be16(ld16(tcp + TCP.offset_flags)) >> TCP_OFFSET_SHIFT) * 4 != head_bytes:
            return -refuse.segmentation_headers(nic, mss, head_bytes)
        _set_tcp(tcp, offset, s.packets == 0, s.packets == count - 1)
        write_checksums(nic, frame, total, EthChecksum.L3 | EthChecksum.L4)
        leave(nic, row, frame, total)
        s.packets += 1
    s.packets = 0
    return SENT
