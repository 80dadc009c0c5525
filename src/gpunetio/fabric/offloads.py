"""Work that the kernel leaves to hardware: finishing checksums, and cutting large frames into segments.

A large frame of TCP or UDP has the headers of its first segment. Segments of TSO are cut in the same way.
"""

from __future__ import annotations

from ..device.checksum import internet_sum, pseudo_sum, store_checksum
from ..formats.layout import I64, Record
from ..formats.packet import (
    ETHERNET, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, IPV4, IPV6, IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, TCP, TCP_CWR, TCP_FIN,
    TCP_OFFSET_SHIFT, TCP_PSH, UDP,
)
from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, copy, ld16, ld32, ld64, ld8, st16, st32
from .ethernet_records import GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP, NEEDS_CHECKSUM, VIRTIO_NET
from .ip_headers import tag_bytes


class LargeFrame(Record, size=64):
    """A frame that is cut into segments.

    Segments of the frame at `frame` are cut up to, but not including, number `next`. `l3`, `l4` and `head` are where
    its IP header, its TCP or UDP header, and its payload begin; `gso_bytes` is the payload of a segment.
    """

    frame: I64 = 0
    next: I64 = 8
    count: I64 = 16
    l3: I64 = 24
    l4: I64 = 32
    head: I64 = 40
    payload: I64 = 48
    gso_bytes: I64 = 56


LARGE_FRAME = LargeFrame.entry

# Bounds on the segments of a frame: 65,000 segments of one byte would keep all other traffic of the NIC waiting. UDP
# may have MOST_SEGMENTS (UDP_MAX_SEGMENTS of linux/udp.h). TCP may have more if each has LEAST_SEGMENT bytes, the
# smallest MSS with which Linux sends (TCP_MIN_SND_MSS). A few smaller ones may be what the kernel has merged (GRO).
MOST_SEGMENTS, LEAST_SEGMENT = 128, 48

# An offload is a VIRTIO_NET in one word: `flags`, `gso_type`, then in 16 bits each `checksum_offset`, `gso_bytes` and
# `checksum_start`.
_GSO_SHIFT, _OFFSET_SHIFT, _GSO_BYTES_SHIFT, _START_SHIFT = 8, 16, 32, 48


@device_function
def offload_of(header: int) -> int:
    """Return the offload that a VIRTIO_NET asks for."""
    word = ld64(header) & ~(0xFFFF << _OFFSET_SHIFT)
    if word & (NEEDS_CHECKSUM | 0xFF << _GSO_SHIFT) == 0:
        return 0
    return word | ld16(header + VIRTIO_NET.checksum_offset) << _OFFSET_SHIFT


@device_function
def move_start(offload: int, nbytes: int) -> int:
    """Return the offload for a frame after `nbytes` were inserted before its IP header."""
    return offload + (nbytes << _START_SHIFT) if offload != 0 else 0


@device_function
def is_large(offload: int) -> bool:
    """Return whether a frame must be cut into segments."""
    return offload >> _GSO_SHIFT & 0xFF != 0


# --- checksums -----------------------------------------------------------------------------------------------------


@engine_function
def finish_checksum(frame: int, nbytes: int, offload: int) -> int:
    """Compute a checksum whose field holds the sum over the pseudo header. Return 0 if the field is outside the frame.
    """
    start = offload >> _START_SHIFT & 0xFFFF
    offset = offload >> _OFFSET_SHIFT & 0xFFFF
    if start < ETHERNET.size or start + offset + 2 > nbytes:
        return 0
    protocol = IP_PROTOCOL_UDP if offset == UDP.checksum else 0
    store_checksum(frame + start + offset, internet_sum(frame + start, nbytes - start), protocol)
    return 1


# --- segments ------------------------------------------------------------------------------------------------------


@engine_function
def set_length(frame: int, l3: int, nbytes: int, number: int) -> None:
    """Set the length of the IP header at `l3`, and the number of an IPv4 packet, for a segment (RFC 791, RFC 8200)."""
    kind = be16(ld16(frame + l3 - 2))
    ip = frame + l3
    if kind == ETHER_TYPE_IPV4:
        st16(ip + IPV4.total_length, be16(nbytes - l3))
        st16(ip + IPV4.identification, be16(be16(ld16(ip + IPV4.identification)) + number & 0xFFFF))
    elif kind == ETHER_TYPE_IPV6:
        st16(ip + IPV6.payload_length, be16(nbytes - l3 - IPV6.size))


@engine_function
def set_tcp(tcp: int, offset: int, first: int, last: int) -> None:
    """Set the sequence number and the flags of a segment, whose payload begins at `offset` of the whole.

    FIN and PSH belong to the end of the payload (RFC 9293 3.10.4), CWR to its first segment (RFC 3168 6.1.2).
    """
    st32(tcp + TCP.sequence, be32(be32(ld32(tcp + TCP.sequence)) + offset & 0xFFFF_FFFF))
    flags = be16(ld16(tcp + TCP.offset_flags))
    if not last:
        flags &= ~(TCP_FIN | TCP_PSH)
    if not first:
        flags &= ~TCP_CWR
    st16(tcp + TCP.offset_flags, be16(flags & 0xFFFF))


@engine_function
def begin_cutting(large: LargeFrame, frame: int, nbytes: int, offload: int) -> int:
    """Prepare a frame for `cut`. Return 0 if it cannot be cut, or would become too many segments."""
    large.frame, large.next, large.count = frame, 0, 0
    large.l3 = ETHERNET.size + tag_bytes(frame, nbytes)
    large.l4, large.gso_bytes = offload >> _START_SHIFT & 0xFFFF, offload >> _GSO_BYTES_SHIFT & 0xFFFF
    kind = offload >> _GSO_SHIFT & 0xFF & ~GSO_ECN
    if large.gso_bytes == 0 or large.l4 < large.l3 + IPV4.size or large.l4 + TCP.size > nbytes:
        return 0
    version = ld8(frame + large.l3) >> 4
    if version != 4 and (version != 6 or large.l4 < large.l3 + IPV6.size):
        return 0
    if kind == GSO_TCPV4 or kind == GSO_TCPV6:
        large.head = large.l4 + (be16(ld16(frame + large.l4 + TCP.offset_flags)) >> TCP_OFFSET_SHIFT) * 4
        if large.head < large.l4 + TCP.size:
            return 0
    elif kind == GSO_UDP:
        large.head = large.l4 + UDP.size
    else:
        return 0
    large.payload = nbytes - large.head
    count = (large.payload + large.gso_bytes - 1) // large.gso_bytes
    if large.payload <= 0 or (count > MOST_SEGMENTS and (kind == GSO_UDP or large.gso_bytes < LEAST_SEGMENT)):
        return 0
    large.count = count
    return 1


@engine_function
def cut(large: LargeFrame, to: int) -> int:
    """Write the next segment of a frame, with all its checksums, to an address. Return its length."""
    offset = large.next * large.gso_bytes
    part = min(large.payload - offset, large.gso_bytes)
    nbytes = large.head + part
    copy(to, large.frame, large.head)
    copy(to + large.head, large.frame + large.head + offset, part)
    set_length(to, large.l3, nbytes, large.next)
    ip, l4 = to + large.l3, to + large.l4
    if ld8(ip) >> 4 == 4:
        st16(ip + IPV4.checksum, 0)
        st16(ip + IPV4.checksum, be16(internet_sum(ip, (ld8(ip) & 0xF) * 4) ^ 0xFFFF))
    if large.head == large.l4 + UDP.size:
        protocol, checksum = IP_PROTOCOL_UDP, l4 + UDP.checksum
        st16(l4 + UDP.length, be16(nbytes - large.l4))
    else:
        protocol, checksum = IP_PROTOCOL_TCP, l4 + TCP.checksum
        set_tcp(l4, offset, large.next == 0, large.next == large.count - 1)
    st16(checksum, 0)
    total = pseudo_sum(ip, protocol, nbytes - large.l4) + internet_sum(l4, nbytes - large.l4)
    store_checksum(checksum, total, protocol)
    large.next += 1
    return nbytes
