"""Receive-side scaling: the Toeplitz hash that spreads packets over the queues of a TIR.

The hash is linear: it is the XOR of the contributions of all input bytes. A table has the contribution of each byte
value at each position, so a byte costs one load.
"""

from __future__ import annotations

import numpy as np

from ...formats.cqe import RX_HASH_IP_SHIFT, RX_HASH_L4_SHIFT, RxHashIp, RxHashL4
from ...formats.ethernet_queues import HashField, L3Prot, L4Prot
from ...formats.packet import IP_PROTOCOL_TCP, IP_PROTOCOL_UDP
from ...jit.compile import engine_function
from ...jit.ops import be16, ld16, ld32, ld8
from ..state.ethernet_queues import TirRow
from ..state.flow import Packet
from .parse import DESTINATION, IPV4_AT, MARKS, PROTOCOL, SOURCE, TCP_PORTS, UDP_PORTS, VERSION_SHIFT

HASH_BITS = 32
INPUT_BYTES = 36  # at most: two IPv6 addresses and two ports
_PLACE = 256 * 4  # bytes of the table for one position of the input

def toeplitz_table(key: bytes) -> np.ndarray:
    """Return the contribution to the hash of each byte value (second index) at each input position (first index)."""
    bits, size = int.from_bytes(key, "big"), 8 * len(key)
    windows = [bits >> (size - HASH_BITS - i) & 0xFFFFFFFF for i in range(8 * INPUT_BYTES)]
    table = np.zeros((INPUT_BYTES, 256), np.uint32)
    values = np.arange(256)
    for i, window in enumerate(windows):
        table[i // 8, values >> (7 - i % 8) & 1 == 1] ^= np.uint32(window)
    return table


_ONE, _OR, _XOR = 0, 1, 2  # the byte itself, or combined with its counterpart of the other direction


@engine_function
def _hash_bytes(table: int, one: int, other: int, count: int, how: int) -> int:
    """Return the contribution of `count` bytes at `one`. `table` is the part of the table for their first position."""
    added = 0
    for i in range(count):
        byte = ld8(one + i)
        if how == _OR:
            byte |= ld8(other + i)
        elif how == _XOR:
            byte ^= ld8(other + i)
        added ^= ld32(table + _PLACE * i + 4 * byte)
    return added


@engine_function
def hash_type(tir: TirRow, packet: Packet) -> int:
    """Return the fields of a PACKET that a TIR hashes, as a CQE's rss_hash_type; 0 if the TIR does not hash it."""
    if tir.toeplitz == 0 or tir.fields == 0:
        return 0
    version = be16(ld16(packet + MARKS)) >> VERSION_SHIFT & 0xF
    if version != (4 if tir.l3_prot == L3Prot.IPV4 else 6):
        return 0
    kind = (RxHashIp.IPV4 if version == 4 else RxHashIp.IPV6) << RX_HASH_IP_SHIFT
    if tir.fields & (HashField.L4_SPORT | HashField.L4_DPORT):
        udp = tir.l4_prot == L4Prot.UDP
        if packet.l4 == 0 or ld8(packet + PROTOCOL) != (IP_PROTOCOL_UDP if udp else IP_PROTOCOL_TCP):
            return 0
        kind |= (RxHashL4.UDP if udp else RxHashL4.TCP) << RX_HASH_L4_SHIFT
    return kind


@engine_function
def rss_hash(tir: TirRow, packet: Packet) -> int:
    """Return the 32-bit hash of a PACKET for a TIR, or 0 if the TIR does not hash such packets.

    The input is the selected fields in this order: source address, destination address, source port, destination port.
    With a symmetric hash, source fields are replaced by the OR of both directions, destination fields by the XOR.
    """
    if hash_type(tir, packet) == 0:
        return 0
    protocol = IP_PROTOCOL_UDP if tir.l4_prot == L4Prot.UDP else IP_PROTOCOL_TCP
    skipped, size = (IPV4_AT, 4) if tir.l3_prot == L3Prot.IPV4 else (0, 16)
    source, destination = packet + SOURCE + skipped, packet + DESTINATION + skipped
    ports = packet + (UDP_PORTS if protocol == IP_PROTOCOL_UDP else TCP_PORTS)
    first, second = (_OR, _XOR) if tir.symmetric else (_ONE, _ONE)
    table = tir.toeplitz
    hash_ = 0
    if tir.fields & HashField.SRC_IP:
        hash_ ^= _hash_bytes(table, source, destination, size, first)
        table += _PLACE * size
    if tir.fields & HashField.DST_IP:
        hash_ ^= _hash_bytes(table, destination, source, size, second)
        table += _PLACE * size
    if tir.fields & HashField.L4_SPORT:
        hash_ ^= _hash_bytes(table, ports, ports + 2, 2, first)
        table += _PLACE * 2
    if tir.fields & HashField.L4_DPORT:
        hash_ ^= _hash_bytes(table, ports + 2, ports, 2, second)
    return hash_
