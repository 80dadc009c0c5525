"""The UDP wire's receive path: it splits the messages that recvmmsg returns into datagrams again (UDP_GRO).

The caller checks a datagram's ICRC with `check`. That costs more than everything else, and anybody may send to a
socket. So the caller first checks whether a QP expects the packet.

The ICRC covers IPv4's id, which a UDP socket does not see. The ids of most senders can be predicted: 0 for a single
datagram, k for segment k of a batch, or one more than the last id. When the ICRC fits such an id, all its 32 bits have
been checked. Otherwise the only id that fits is computed from the ICRC, which leaves 16 bits to check; such packets are
counted.
"""

from __future__ import annotations

from ..jit.compile import engine_function
from ..jit.ops import be16, ld16, ld32, ld64
from ..formats.packet import BTH, ICRC_SIZE
from .icrc import header_crc, packet_icrc, solve_ip_id, with_ip_id
from .udp_records import (
    CMSGHDR, DATAGRAM, DATAGRAMS, EAGAIN, GRO_CONTROL, ICRC_FULL, ICRC_WEAK, ICRC_WRONG, MAPPED, MMSGHDR,
    MSG_DONTWAIT, MSG_TRUNC, SOCKADDR_IN, SOCKADDR_IN6, SOL_UDP, SOURCE, SOURCES, UDP_GRO, UDP_SOCKET, datagram_at,
    errno, iovec_at, mmsghdr_at, recvmmsg, source_at, udp_socket_at, udp_wire_at,
)


@engine_function
def receive(wire: int, index: int) -> int:
    """Receive a batch of datagrams from socket `index`. Return how many DATAGRAM records are at `datagrams`.

    The records are valid until the next call. Datagrams that are no packets are dropped and counted.
    """
    w = udp_wire_at(wire)
    row = w.sockets + UDP_SOCKET.size * index
    arrived = recvmmsg(udp_socket_at(row).fd, w.rx_vector, w.rx_share, MSG_DONTWAIT, 0)
    count = 0
    for i in range(arrived):  # -1 is EAGAIN, or the error of an earlier send
        header = w.rx_vector + MMSGHDR.size * i
        count = _split(wire, row, header, count)
        h = mmsghdr_at(header)
        h.name_length, h.control_length = SOCKADDR_IN6.size, GRO_CONTROL
    w.rx_more = 1 if arrived == w.rx_share or (arrived < 0 and errno() != EAGAIN) else 0
    w.rx_message = 0
    w.rx_datagrams += count
    return count


@engine_function
def found_empty(wire: int) -> None:
    """Note that all sockets were found empty: datagrams from now on arrive after the last `mark`."""
    w = udp_wire_at(wire)
    if w.marked != 0:
        w.marked = 0
        w.position += w.capacity


@engine_function
def _split(wire: int, row: int, header: int, count: int) -> int:
    """Describe the packets of one message, after the `count` datagrams so far. Return the new count."""
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
    if s.version == 4:
        high, low = 0, ld32(h.name + SOCKADDR_IN.address) << 32 | MAPPED
    else:
        high, low = ld64(h.name + SOCKADDR_IN6.high), ld64(h.name + SOCKADDR_IN6.low)
    base = iovec_at(h.iov).base
    k = -1
    for offset in range(0, total, size):
        k += 1
        nbytes = min(size, total - offset) - ICRC_SIZE
        if nbytes < BTH.size or count == DATAGRAMS:
            w.rx_malformed += 1
            continue
        d = datagram_at(w.datagrams + DATAGRAM.size * count)
        d.packet, d.nbytes, d.peer_high, d.peer_low = base + offset, nbytes, high, low
        d.source, d.segment, d.message, d.socket = s.source, k, header, row
        count += 1
    return count


@engine_function
def check(wire: int, datagram: int) -> int:
    """Check the ICRC of a datagram of the last batch. Return ICRC_FULL, ICRC_WEAK, or ICRC_WRONG, which is counted."""
    w, d = udp_wire_at(wire), datagram_at(datagram)
    s = udp_socket_at(d.socket)
    if d.message != w.rx_message or d.nbytes != w.rx_nbytes:
        port = be16(ld16(mmsghdr_at(d.message).name + SOCKADDR_IN.port))
        w.rx_crc = header_crc(
            w.rx_scratch, s.version, d.peer_high, d.peer_low, s.gid_high, s.gid_low, port, d.nbytes
        )
        w.rx_message, w.rx_nbytes = d.message, d.nbytes
    if s.version == 4:
        status = _check_ipv4(w.rx_crc, _sender(wire, d.peer_low), d.packet, d.nbytes, d.segment)
    else:
        status = ICRC_FULL if packet_icrc(w.rx_crc, d.packet, d.nbytes) == ld32(d.packet + d.nbytes) else ICRC_WRONG
    if status == ICRC_WRONG:
        w.rx_icrc_encapsulated += 1
    elif status == ICRC_WEAK:
        w.weak_icrc += 1
    return status


@engine_function
def _check_ipv4(crc: int, sender: int, packet: int, nbytes: int, k: int) -> int:
    """Check the ICRC of segment `k` of a message, with the likely ids and then with any other.

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
            return ICRC_WRONG
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
def _sender(wire: int, address: int) -> int:
    """Return the row of a sender's ids. When two senders share a row, their ids are only guessed less well."""
    row = udp_wire_at(wire).sources + SOURCE.size * ((address >> 56 ^ address >> 48) & (SOURCES - 1))
    e = source_at(row)
    if e.address != address:
        e.address, e.last, e.start, e.step = address, 0xFFFF, 0, 1
    return row
