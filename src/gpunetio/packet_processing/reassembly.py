"""Reassemble echo requests that arrive in fragments, and answer in fragments (RFC 791, RFC 1122 3.3.2).

One thread of the ICMP kernel uses this memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import numpy as np

from .. import device as dev
from ..eth import headers
from ..eth.place import PacketBuffer
from ..formats.layout import I64, U32, Record
from ..formats.packet import (
    ETHER_TYPE_IPV4, ETHERNET, IPV4, IPV4_FRAGMENT_MASK, IPV4_MORE_FRAGMENTS, IPV4_OFFSET_MASK,
)
from ..gpu import Gpu, GpuMemory
from ..jit.compile import device_function
from ..jit.ops import ld_fixed32, ld_fixed64
from ..verbs import PD
from .connection import TAG_ROOM

PARTIALS = 64  # datagrams that are reassembled at the same time, in 4 MiB; one more replaces the oldest
PATIENCE_NS = 60_000_000_000  # for all fragments of a datagram to arrive (RFC 1122 3.3.2)
MOST_BYTES = 65535 - IPV4.size  # the most that an IPv4 header can announce
ROOM = 1 << 16  # for the data of a datagram
_UNIT = 8  # bytes: fragments begin at multiples
HEADER_BYTES = ETHERNET.size + IPV4.size

# Results of `take_fragment` if the datagram is not complete.
WAITS, REFUSED = -1, -2


class Partial(Record, size=1152):
    """A datagram of which some fragments have arrived.

    Its data are in a ROOM of their own.

        until   when it is given up; 0: the row is free
        source, number   of its IPv4 headers: they identify the fragments of a datagram
        total   bytes of its data, once the last fragment has arrived; before that, 0
        end     the end of the fragment that reaches farthest
        units   how many units of 8 bytes have arrived; `held` has a bit for each
        tags    bytes of VLAN tags
        header  Ethernet, VLAN tags and IPv4, without options, of its first fragment. IPv4 is at the end
    """

    until: I64 = 0
    source: I64 = 8
    number: I64 = 16
    total: I64 = 24
    end: I64 = 32
    units: I64 = 40
    tags: I64 = 48
    header: Annotated[int, "raw[42]"] = 58
    held: Annotated[int, "raw[1024]"] = 128


PARTIAL = Partial.entry


class ReassemblyState(Record, size=64):
    """The kernel's argument: addresses of PARTIALS rows and of their rooms, for the kernel and for the NIC.

    `mtu` is the port's.
    """

    rows: I64 = 0
    rooms: I64 = 8
    nic_rooms: I64 = 16
    mtu: I64 = 24
    lkey: U32 = 32


REASSEMBLY = ReassemblyState.entry


class Reassembly:
    """The memory for fragments, initially empty. `undo` frees it. As a kernel's argument, it is its `device_address`.
    """

    def __init__(self, gpu: Gpu, pd: PD, mtu: int, undo: ExitStack):
        rooms = PacketBuffer(gpu, pd, PARTIALS * ROOM, None, 0, None, undo)
        self._memory: GpuMemory = undo.enter_context(gpu.alloc(REASSEMBLY.size + PARTIALS * PARTIAL.size))
        self._memory.write(np.zeros(self._memory.nbytes, np.uint8))
        rows = self._memory.device_address + REASSEMBLY.size
        self._memory.write(REASSEMBLY.pack(
            rows=rows, rooms=rooms.device_address, nic_rooms=rooms.address, mtu=mtu, lkey=rooms.region.lkey
        ))

    @property
    def device_address(self) -> int:
        """Return the address of the ReassemblyState for kernels."""
        return self._memory.device_address


# --- for the kernel --------------------------------------------------------------------------------------------------


@device_function
def fragment_of(frame: int, nbytes: int) -> int:
    """Return the address of the IPv4 header of a fragment, or 0 if the frame is no fragment, or a damaged one."""
    kind, ip, length = headers.l3_of(frame, nbytes)
    if kind != ETHER_TYPE_IPV4 or length < IPV4.size or headers.ipv4_at(ip).flags_fragment & IPV4_FRAGMENT_MASK == 0:
        return 0
    v4, header = headers.ipv4_at(ip), headers.ipv4_bytes(ip)
    if v4.version_ihl >> 4 != 4 or header < IPV4.size or header >= v4.total_length or v4.total_length > length:
        return 0
    return ip if headers.is_ipv4_intact(ip) else 0


@device_function
def _row(reassembly: ReassemblyState, number: int) -> Partial:
    """Return the row of a datagram."""
    return Partial(ld_fixed64(reassembly + REASSEMBLY.rows) + number * PARTIAL.size)


@device_function
def _partial(reassembly: ReassemblyState, source: int, number: int, now: int) -> int:
    """Return the row number of a datagram: the row that it already has, or a free one, or the oldest."""
    oldest = 0
    for i in range(PARTIALS):
        p = _row(reassembly, i)
        if p.until > now and p.source == source and p.number == number:
            return i
        if p.until < _row(reassembly, oldest).until:
            oldest = i
    p = _row(reassembly, oldest)
    for offset in range(0, PARTIAL.size, 8):
        dev.st64(p + offset, 0)
    p.until, p.source, p.number = now + PATIENCE_NS, source, number
    return oldest


@device_function
def _hold(partial: Partial, first: int, count: int) -> int:
    """Note that units have arrived. Return how many of them had arrived before."""
    twice = 0
    for unit in range(first, first + count):
        at, bit = partial + PARTIAL.held + (unit >> 3), 1 << (unit & 7)
        byte = dev.ld8(at)
        twice += byte & bit != 0
        dev.st8(at, byte | bit)
    return twice


@device_function
def _keep_header(partial: Partial, frame: int, ip: int) -> None:
    """Store the headers of a datagram, so that IPv4's ends where `header` does."""
    partial.tags = ip - frame - ETHERNET.size
    begin = partial + PARTIAL.header + TAG_ROOM - partial.tags
    dev.copy(begin, frame, ETHERNET.size + partial.tags + IPV4.size)
    headers.ipv4_at(begin + ETHERNET.size + partial.tags).version_ihl = 0x45


@device_function
def take_fragment(reassembly: ReassemblyState, frame: int, ip: int, now: int) -> int:
    """Store a fragment. Return the number of its datagram if that is complete, WAITS, or REFUSED.

    Repeated fragments are ignored. Fragments that overlap, or disagree about the length, end their datagram, as in
    Linux: nobody can know which one is right.
    """
    v4, head = headers.ipv4_at(ip), headers.ipv4_bytes(ip)
    offset = (v4.flags_fragment & IPV4_OFFSET_MASK) * _UNIT
    nbytes = v4.total_length - head
    more = v4.flags_fragment & IPV4_MORE_FRAGMENTS != 0
    if (more and nbytes % _UNIT != 0) or offset + nbytes > MOST_BYTES:
        return REFUSED
    number = _partial(reassembly, v4.source, v4.identification, now)
    p, units = _row(reassembly, number), (nbytes + _UNIT - 1) // _UNIT
    total = p.total if more else offset + nbytes
    twice = _hold(p, offset // _UNIT, units)
    if twice == units and (p.total == total or more):
        return WAITS
    p.end = max(p.end, offset + nbytes)
    if twice > 0 or (p.total != 0 and p.total != total) or (total != 0 and p.end > total):
        p.until = 0
        return REFUSED
    p.total = total
    p.units += units
    room = ld_fixed64(reassembly + REASSEMBLY.rooms) + number * ROOM
    dev.copy(room + offset, ip + head, nbytes)
    if offset == 0:
        _keep_header(p, frame, ip)
    return number if total != 0 and p.units == (total + _UNIT - 1) // _UNIT else WAITS


@device_function
def data_of(reassembly: ReassemblyState, number: int) -> tuple[int, int, int]:
    """Return the address and length of a complete datagram's data, and the address of its IPv4 header."""
    row = _row(reassembly, number)
    ip = row + PARTIAL.header + TAG_ROOM + ETHERNET.size
    return ld_fixed64(reassembly + REASSEMBLY.rooms) + number * ROOM, row.total, ip


@device_function
def frame_of(reassembly: ReassemblyState, number: int) -> int:
    """Return the address of a datagram's Ethernet header."""
    row = _row(reassembly, number)
    return row + PARTIAL.header + TAG_ROOM - row.tags


@device_function
def release(reassembly: ReassemblyState, number: int) -> None:
    """Forget a datagram."""
    _row(reassembly, number).until = 0


@device_function
def send_fragments(reassembly: ReassemblyState, number: int, txq: dev.EthTxq) -> int:
    """Send the data of a datagram, after its header, in fragments. Return a ticket, or a negative status."""
    p = _row(reassembly, number)
    _, total, ip = data_of(reassembly, number)
    v4, begin = headers.ipv4_at(ip), frame_of(reassembly, number)
    data = ld_fixed64(reassembly + REASSEMBLY.nic_rooms) + number * ROOM
    lkey = ld_fixed32(reassembly + REASSEMBLY.lkey)
    most = (ld_fixed64(reassembly + REASSEMBLY.mtu) - IPV4.size) // _UNIT * _UNIT
    ticket, offset = dev.OK, 0
    while offset < total and ticket >= 0:
        nbytes = min(total - offset, most)
        v4.total_length = IPV4.size + nbytes
        last = offset + nbytes == total
        v4.flags_fragment = offset // _UNIT | (0 if last else IPV4_MORE_FRAGMENTS)
        headers.write_ipv4_checksum(ip)
        ticket = dev.txq_send_headers(txq, begin, HEADER_BYTES + p.tags, data + offset, lkey, nbytes, 0, last)
        offset += nbytes
    return ticket
