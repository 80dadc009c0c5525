"""Read and write frames of TCP over IPv4, for the CPU's side of the HTTP server."""

from __future__ import annotations

from .. import device as dev
from ..eth import headers
from ..fabric.ip_headers import tag_bytes
from ..formats.packet import (
    ETHER_TYPE_IPV4, ETHERNET, IP_PROTOCOL_TCP, IPV4, IPV4_DONT_FRAGMENT, TCP, TCP_ACK, TCP_FIN, TCP_FLAGS_MASK,
    TCP_OFFSET_SHIFT, TCP_RST, TCP_SYN,
)
from ..jit.compile import device_function
from .connection import TAG_ROOM
from .station import is_station
from .tcp import SEQUENCE_MASK

DEFAULT_MSS, LEAST_MSS = 536, 64  # RFC 9293 3.7.1; a smaller one would make a packet of each byte
LARGEST_SHIFT = 14  # RFC 7323 2.3
NO_SHIFT = -1
HEADERS = ETHERNET.size + IPV4.size + TCP.size  # bytes without options
MOST_ANSWER = TAG_ROOM + HEADERS + 8
_VERSION_IHL, _TTL = 0x45, 64
_END, _NOTHING, _MSS, _WINDOW_SCALE = 0, 1, 2, 3  # kinds of options


@device_function
def find_segment(frame: int, nbytes: int, mac: int, address: int) -> tuple[int, int, int, int]:
    """Return the addresses of the IP header, the TCP header and the payload of a frame, and the payload's length.

    All are 0 if the frame has no whole, unfragmented segment for the station with this MAC and address.
    """
    protocol, ip, tcp, length = headers.l4_of(frame, nbytes)
    if protocol != IP_PROTOCOL_TCP or dev.ld16(ip - 2) != dev.be16(ETHER_TYPE_IPV4):
        return 0, 0, 0, 0
    eth, v4 = headers.ethernet_at(frame), headers.ipv4_at(ip)
    if eth.destination != mac or v4.destination != address:
        return 0, 0, 0, 0
    payload, left = headers.tcp_payload(tcp, length)
    if left < 0 or v4.source == address or not is_station(eth.source, v4.source):
        return 0, 0, 0, 0
    return ip, tcp, payload, left


@device_function
def tags_of(frame: int) -> int:
    """Return the bytes of the VLAN tags of a frame that `find_segment` has accepted."""
    return tag_bytes(frame, HEADERS + TAG_ROOM)


@device_function
def read_options(options: int, nbytes: int) -> tuple[int, int]:
    """Return the MSS of a SYN, and its window scale, or NO_SHIFT if it has none (RFC 9293 3.1, RFC 7323 2.2)."""
    mss, shift, at = DEFAULT_MSS, NO_SHIFT, 0
    while at < nbytes and dev.ld8(options + at) != _END:
        kind = dev.ld8(options + at)
        if kind == _NOTHING:
            at += 1
            continue
        length = dev.ld8(options + at + 1) if at + 1 < nbytes else 0
        if length < 2 or at + length > nbytes:
            break  # the rest is malformed
        if kind == _MSS and length == 4:
            mss = max(dev.ld8(options + at + 2) << 8 | dev.ld8(options + at + 3), LEAST_MSS)
        elif kind == _WINDOW_SCALE and length == 3:
            shift = min(dev.ld8(options + at + 2), LARGEST_SHIFT)
        at += length
    return mss, shift


@device_function
def write_headers(
    at: int, frame: int, tcp: int, sequence: int, acknowledgement: int, flags: int, window: int, option_bytes: int
) -> int:
    """Write the headers of an answer to a frame, without checksums, which the device computes. Return their length.

    The answer has the VLAN tags of the frame. The headers begin at an even address. The caller writes `option_bytes` of
    options after them.
    """
    tags = tags_of(frame)
    eth, v4 = headers.ethernet_at(at), headers.ipv4_at(at + ETHERNET.size + tags)
    segment = headers.tcp_at(at + HEADERS + tags - TCP.size)
    asked, asked_ip = headers.ethernet_at(frame), headers.ipv4_at(frame + ETHERNET.size + tags)
    asked_tcp = headers.tcp_at(tcp)
    eth.destination, eth.source = asked.source, asked.destination
    dev.copy(at + ETHERNET.ether_type, frame + ETHERNET.ether_type, tags)
    dev.st16(at + ETHERNET.ether_type + tags, dev.be16(ETHER_TYPE_IPV4))
    v4.version_ihl, v4.tos, v4.total_length = _VERSION_IHL, 0, IPV4.size + TCP.size + option_bytes
    v4.identification, v4.flags_fragment = 0, IPV4_DONT_FRAGMENT
    v4.ttl, v4.protocol, v4.checksum = _TTL, IP_PROTOCOL_TCP, 0
    v4.source, v4.destination = asked_ip.destination, asked_ip.source
    segment.source_port, segment.destination_port = asked_tcp.destination_port, asked_tcp.source_port
    segment.sequence, segment.acknowledgement = sequence & SEQUENCE_MASK, acknowledgement & SEQUENCE_MASK
    segment.offset_flags = (TCP.size + option_bytes) // 4 << TCP_OFFSET_SHIFT | flags
    segment.window, segment.checksum, segment.urgent = window, 0, 0
    return HEADERS + tags + option_bytes


@device_function
def write_syn_ack(at: int, frame: int, tcp: int, first: int, window: int, mss: int, scales: int) -> int:
    """Write the SYN-ACK with the sequence number `first`: with our MSS and, if `scales`, a window scale of 0.

    There are no other options: segments with data have no timestamps, and losses are not reported by SACK.
    """
    option_bytes = 8 if scales else 4
    following = headers.tcp_at(tcp).sequence + 1
    nbytes = write_headers(at, frame, tcp, first, following, TCP_SYN | TCP_ACK, window, option_bytes)
    options = at + nbytes - option_bytes
    dev.st16(options, dev.be16(_MSS << 8 | 4))
    dev.st16(options + 2, dev.be16(mss))
    if scales:
        dev.st16(options + 4, dev.be16(_NOTHING << 8 | _WINDOW_SCALE))
        dev.st16(options + 6, dev.be16(3 << 8))
    return nbytes


@device_function
def write_reset(at: int, frame: int, tcp: int, payload_bytes: int) -> int:
    """Write the RST for a segment that belongs to no connection (RFC 9293 3.10.7.1)."""
    asked = headers.tcp_at(tcp)
    flags = asked.offset_flags & TCP_FLAGS_MASK
    if flags & TCP_ACK:
        return write_headers(at, frame, tcp, asked.acknowledgement, 0, TCP_RST, 0, 0)
    following = asked.sequence + payload_bytes + (flags & TCP_SYN != 0) + (flags & TCP_FIN != 0)
    return write_headers(at, frame, tcp, 0, following, TCP_RST | TCP_ACK, 0, 0)
