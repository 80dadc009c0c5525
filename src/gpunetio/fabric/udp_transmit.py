"""The UDP wire's send path: frames of a pipe become datagrams, many of them in one message (UDP_SEGMENT).

The ICRC covers IPv4's id, so the id must be known before the kernel chooses it. A socket that is not connected and
does path-MTU discovery sends single datagrams with id 0, and segment k of a message with id k.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, ld8, ld64, st8, st16, st32, st64
from ..formats.packet import BTH, ICRC_SIZE, ROCE_UDP_PORT
from .frames import (
    HOP_LIMIT, PACKET, class_of, consume, egress_of, frame_at, hop_limit_of, label_of, next_frame, pipe_end_at, release,
)
from .icrc import header_crc, packet_icrc, with_ip_id
from .udp_records import (
    AF_INET, AF_INET6, CMSGHDR, CONTROL, EAGAIN, EGRESSES, EINTR, EINVAL, EIO, EMSGSIZE, GSO_ON,
    GSO_REFUSED, GSO_TRYING_WITHOUT, IOVEC, IP_TOS, IP_TTL, IPPROTO_IP, IPPROTO_IPV6, IPV6_HOPLIMIT, IPV6_TCLASS,
    MAX_MESSAGE, MAX_SEGMENTS, MMSGHDR, MSG_DONTWAIT, SOCKADDR_IN,
    SOCKADDR_IN6, SOL_UDP, TX_MESSAGES, TX_SLOT, UDP_SEGMENT, errno, iovec_at, is_mapped, mmsghdr_at, sendmmsg,
    tx_slot_at, udp_socket_at, udp_wire_at,
)

TX_ROUNDS = 2  # calls of sendmmsg per `transmit`, so that the caller can also receive

_LINK_LOCAL_MASK, _LINK_LOCAL = 0xC0FF, 0x80FE  # fe80::/10 in the first word of a GID


@engine_function
def transmit(wire: int) -> int:
    """Send frames from the pipe. Return how many were sent, or -1 if the pipe holds invalid data.

    Frames for which the sockets have no room stay in the pipe. A frame that cannot be sent at all is dropped and
    counted: RC retransmits it, and reports an error when its retries are exhausted.
    """
    w = udp_wire_at(wire)
    sent = 0
    for _ in range(TX_ROUNDS):
        frame = next_frame(w.tx)
        if frame < 0:
            return -1
        if frame == 0:
            break
        row = _socket_for(wire, frame)
        if row == 0:
            consume(w.tx)
            w.tx_dropped += 1
        else:
            frames, blocked = _send(wire, row, _gather(wire, row))
            sent += frames
            if blocked:
                break
        release(w.tx)
    release(w.tx)
    return sent


@device_function
def _socket_for(wire: int, frame: int) -> int:
    """Return the socket for a frame, or 0 if the frame cannot be sent."""
    w, f = udp_wire_at(wire), frame_at(frame)
    if egress_of(f.source) >= EGRESSES:
        return 0
    row = ld64(w.socket_of + 8 * egress_of(f.source))
    if row == 0 or f.nbytes < BTH.size or f.nbytes + ICRC_SIZE > MAX_MESSAGE:
        return 0
    if udp_socket_at(row).version == 4 and not is_mapped(f.peer_high, f.peer_low):
        return 0
    return row


@engine_function
def _gather(wire: int, row: int) -> int:
    """Build messages from the frames at the head of the pipe that leave through socket `row`. Return how many."""
    w = udp_wire_at(wire)
    count = 0
    frame = next_frame(w.tx)
    while frame > 0 and count < TX_MESSAGES and _socket_for(wire, frame) == row:
        frame = _fill(wire, row, frame, w.tx_slots + TX_SLOT.size * count, w.tx_vector + MMSGHDR.size * count)
        count += 1
    return count


@engine_function
def _fill(wire: int, row: int, frame: int, slot: int, header: int) -> int:
    """Build one message from `frame` and the frames after it with its destination and size. Return the next frame."""
    w, s = udp_wire_at(wire), udp_socket_at(row)
    t, h, first = tx_slot_at(slot), mmsghdr_at(header), frame_at(frame)
    t.position = pipe_end_at(w.tx).position
    source, high, low, size = first.source, first.peer_high, first.peer_low, first.nbytes
    crc, total, k = 0, 0, 0
    nbytes = size
    while True:
        if k == 0 or nbytes < size:
            crc = header_crc(w.tx_scratch, s.version, s.gid_high, s.gid_low, high, low, s.port, nbytes)
        seal(frame, nbytes, crc, k if s.version == 4 else 0)
        piece = iovec_at(slot + TX_SLOT.iov + IOVEC.size * k)
        piece.base, piece.nbytes = frame + PACKET, nbytes + ICRC_SIZE
        total += nbytes + ICRC_SIZE
        k += 1
        consume(w.tx)
        frame = next_frame(w.tx)
        if frame <= 0 or nbytes < size or k >= s.segments or total + size + ICRC_SIZE > MAX_MESSAGE:
            break
        f = frame_at(frame)
        nbytes = f.nbytes
        if f.source != source or f.peer_high != high or f.peer_low != low or nbytes > size or nbytes < BTH.size:
            break
    t.frames = k
    h.name_length = _write_name(slot + TX_SLOT.name, s.version, high, low, s.scope, label_of(source))
    h.iov_length = k
    control = slot + TX_SLOT.control
    end = _put_traffic(control, s.version, source)
    if k > 1:
        end = _put_control(end, SOL_UDP, UDP_SEGMENT, 2, size + ICRC_SIZE)
    h.control_length = end - control
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
def seal(frame: int, nbytes: int, crc: int, ip_id: int) -> None:
    """Append the ICRC to a packet, then apply the damage that the fault injector requests.

    `crc` is the header's, for id 0. The frame's `icrc` records the id for which this was done, because a frame that
    could not be sent comes here again.
    """
    f = frame_at(frame)
    packet = frame + PACKET
    if f.icrc == 1 + ip_id:
        return
    bit = f.corrupt - 1
    damage = bit >= 0 and bit < 8 * (nbytes + ICRC_SIZE)
    if damage and f.icrc != 0:
        flip(packet, bit)
    st32(packet + nbytes, packet_icrc(with_ip_id(crc, ip_id), packet, nbytes))
    f.icrc = 1 + ip_id
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
def _send(wire: int, row: int, count: int) -> tuple[int, bool]:
    """Hand `count` messages to the kernel. Return the frames sent, and whether the socket is full."""
    w, s = udp_wire_at(wire), udp_socket_at(row)
    frames = 0
    first = 0
    while first < count:
        accepted = sendmmsg(s.fd, w.tx_vector + MMSGHDR.size * first, count - first, MSG_DONTWAIT)
        if accepted > 0:
            for i in range(first, first + accepted):
                frames += tx_slot_at(w.tx_slots + TX_SLOT.size * i).frames
            first += accepted
            w.tx_messages += accepted
            if s.gso == GSO_TRYING_WITHOUT:
                s.gso = GSO_REFUSED
            continue
        error = errno()
        if error == EINTR:
            continue
        t = tx_slot_at(w.tx_slots + TX_SLOT.size * first)
        if error == EAGAIN:
            _take_back(w.tx, t.position)
            w.tx_blocked += 1
            w.tx_frames += frames
            return frames, True
        if t.frames > 1 and (error == EINVAL or error == EIO or error == EMSGSIZE):
            # Either this path has no UDP_SEGMENT, or the segments are larger than its MTU. Sending the first segment
            # alone shows which: it succeeds, or fails with EMSGSIZE.
            s.gso, s.segments = GSO_TRYING_WITHOUT, 1
            _take_back(w.tx, t.position)
            break
        if s.gso == GSO_TRYING_WITHOUT:
            s.gso, s.segments = GSO_ON, MAX_SEGMENTS
        w.tx_dropped += t.frames
        w.tx_error = error
        first += 1
    w.tx_frames += frames
    return frames, False


@device_function
def _take_back(end: int, position: int) -> None:
    """Un-consume all frames from `position` on."""
    e = pipe_end_at(end)
    e.position, e.reserved = position, 0
