"""IP headers of packets that the NIC makes itself, and the Internet checksum."""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be64, ld8, ld16, ld32, ld64, st8, st16, st32, st64
from ..formats.packet import IP_PROTOCOL_UDP, IPV4, IPV4_DONT_FRAGMENT, IPV6

HOP_LIMIT = 64


def internet_checksum(data: bytes) -> int:
    """Return the Internet checksum of data of even length (RFC 1071): 2^16 is 1 modulo 2^16 - 1."""
    return 0xFFFF - int.from_bytes(data, "big") % 0xFFFF


@device_function
def fold(total):
    """Return the ones' complement sum of 16 bits for a sum of up to 48 bits (RFC 1071)."""
    total = (total & 0xFFFF_FFFF) + (total >> 32)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)


@device_function
def raw_sum(address, nbytes):
    """Return the sum of the words of up to 64 KiB, of any length, as they are loaded: `fold` it, then swap its bytes.

    The order of bytes within words does not matter to a ones' complement sum (RFC 1071 2). So raw sums of pieces that
    begin at even offsets can be added.
    """
    total = 0
    at, end = address, address + (nbytes & -8)
    while at < end:
        word = ld64(at)
        total += (word & 0xFFFF_FFFF) + (word >> 32 & 0xFFFF_FFFF)
        at += 8
    if nbytes & 4:
        total += ld32(at)
        at += 4
    if nbytes & 2:
        total += ld16(at)
        at += 2
    if nbytes & 1:
        total += ld8(at)
    return total


@engine_function
def internet_sum(address, nbytes):
    """Return the ones' complement sum of up to 64 KiB, of any length: 0xFFFF if they contain the right checksum."""
    return be16(fold(raw_sum(address, nbytes)))


@device_function
def whole_ipv4(ip, nbytes):
    """Return the bytes of an IPv4 header, or 0 if it is damaged, or not all of its packet is in `nbytes` (RFC 791)."""
    if nbytes < IPV4.size:
        return 0
    first = ld8(ip + IPV4.version_ihl)
    header, total = (first & 0xF) * 4, be16(ld16(ip + IPV4.total_length))
    if first >> 4 != 4 or header < IPV4.size or header > total or total > nbytes:
        return 0
    return header


@device_function
def whole_ipv6(ip, nbytes):
    """Return whether an IPv6 header is intact, and all of its packet is in `nbytes` (RFC 8200)."""
    if nbytes < IPV6.size:
        return False
    return ld8(ip) >> 4 == 6 and be16(ld16(ip + IPV6.payload_length)) <= nbytes - IPV6.size


@device_function
def put_ipv4(ip, source, destination, nbytes):
    """Write an IPv4 header before `nbytes` of UDP. The addresses are the second words of their GIDs."""
    st16(ip + IPV4.version_ihl, 0x45)
    st16(ip + IPV4.total_length, be16(IPV4.size + nbytes))
    st16(ip + IPV4.identification, 0)
    st16(ip + IPV4.flags_fragment, be16(IPV4_DONT_FRAGMENT))
    st8(ip + IPV4.ttl, HOP_LIMIT)
    st8(ip + IPV4.protocol, IP_PROTOCOL_UDP)
    st16(ip + IPV4.checksum, 0)
    st32(ip + IPV4.source, source >> 32)
    st32(ip + IPV4.destination, destination >> 32)
    st16(ip + IPV4.checksum, be16(internet_sum(ip, IPV4.size) ^ 0xFFFF))


@device_function
def put_ipv6(ip, source_high, source_low, destination_high, destination_low, nbytes):
    """Write an IPv6 header before `nbytes` of UDP. The addresses are the words of their GIDs."""
    st64(ip, be64(6 << 60 | nbytes << 16 | IP_PROTOCOL_UDP << 8 | HOP_LIMIT))
    st64(ip + IPV6.source, source_high)
    st64(ip + IPV6.source + 8, source_low)
    st64(ip + IPV6.destination, destination_high)
    st64(ip + IPV6.destination + 8, destination_low)
