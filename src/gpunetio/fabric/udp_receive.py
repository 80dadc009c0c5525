"""The UDP wire's receive path: it splits the messages that recvmmsg returns into datagrams again (UDP_GRO).

The caller checks a datagram's ICRC with `check`. That costs more than everything else, and anybody may send to a
socket. So the caller first checks whether a QP expects the packet.

The ICRC covers IPv4's id, which a UDP socket does not see. The ids of most senders can be predicted: 0 for a single
datagram, k for segment k of a batch, or one more than the last id. When the ICRC fits such an id, all its 32 bits have
been checked. Otherwise the only id that fits is computed from the ICRC, which leaves 16 bits to check; such packets are
counted.
"""

from __future__ import annotations

from ..formats.packet import BTH, ICRC_SIZE
from ..jit.compile import engine_function
from ..jit.ops import be16, ld16, ld32, ld64
from .icrc import header_crc, packet_icrc, solve_ip_id, with_ip_id
from .udp_records import (
    CMSGHDR, DATAGRAM, DATAGRAMS, EAGAIN, GRO_CONTROL, ICRC_FULL, ICRC_WEAK, ICRC_WRONG, MAPPED, MMSGHDR, MSG_DONTWAIT,
    MSG_TRUNC, SOCKADDR_IN, SOCKADDR_IN6, SOL_UDP, SOURCE, SOURCES, UDP_GRO, UDP_SOCKET, Datagram, IoVec, MmsgHdr,
    Source, UdpEnd, UdpSocket, errno, recvmmsg,
)


@engine_function
def receive(udp: UdpEnd, index: int) -> int:
    """Receive a batch of datagrams from socket `index`. Return how many DATAGRAM records are at `datagrams`.

    The records are valid until the next call. Datagrams that are no packets are dropped and counted.
    """
    socket = UdpSocket(udp.sockets + UDP_SOCKET.size * index)
    arrived = recvmmsg(socket.fd, udp.rx_vector, udp.rx_share, MSG_DONTWAIT, 0)
    count = 0
    for i in range(arrived):  # -1 is EAGAIN, or the error of an earlier send
        header = MmsgHdr(udp.rx_vector + MMSGHDR.size * i)
        count = _split(udp, socket, header, count)
        header.name_length, header.control_length = SOCKADDR_IN6.size, GRO_CONTROL
    udp.rx_more = 1 if arrived == udp.rx_share or (arrived < 0 and errno() != EAGAIN) else 0
    udp.rx_message = 0
    udp.rx_datagrams += count
    return count


@engine_function
def found_empty(udp: UdpEnd) -> None:
    """Note that all sockets were found empty: datagrams from now on arrive after the last `mark`."""
    if udp.marked != 0:
        udp.marked = 0
        udp.position += udp.capacity


@engine_function
def _split(udp: UdpEnd, socket: UdpSocket, header: MmsgHdr, count: int) -> int:
    """Describe the packets of one message, after the `count` datagrams so far. Return the new count."""
    total = ld32(header + MMSGHDR.nbytes)
    udp.position += total
    size = total
    if header.control_length >= CMSGHDR.size + 4:
        if ld32(header.control + CMSGHDR.level) == SOL_UDP and ld32(header.control + CMSGHDR.type) == UDP_GRO:
            size = ld32(header.control + CMSGHDR.size)
    if total == 0 or size == 0 or header.flags & MSG_TRUNC != 0:
        udp.rx_malformed += 1
        return count
    if socket.version == 4:
        high, low = 0, ld32(header.name + SOCKADDR_IN.address) << 32 | MAPPED
    else:
        high, low = ld64(header.name + SOCKADDR_IN6.high), ld64(header.name + SOCKADDR_IN6.low)
    base = IoVec(header.iov).base
    k = -1
    for offset in range(0, total, size):
        k += 1
        nbytes = min(size, total - offset) - ICRC_SIZE
        if nbytes < BTH.size or count == DATAGRAMS:
            udp.rx_malformed += 1
            continue
        datagram = Datagram(udp.datagrams + DATAGRAM.size * count)
        datagram.packet, datagram.nbytes, datagram.peer_high, datagram.peer_low = base + offset, nbytes, high, low
        datagram.source, datagram.segment, datagram.message, datagram.socket = socket.source, k, header, socket
        count += 1
    return count


@engine_function
def check(udp: UdpEnd, datagram: Datagram) -> int:
    """Check the ICRC of a datagram of the last batch. Return ICRC_FULL, ICRC_WEAK, or ICRC_WRONG, which is counted."""
    socket = UdpSocket(datagram.socket)
    if datagram.message != udp.rx_message or datagram.nbytes != udp.rx_nbytes:
        port = be16(ld16(MmsgHdr(datagram.message).name + SOCKADDR_IN.port))
        udp.rx_crc = header_crc(
            udp.rx_scratch, socket.version, datagram.peer_high, datagram.peer_low, socket.gid_high, socket.gid_low,
            port, datagram.nbytes,
        )
        udp.rx_message, udp.rx_nbytes = datagram.message, datagram.nbytes
    if socket.version == 4:
        sender = _sender(udp, datagram.peer_low)
        status = _check_ipv4(udp.rx_crc, sender, datagram.packet, datagram.nbytes, datagram.segment)
    else:
        icrc = packet_icrc(udp.rx_crc, datagram.packet, datagram.nbytes)
        status = ICRC_FULL if icrc == ld32(datagram.packet + datagram.nbytes) else ICRC_WRONG
    if status == ICRC_WRONG:
        udp.rx_icrc_encapsulated += 1
    elif status == ICRC_WEAK:
        udp.weak_icrc += 1
    return status


@engine_function
def _check_ipv4(crc: int, source: Source, packet: int, nbytes: int, k: int) -> int:
    """Check the ICRC of segment `k` of a message, with the likely ids and then with any other.

    `crc` is that of the header with id 0.
    """
    following = source.last + 1 & 0xFFFF
    if k > 0:
        guess = source.last + source.step & 0xFFFF
    else:
        guess = 0 if source.start == 0 else following
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
        source.start = ip_id
    else:
        source.step = 0 if ip_id == source.last else 1
    source.last = ip_id
    return status


@engine_function
def _sender(udp: UdpEnd, address: int) -> int:
    """Return the row of a sender's ids. When two senders share a row, their ids are only guessed less well."""
    source = Source(udp.sources + SOURCE.size * ((address >> 56 ^ address >> 48) & (SOURCES - 1)))
    if source.address != address:
        source.address, source.last, source.start, source.step = address, 0xFFFF, 0, 1
    return source
