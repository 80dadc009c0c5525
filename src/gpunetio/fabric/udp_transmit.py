"""The UDP wire's send path: frames of a pipe become datagrams, many of them in one message (UDP_SEGMENT).

The ICRC covers IPv4's id, so the id must be known before the kernel chooses it. A socket that is not connected and
does path-MTU discovery sends single datagrams with id 0, and segment k of a message with id k.
"""

from __future__ import annotations

from ..formats.packet import BTH, ICRC_SIZE, ROCE_UDP_PORT
from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, ld64, ld8, st16, st32, st64, st8
from .frames import (
    HOP_LIMIT, PACKET, Frame, PipeEnd, class_of, consume, egress_of, hop_limit_of, label_of, next_frame, release,
)
from .icrc import header_crc, packet_icrc, with_ip_id
from .udp_records import (
    AF_INET, AF_INET6, CMSGHDR, CONTROL, EAGAIN, EGRESSES, EINTR, EINVAL, EIO, EMSGSIZE, GSO_ON, GSO_REFUSED,
    GSO_TRYING_WITHOUT, IOVEC, IPPROTO_IP, IPPROTO_IPV6, IPV6_HOPLIMIT, IPV6_TCLASS, IP_TOS, IP_TTL, MAX_MESSAGE,
    MAX_SEGMENTS, MMSGHDR, MSG_DONTWAIT, SOCKADDR_IN, SOCKADDR_IN6, SOL_UDP, TX_MESSAGES, TX_SLOT, UDP_SEGMENT, IoVec,
    MmsgHdr, TxSlot, UdpEnd, UdpSocket, errno, is_mapped, sendmmsg,
)

TX_ROUNDS = 2  # calls of sendmmsg per `transmit`, so that the caller can also receive

_LINK_LOCAL_MASK, _LINK_LOCAL = 0xC0FF, 0x80FE  # fe80::/10 in the first word of a GID


@engine_function
def transmit(udp: UdpEnd) -> int:
    """Send frames from the pipe. Return how many were sent, or -1 if the pipe holds invalid data.

    Frames for which the sockets have no room stay in the pipe. A frame that cannot be sent at all is dropped and
    counted: RC retransmits it, and reports an error when its retries are exhausted.
    """
    sent = 0
    for _ in range(TX_ROUNDS):
        frame = Frame(next_frame(PipeEnd(udp.tx)))
        if frame < 0:
            return -1
        if frame == 0:
            break
        socket = UdpSocket(_socket_for(udp, frame))
        if socket == 0:
            consume(PipeEnd(udp.tx))
            udp.tx_dropped += 1
        else:
            frames, blocked = _send(udp, socket, _gather(udp, socket))
            sent += frames
            if blocked:
                break
        release(PipeEnd(udp.tx))
    release(PipeEnd(udp.tx))
    return sent


@device_function
def _socket_for(udp: UdpEnd, frame: Frame) -> int:
    """Return the socket for a frame, or 0 if the frame cannot be sent."""
    if egress_of(frame.source) >= EGRESSES:
        return 0
    socket = UdpSocket(ld64(udp.socket_of + 8 * egress_of(frame.source)))
    if socket == 0 or frame.nbytes < BTH.size or frame.nbytes + ICRC_SIZE > MAX_MESSAGE:
        return 0
    if socket.version == 4 and not is_mapped(frame.peer_high, frame.peer_low):
        return 0
    return socket


@engine_function
def _gather(udp: UdpEnd, socket: UdpSocket) -> int:
    """Build messages from the frames at the head of the pipe that leave through socket `socket`. Return how many."""
    count = 0
    frame = next_frame(PipeEnd(udp.tx))
    while frame > 0 and count < TX_MESSAGES and _socket_for(udp, Frame(frame)) == socket:
        slot, header = udp.tx_slots + TX_SLOT.size * count, udp.tx_vector + MMSGHDR.size * count
        frame = _fill(udp, socket, frame, TxSlot(slot), MmsgHdr(header))
        count += 1
    return count


@engine_function
def _fill(udp: UdpEnd, socket: UdpSocket, frame: int, slot: TxSlot, header: MmsgHdr) -> int:
    """Build one message from `frame` and the frames after it with its destination and size. Return the next frame."""
    first = Frame(frame)
    slot.position = PipeEnd(udp.tx).position
    source, high, low, size = first.source, first.peer_high, first.peer_low, first.nbytes
    crc, total, k = 0, 0, 0
    nbytes = size
    while True:
        if k == 0 or nbytes < size:
            crc = header_crc(
                udp.tx_scratch, socket.version, socket.gid_high, socket.gid_low, high, low, socket.port, nbytes
            )
        seal(Frame(frame), nbytes, crc, k if socket.version == 4 else 0)
        piece = IoVec(slot + TX_SLOT.iov + IOVEC.size * k)
        piece.base, piece.nbytes = frame + PACKET, nbytes + ICRC_SIZE
        total += nbytes + ICRC_SIZE
        k += 1
        consume(PipeEnd(udp.tx))
        frame = next_frame(PipeEnd(udp.tx))
        if frame <= 0 or nbytes < size or k >= socket.segments or total + size + ICRC_SIZE > MAX_MESSAGE:
            break
        f = Frame(frame)
        nbytes = f.nbytes
        if f.source != source or f.peer_high != high or f.peer_low != low or nbytes > size or nbytes < BTH.size:
            break
    slot.frames = k
    header.name_length = _write_name(slot + TX_SLOT.name, socket.version, high, low, socket.scope, label_of(source))
    header.iov_length = k
    control = slot + TX_SLOT.control
    end = _put_traffic(control, socket.version, source)
    if k > 1:
        end = _put_control(end, SOL_UDP, UDP_SEGMENT, 2, size + ICRC_SIZE)
    header.control_length = end - control
    return frame


@device_function
def _put_traffic(control: int, version: int, source: int) -> int:
    """Write the control messages for the traffic class and hop limit in a frame's `source`. Return their end."""
    four = version == 4
    level = IPPROTO_IP if four else IPPROTO_IPV6
    if class_of(source) != 0:
        control = _put_control(control, level, IP_TOS if four else IPV6_TCLASS, 4, class_of(source))
    if hop_limit_of(source) != HOP_LIMIT:
        control = _put_control(control, level, IP_TTL if four else IPV6_HOPLIMIT, 4, hop_limit_of(source))
    return control


@device_function
def _put_control(control: int, level: int, kind: int, nbytes: int, value: int) -> int:
    """Write a control message with a value of `nbytes`, 4 at most. Return its end."""
    st64(control + CMSGHDR.nbytes, CMSGHDR.size + nbytes)
    st32(control + CMSGHDR.level, level)
    st32(control + CMSGHDR.type, kind)
    st32(control + CMSGHDR.size, value)
    return control + CONTROL


@device_function
def seal(frame: Frame, nbytes: int, crc: int, ip_id: int) -> None:
    """Append the ICRC to a packet, then apply the damage that the fault injector requests.

    `crc` is the header's, for id 0. The frame's `icrc` records the id for which this was done, because a frame that
    could not be sent comes here again.
    """
    packet = frame + PACKET
    if frame.icrc == 1 + ip_id:
        return
    bit = frame.corrupt - 1
    damage = bit >= 0 and bit < 8 * (nbytes + ICRC_SIZE)
    if damage and frame.icrc != 0:
        flip(packet, bit)
    st32(packet + nbytes, packet_icrc(with_ip_id(crc, ip_id), packet, nbytes))
    frame.icrc = 1 + ip_id
    if damage:
        flip(packet, bit)


@device_function
def flip(packet: int, bit: int) -> None:
    """Flip a bit of a packet."""
    at = packet + (bit >> 3)
    st8(at, ld8(at) ^ 1 << (bit & 7))


@device_function
def _write_name(name: int, version: int, high: int, low: int, scope: int, label: int) -> int:
    """Write the destination as a socket address, with the flow label if it is IPv6. Return its length."""
    st16(name + SOCKADDR_IN.port, be16(ROCE_UDP_PORT))
    if version == 4:
        st16(name + SOCKADDR_IN.family, AF_INET)
        st32(name + SOCKADDR_IN.address, low >> 32)
        return SOCKADDR_IN.size
    st16(name + SOCKADDR_IN6.family, AF_INET6)
    st32(name + SOCKADDR_IN6.flowinfo, be32(label))
    st64(name + SOCKADDR_IN6.high, high)
    st64(name + SOCKADDR_IN6.low, low)
    st32(name + SOCKADDR_IN6.scope, scope if high & _LINK_LOCAL_MASK == _LINK_LOCAL else 0)
    return SOCKADDR_IN6.size


@engine_function
def _send(udp: UdpEnd, socket: UdpSocket, count: int) -> tuple[int, bool]:
    """Hand `count` messages to the kernel. Return the frames sent, and whether the socket is full."""
    frames = 0
    first = 0
    while first < count:
        accepted = sendmmsg(socket.fd, udp.tx_vector + MMSGHDR.size * first, count - first, MSG_DONTWAIT)
        if accepted > 0:
            for i in range(first, first + accepted):
                frames += TxSlot(udp.tx_slots + TX_SLOT.size * i).frames
            first += accepted
            udp.tx_messages += accepted
            if socket.gso == GSO_TRYING_WITHOUT:
                socket.gso = GSO_REFUSED
            continue
        error = errno()
        if error == EINTR:
            continue
        slot = TxSlot(udp.tx_slots + TX_SLOT.size * first)
        if error == EAGAIN:
            _take_back(PipeEnd(udp.tx), slot.position)
            udp.tx_blocked += 1
            udp.tx_frames += frames
            return frames, True
        if slot.frames > 1 and (error == EINVAL or error == EIO or error == EMSGSIZE):
            # Either this path has no UDP_SEGMENT, or the segments are larger than its MTU. Sending the first segment
            # alone shows which: it succeeds, or fails with EMSGSIZE.
            socket.gso, socket.segments = GSO_TRYING_WITHOUT, 1
            _take_back(PipeEnd(udp.tx), slot.position)
            break
        if socket.gso == GSO_TRYING_WITHOUT:
            socket.gso, socket.segments = GSO_ON, MAX_SEGMENTS
        udp.tx_dropped += slot.frames
        udp.tx_error = error
        first += 1
    udp.tx_frames += frames
    return frames, False


@device_function
def _take_back(end: PipeEnd, position: int) -> None:
    """Un-consume all frames from `position` on."""
    end.position, end.reserved = position, 0
