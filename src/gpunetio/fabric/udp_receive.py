"""The UDP wire's way in: what recvmmsg brings is cut into datagrams again (UDP_GRO), and their ICRC is checked.

The ICRC covers IPv4's id, which a UDP socket does not see. Most senders can be predicted: 0 for a single datagram, k
for segment k of a batch, or one more than the last time. When the ICRC fits such an id, all its 32 bits have been
checked. Otherwise the one id that fits is solved for, and with it 16 bits are left; such packets are counted.
"""

from __future__ import annotations

from ..device.compile import engine_function
from ..device.ops import be16, ld16, ld32, ld64
from ..formats.packet import BTH, ICRC_SIZE
from .icrc import header_crc, packet_icrc, solve_ip_id, with_ip_id
from .udp_records import (
    CMSGHDR, DATAGRAM, DATAGRAMS, EAGAIN, GRO_CONTROL, ICRC_FULL, ICRC_WEAK, MAPPED, MMSGHDR, MSG_DONTWAIT, MSG_TRUNC,
    SOCKADDR_IN, SOCKADDR_IN6, SOL_UDP, SOURCE, SOURCES, UDP_GRO, UDP_SOCKET, datagram_at, errno, iovec_at, mmsghdr_at,
    recvmmsg, source_at, udp_socket_at, udp_wire_at,
)  # fmt: skip

_BAD = -1


@engine_function
def receive(wire):
    """Take what has arrived at the sockets: how many DATAGRAM records it left at `datagrams`.

    They are good until the next call. A wrong ICRC, and what is no packet, is dropped and counted.
    """
    w = udp_wire_at(wire)
    count = 0
    empty = 1
    for i in range(w.socket_count):
        row = w.sockets + UDP_SOCKET.size * i
        vector = w.rx_vector + MMSGHDR.size * w.rx_share * i
        arrived = recvmmsg(udp_socket_at(row).fd, vector, w.rx_share, MSG_DONTWAIT, 0)
        if arrived == w.rx_share or (arrived < 0 and errno() != EAGAIN):
            empty = 0
        for j in range(arrived):  # -1 is EAGAIN, or an error of something sent long ago
            header = vector + MMSGHDR.size * j
            count = _split(wire, row, header, count)
            h = mmsghdr_at(header)
            h.name_length, h.control_length = SOCKADDR_IN6.size, GRO_CONTROL
    w.rx_datagrams += count
    if w.marked != 0 and empty != 0:
        w.marked = 0
        w.position += w.capacity
    return count


@engine_function
def _split(wire, row, header, count):
    """Check what one message brought and describe it, behind the `count` datagrams there are. Returns the new count."""
    w, s, h = udp_wire_at(wire), udp_socket_at(row), mmsghdr_at(header)
    total = ld32(header + MMSGHDR.nbytes)
    w.position += total
    size = total
    if h.control_length >= CMSGHDR.size + 4:
        if ld32(h.control + CMSGHDR.level) == SOL_UDP and ld32(h.control + CMSGHDR.type) == UDP_GRO:
            size = ld32(h.control + CMSGHDR.size)
    if total == 0 or size == 0 or h.flags & MSG_TRUNC != 0:
        w.rx_malformed += 1
        return count
    port = be16(ld16(h.name + SOCKADDR_IN.port))
    if s.version == 4:
        high, low = 0, ld32(h.name + SOCKADDR_IN.address) << 32 | MAPPED
    else:
        high, low = ld64(h.name + SOCKADDR_IN6.high), ld64(h.name + SOCKADDR_IN6.low)
    sender = _sender(wire, low) if s.version == 4 else 0
    base = iovec_at(h.iov).base
    crc = 0
    covered = -1  # the packet size for which `crc` is
    k = -1
    for offset in range(0, total, size):
        k += 1
        packet = base + offset
        nbytes = min(size, total - offset) - ICRC_SIZE
        if nbytes < BTH.size or count == DATAGRAMS:
            w.rx_malformed += 1
            continue
        if nbytes != covered:
            crc = header_crc(w.rx_scratch, s.version, high, low, s.gid_high, s.gid_low, port, nbytes)
            covered = nbytes
        if s.version == 4:
            status = _check_ipv4(crc, sender, packet, nbytes, k)
        else:
            status = ICRC_FULL if packet_icrc(crc, packet, nbytes) == ld32(packet + nbytes) else _BAD
        if status == _BAD:
            w.rx_icrc_encapsulated += 1
            continue
        if status == ICRC_WEAK:
            w.weak_icrc += 1
        d = datagram_at(w.datagrams + DATAGRAM.size * count)
        d.packet, d.nbytes, d.peer_high, d.peer_low = packet, nbytes, high, low
        d.source, d.status = s.source, status
        count += 1
    return count


@engine_function
def _check_ipv4(crc, sender, packet, nbytes, k):
    """Whether the ICRC of segment `k` of a message is right, for the likely ids or any other.

    `crc` is that of the header with id 0.
    """
    e = source_at(sender)
    following = e.last + 1 & 0xFFFF
    if k > 0:
        guess = e.last + e.step & 0xFFFF
    else:
        guess = 0 if e.start == 0 else following
    difference = packet_icrc(with_ip_id(crc, guess), packet, nbytes) ^ ld32(packet + nbytes)
    ip_id = guess
    status = ICRC_FULL
    if difference != 0:
        solved = solve_ip_id(difference, nbytes)
        if solved < 0:
            return _BAD
        ip_id = solved ^ guess
        if ip_id != 0 and ip_id != k and ip_id != following:
            status = ICRC_WEAK
    if k == 0:
        e.start = ip_id
    else:
        e.step = 0 if ip_id == e.last else 1
    e.last = ip_id
    return status


@engine_function
def _sender(wire, address):
    """The row of a sender's ids. Two senders that share one only guess worse."""
    row = udp_wire_at(wire).sources + SOURCE.size * ((address >> 56 ^ address >> 48) & (SOURCES - 1))
    e = source_at(row)
    if e.address != address:
        e.address, e.last, e.start, e.step = address, 0xFFFF, 0, 1
    return row
