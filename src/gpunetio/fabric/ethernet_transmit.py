"""Frames to the descriptor of an Ethernet wire: packets of queue pairs get their headers, and leave one by one."""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, copy, st16, st32
from ..formats.packet import BTH, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHERNET, ICRC_SIZE, IPV4, IPV6, ROCE_UDP_PORT, UDP
from .capture import capture_frame
from .ethernet_receive import lose
from .ethernet_records import (
    DATAGRAM_SOCKET, EGRESS, EGRESSES, LENGTH, STREAM, egress_at, ethernet_wire_at, send, sendmsg, writev,
)  # fmt: skip
from .frames import ETHERNET_FRAME, PACKET, consume, frame_at, next_frame, release
from .icrc import header_crc
from .ip_headers import put_ipv4, put_ipv6
from .udp_records import (
    EAGAIN, EINTR, IOVEC, MAX_MESSAGE, MMSGHDR, MSG_DONTWAIT, MSG_NOSIGNAL, errno, iovec_at, is_mapped,
)  # fmt: skip
from .udp_transmit import flip, seal

TX_FRAMES = 256  # packets per `transmit`, so that the caller can also receive
_SENT, _BLOCKED, _DROPPED = 1, 0, -1


@engine_function
def transmit_frames(wire, capture, now):
    """Send the frames that wait. Return how many packets left, or -1 when the pipe holds nonsense.

    Frames for which the descriptor has no room stay in the pipe. A packet that cannot be sent at all is dropped and
    counted. `capture` is the address of a CAPTURE, or 0; `now` the time for it.
    """
    w = ethernet_wire_at(wire)
    blocked = _send_rest(w) == _BLOCKED or _send_replies(wire, capture, now)
    sent = 0
    taken = 0
    while not blocked and taken < TX_FRAMES:
        frame = next_frame(w.tx)
        if frame < 0:
            return -1
        if frame == 0:
            break
        status = _DROPPED
        f = frame_at(frame)
        egress = _egress_of(wire, frame)
        if f.reference == ETHERNET_FRAME:
            _damage(frame)
            status = _send(wire, frame + PACKET, f.nbytes, frame, 0, capture, now)
        elif egress != 0:
            head = _put_headers(wire, egress, frame, f.nbytes)
            status = _send(wire, w.headers, head, frame + PACKET, f.nbytes + ICRC_SIZE, capture, now)
        if status == _BLOCKED:
            break
        blocked = w.rest_at < w.rest_end
        if status == _DROPPED:
            w.tx_dropped += 1
        else:
            sent += 1
        consume(w.tx)
        taken += 1
    if taken != 0:
        release(w.tx)
    w.tx_frames += sent
    return sent


@device_function
def _send_replies(wire, capture, now):
    """Send the frames of the other thread, which need no headers. Return whether there is no more room."""
    w = ethernet_wire_at(wire)
    while True:
        frame = next_frame(w.replies)
        if frame <= 0:
            return False
        if _send(wire, frame + PACKET, frame_at(frame).nbytes, frame, 0, capture, now) == _BLOCKED:
            return True
        consume(w.replies)
        release(w.replies)
        if w.rest_at < w.rest_end:
            return True


@device_function
def _damage(frame):
    """Do the damage to an Ethernet frame that the fault injector asks for, once."""
    f = frame_at(frame)
    if 0 < f.corrupt <= 8 * f.nbytes:
        flip(frame + PACKET, f.corrupt - 1)
    f.corrupt = 0


@device_function
def _egress_of(wire, frame):
    """Return the EGRESS of a packet, or 0 when it cannot be sent."""
    w, f = ethernet_wire_at(wire), frame_at(frame)
    if f.source < 0 or f.source >= EGRESSES or f.nbytes < BTH.size or f.nbytes + ICRC_SIZE > MAX_MESSAGE:
        return 0
    egress = w.egresses + EGRESS.size * f.source
    version = egress_at(egress).version
    if version == 0 or (version == 4 and not is_mapped(f.peer_high, f.peer_low)):
        return 0
    return egress


@engine_function
def _put_headers(wire, egress, frame, nbytes):
    """Write the headers of a packet of `nbytes`, and append its ICRC. Return the bytes of the headers."""
    w, e, f = ethernet_wire_at(wire), egress_at(egress), frame_at(frame)
    h = w.headers
    _put_mac(h + ETHERNET.destination, e.mac)
    _put_mac(h + ETHERNET.source, w.mac)
    ip = h + ETHERNET.size
    length = UDP.size + nbytes + ICRC_SIZE
    if e.version == 4:
        st16(h + ETHERNET.ether_type, be16(ETHER_TYPE_IPV4))
        put_ipv4(ip, e.gid_low, f.peer_low, length)
        udp = ip + IPV4.size
    else:
        st16(h + ETHERNET.ether_type, be16(ETHER_TYPE_IPV6))
        put_ipv6(ip, e.gid_high, e.gid_low, f.peer_high, f.peer_low, length)
        udp = ip + IPV6.size
    st16(udp + UDP.source_port, be16(e.port))
    st16(udp + UDP.destination_port, be16(ROCE_UDP_PORT))
    st16(udp + UDP.length, be16(length))
    st16(udp + UDP.checksum, 0)  # the ICRC protects more (annex A17.4.5)
    seal(
        frame, nbytes,
        header_crc(w.scratch, e.version, e.gid_high, e.gid_low, f.peer_high, f.peer_low, e.port, nbytes), 0,
    )  # fmt: skip
    return udp + UDP.size - h


@device_function
def _put_mac(at, mac):
    """Store a MAC, which is a load of its 6 bytes."""
    st32(at, mac)
    st16(at + 4, mac >> 32)


@engine_function
def _send(wire, head, head_bytes, body, body_bytes, to, now):
    """Hand a frame in two pieces to the kernel. Return _SENT, _BLOCKED if there is no room, or _DROPPED."""
    w = ethernet_wire_at(wire)
    if w.gone != 0:
        return _DROPPED
    first = w.pieces + MMSGHDR.size
    _describe(first + IOVEC.size, head, head_bytes)
    _describe(first + 2 * IOVEC.size, body, body_bytes)
    if w.reading == STREAM:
        status = _send_to_stream(w, first, head_bytes + body_bytes)
    elif w.reading == DATAGRAM_SOCKET:
        status = _send_datagram(w)
    else:
        status = _write(w, first + IOVEC.size)
    if to != 0 and status == _SENT:
        capture_frame(to, head, head_bytes, body, body_bytes, now, 1)
    return status


@device_function
def _describe(piece, base, nbytes):
    p = iovec_at(piece)
    p.base, p.nbytes = base, nbytes


@device_function
def _write(w, pieces):
    """Write a frame at once."""
    while writev(w.fd, pieces, 2) < 0:
        error = errno()
        if error == EAGAIN:
            return _BLOCKED
        if error != EINTR:
            w.tx_error = error
            return _DROPPED
    return _SENT


@device_function
def _send_datagram(w):
    """Send a frame to the other end's address. What nobody is there to take is lost, as on a cable."""
    while sendmsg(w.fd, w.pieces, MSG_DONTWAIT | MSG_NOSIGNAL) < 0:
        error = errno()
        if error == EAGAIN:
            return _BLOCKED
        if error != EINTR:
            w.tx_error = error
            return _DROPPED
    return _SENT


@device_function
def _send_to_stream(w, pieces, nbytes):
    """Send a frame behind its length. What does not leave at once is kept, and leaves before anything else."""
    st32(w.rest, be32(nbytes))
    _describe(pieces, w.rest, LENGTH)
    sent = sendmsg(w.fd, w.pieces, MSG_DONTWAIT | MSG_NOSIGNAL)
    if sent < 0:
        error = errno()
        if error == EAGAIN or error == EINTR:
            return _BLOCKED
        w.tx_error = error
        lose(w)
        return _DROPPED
    if sent < LENGTH + nbytes:
        at = LENGTH  # the length is in its place
        for i in range(1, 3):
            p = iovec_at(pieces + IOVEC.size * i)
            copy(w.rest + at, p.base, p.nbytes)
            at += p.nbytes
        w.rest_at, w.rest_end = sent, at
    return _SENT


@device_function
def _send_rest(w):
    """Send what is left of a frame."""
    while w.rest_at < w.rest_end and w.gone == 0:
        sent = send(w.fd, w.rest + w.rest_at, w.rest_end - w.rest_at, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < 0:
            error = errno()
            if error == EAGAIN or error == EINTR:
                return _BLOCKED
            lose(w)
        else:
            w.rest_at += sent
    return _SENT
