"""The invariant CRC of RoCEv2 packets (IBTA 7.8.1, annex A17.3.3), and the IPv4 id computed from it.

The ICRC is the CRC-32 of Ethernet, stored little-endian after the packet. It covers eight bytes of ones, where
InfiniBand has its local route header, then the IP header, the UDP header and the packet. Fields that routers and
senders may change count as ones: IPv4's type of service, time to live and checksum; IPv6's traffic class, flow label
and hop limit; UDP's checksum; byte 4 of the BTH.

The ICRC covers IPv4's id, though a UDP socket neither sets nor sees it. A CRC is linear: the ICRCs of two ids differ by
the difference of the ids times a power of x. So the only id that can fit is computed from the ICRC.

A packet has `nbytes`, from its BTH to its padding. A GID is a pair of native 64-bit loads of its 16 bytes.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import (
    CRC32_POLYNOMIAL, be16, be64, clmul, copy, crc32_fold, has_clmul, ld8, st8, st16, st32, st64, x_to_the,
)
from ..formats.packet import (
    ICRC_SIZE, IP_PROTOCOL_UDP, IPV4, IPV4_DONT_FRAGMENT, IPV6, MAX_IPV4, ROCE_UDP_PORT, UDP,
)

_MASK32 = (1 << 32) - 1
_MASK56 = (1 << 56) - 1


def _barrett(polynomial: int) -> int:
    """Return x^64 divided by the polynomial, both of 33 bits and reflected (Gopal et al., Intel 323102)."""
    quotient, rest = 0, 1 << 64
    plain = int(f"{polynomial:033b}"[::-1], 2)
    for shift in range(32, -1, -1):
        if rest >> (shift + 32) & 1:
            quotient |= 1 << shift
            rest ^= plain << shift
    return int(f"{quotient:033b}"[::-1], 2)


_POLYNOMIAL33 = CRC32_POLYNOMIAL << 1 | 1
_QUOTIENT33 = _barrett(_POLYNOMIAL33)
_ONE = x_to_the(0)
_INVERSE_OF_A_BYTE = x_to_the(-8)

# --- CRC-32 --------------------------------------------------------------------------------------------------------


@device_function
def _reduce(value: int) -> int:
    """Return 64 coefficients modulo the polynomial, in 32 bits. Bit 63 is the coefficient of 1."""
    quotient = clmul(value & _MASK32, _QUOTIENT33) & _MASK32
    return (value ^ clmul(quotient, _POLYNOMIAL33)) >> 32 & _MASK32


@device_function
def _multiply(a: int, b: int) -> int:
    """Return the product of two residues."""
    return _reduce(clmul(a, b) << 1)


@engine_function
def _advance(register: int, address: int, nbytes: int) -> int:
    """Return the CRC register after `nbytes` more. Its upper 32 bits are XORed into bytes 4 to 7."""
    if has_clmul() != 0 and nbytes >= 16:
        return _reduce(crc32_fold(register, address, nbytes))
    for i in range(nbytes):
        register ^= ld8(address + i)
        low = register & 0xFF
        for _ in range(8):
            low = low >> 1 ^ (CRC32_POLYNOMIAL & -(low & 1))
        register = register >> 8 & _MASK56 ^ low
    return register


@device_function
def crc32(crc: int, address: int, nbytes: int) -> int:
    """Continue `crc` over `nbytes` more bytes, as zlib.crc32 does."""
    return _advance(crc ^ _MASK32, address, nbytes) ^ _MASK32


# --- the ICRC ------------------------------------------------------------------------------------------------------

PSEUDO_LRH = 8
HEADER_ROOM = PSEUDO_LRH + IPV6.size + UDP.size  # bytes of scratch memory
RECEIVED_ROOM = PSEUDO_LRH + MAX_IPV4 + UDP.size
_BEHIND_ID = IPV4.size - IPV4.identification - 2 + UDP.size  # bytes of IPv4 and UDP header after the id
_ID_IN_HEADER = x_to_the(32 + 8 * _BEHIND_ID)


@device_function
def header_crc(
    scratch: int, version: int, source_high: int, source_low: int, destination_high: int, destination_low: int,
    source_port: int, nbytes: int,
) -> int:
    """Return the CRC of what the ICRC covers before a packet of `nbytes`. IPv4's id is taken as 0.

    `version` is 4 or 6. IPv4 addresses are ::ffff:a.b.c.d. `scratch` has HEADER_ROOM bytes that nobody else uses.
    """
    st64(scratch, -1)
    ip = scratch + PSEUDO_LRH
    length = UDP.size + nbytes + ICRC_SIZE
    if version == 4:
        st8(ip + IPV4.version_ihl, 0x45)
        st8(ip + IPV4.tos, 0xFF)
        st16(ip + IPV4.total_length, be16(IPV4.size + length))
        st16(ip + IPV4.identification, 0)
        st16(ip + IPV4.flags_fragment, be16(IPV4_DONT_FRAGMENT))
        st8(ip + IPV4.ttl, 0xFF)
        st8(ip + IPV4.protocol, IP_PROTOCOL_UDP)
        st16(ip + IPV4.checksum, 0xFFFF)
        st32(ip + IPV4.source, source_low >> 32)
        st32(ip + IPV4.destination, destination_low >> 32)
        udp = ip + IPV4.size
    else:
        st64(ip, be64(0x6FFF_FFFF << 32 | length << 16 | IP_PROTOCOL_UDP << 8 | 0xFF))
        st64(ip + IPV6.source, source_high)
        st64(ip + IPV6.source + 8, source_low)
        st64(ip + IPV6.destination, destination_high)
        st64(ip + IPV6.destination + 8, destination_low)
        udp = ip + IPV6.size
    st16(udp + UDP.source_port, be16(source_port))
    st16(udp + UDP.destination_port, be16(ROCE_UDP_PORT))
    st16(udp + UDP.length, be16(length))
    st16(udp + UDP.checksum, 0xFFFF)
    return crc32(0, scratch, udp + UDP.size - scratch)


@engine_function
def received_crc(scratch: int, ip: int, ip_bytes: int, version: int) -> int:
    """Return the CRC of what the ICRC covers before a received packet, whose IP header has `ip_bytes` at `ip`.

    `scratch` has RECEIVED_ROOM bytes that nobody else uses.
    """
    st64(scratch, -1)
    head = scratch + PSEUDO_LRH
    copy(head, ip, ip_bytes + UDP.size)
    if version == 4:
        st8(head + IPV4.tos, 0xFF)
        st8(head + IPV4.ttl, 0xFF)
        st16(head + IPV4.checksum, 0xFFFF)
    else:
        st8(head, 0x6F)
        st8(head + 1, 0xFF)
        st16(head + 2, 0xFFFF)
        st8(head + IPV6.hop_limit, 0xFF)
    st16(head + ip_bytes + UDP.checksum, 0xFFFF)
    return crc32(0, scratch, PSEUDO_LRH + ip_bytes + UDP.size)


@device_function
def with_ip_id(crc: int, ip_id: int) -> int:
    """Convert a `header_crc`, which is for IPv4's id 0, to another id."""
    return crc ^ _multiply(be16(ip_id) << 16, _ID_IN_HEADER)


@device_function
def packet_icrc(crc: int, packet: int, nbytes: int) -> int:
    """Return the ICRC of a packet of at least a BTH. `crc` is its `header_crc`. The packet itself is not changed."""
    hidden = ld8(packet + 4) ^ 0xFF  # makes byte 4, which has the congestion marks, all ones
    return _advance(crc ^ _MASK32 | hidden << 32, packet, nbytes) ^ _MASK32


@device_function
def icrc(
    scratch: int, packet: int, nbytes: int, version: int, source_high: int, source_low: int, destination_high: int,
    destination_low: int, source_port: int, ip_id: int,
) -> int:
    """Return the ICRC of one packet. The arguments are those of `header_crc`, and IPv4's id."""
    crc = header_crc(
        scratch, version, source_high, source_low, destination_high, destination_low, source_port, nbytes
    )
    if version == 4:
        crc = with_ip_id(crc, ip_id)
    return packet_icrc(crc, packet, nbytes)


@engine_function
def solve_ip_id(difference: int, nbytes: int) -> int:
    """Return the IPv4 id that a packet of `nbytes` was sent with, or -1 when no id fits: the packet is damaged.

    `difference` is the ICRC that the packet carries, XOR the ICRC computed for id 0. If it was computed for another id,
    XOR the result with that id. One in 2^16 damaged packets passes.
    """
    # The id is followed by the rest of the IPv4 header, the UDP header, the packet and, as in any CRC, four bytes of
    # zeros.
    distance = _BEHIND_ID + nbytes + 4
    factor, power = _ONE, _INVERSE_OF_A_BYTE
    while distance != 0:
        if distance & 1 != 0:
            factor = _multiply(factor, power)
        power = _multiply(power, power)
        distance >>= 1
    id_alone = _multiply(difference, factor)
    if id_alone & 0xFFFF != 0:
        return -1
    return be16(id_alone >> 16)
