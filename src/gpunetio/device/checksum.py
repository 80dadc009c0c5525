"""The Internet checksum: the ones' complement of the ones' complement sum of 16-bit words (RFC 1071).

Sums and checksums are in host byte order, as in the views of headers.
"""

from __future__ import annotations

from ..formats.packet import IP_PROTOCOL_UDP, IPV4, IPV6
from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, ld8, ld16, ld32, ld64, st16


@device_function
def fold(total: int) -> int:
    """Return the ones' complement sum of 16 bits for a sum of up to 48 bits (RFC 1071)."""
    total = (total & 0xFFFF_FFFF) + (total >> 32)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)


@device_function
def raw_sum(address: int, nbytes: int) -> int:
    """Return the sum of up to 64 KiB of words, not byte-swapped: `fold` the sum, then swap its bytes.

    Address and length may be odd. Loads are aligned, and no byte outside the range is read. A ones' complement sum does
    not depend on the order of bytes within words (RFC 1071 2). So raw sums of pieces at even offsets can be added.
    """
    odd = address & 1 if nbytes > 0 else 0
    at, end = address + odd, address + nbytes
    total = 0
    if at & 2 and end - at >= 2:
        total += ld16(at)
        at += 2
    if at & 4 and end - at >= 4:
        total += ld32(at)
        at += 4
    for _ in range(max(end - at, 0) >> 3):  # LLVM vectorizes a loop with a known number of iterations
        word = ld64(at)
        total += (word & 0xFFFF_FFFF) + (word >> 32 & 0xFFFF_FFFF)
        at += 8
    if end - at >= 4:
        total += ld32(at)
        at += 4
    if end - at >= 2:
        total += ld16(at)
        at += 2
    if end - at >= 1:
        total += ld8(at)
    return ld8(address) + be16(fold(total)) if odd else total


@engine_function
def internet_sum(address: int, nbytes: int) -> int:
    """Return the ones' complement sum of up to 64 KiB: 0xFFFF if the bytes contain a correct checksum."""
    return be16(fold(raw_sum(address, nbytes)))


@device_function
def checksum(address: int, nbytes: int) -> int:
    """Return the checksum of up to 64 KiB whose checksum field is 0."""
    return internet_sum(address, nbytes) ^ 0xFFFF


@device_function
def update_checksum(checksum: int, old: int, new: int) -> int:
    """Return a checksum after a field has changed from `old` to `new` (RFC 1624).

    The field has up to 48 bits, and begins and ends at even offsets: a port, an address, or a MAC. For a single byte,
    pass the 16-bit word that contains it. Do not update a UDP checksum of 0: it means that there is no checksum.
    """
    return fold((checksum ^ 0xFFFF) + (fold(old) ^ 0xFFFF) + fold(new)) ^ 0xFFFF


@device_function
def pseudo_sum(ip: int, protocol: int, nbytes: int) -> int:
    """Return the sum of the pseudo header for `nbytes` of TCP or UDP (RFC 9293 3.1, RFC 768, RFC 8200 8.1).

    `ip` is the address of the IP header.
    """
    if ld8(ip) >> 4 == 4:
        return be16(fold(raw_sum(ip + IPV4.source, 8))) + protocol + nbytes
    return be16(fold(raw_sum(ip + IPV6.source, 32))) + protocol + nbytes


@device_function
def store_checksum(at: int, total: int, protocol: int) -> None:
    """Store the checksum for a sum. A checksum of zero is stored as 0xFFFF for UDP or if `total` is 0, else as 0."""
    value = 0xFFFF - total % 0xFFFF
    st16(at, be16(0 if value == 0xFFFF and total != 0 and protocol != IP_PROTOCOL_UDP else value))
