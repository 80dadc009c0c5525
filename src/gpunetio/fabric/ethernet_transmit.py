"""The send path of an Ethernet wire: frames to its descriptor. Packets of queue pairs get their headers here.

A socket takes many frames per call.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, copy, st16, st32
from ..formats.packet import BTH, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHERNET, ICRC_SIZE, IPV4, IPV6, ROCE_UDP_PORT, UDP
from .capture import capture_frame
from .ethernet_receive import lose
from .ethernet_records import (
    EGRESS, EGRESSES, FILE, LENGTH, PIPE, SEND_SLOT, SENDING, STREAM, egress_at, ethernet_wire_at, send, send_slot_at,
    sendmsg, write, writev,
)
from .frames import (
    ETHERNET_FRAME, PACKET, class_of, consume, egress_of, frame_at, hop_limit_of, label_of, next_frame, pipe_end_at,
    release,
)
from .icrc import header_crc
from .ip_headers import put_ipv4, put_ipv6
from .udp_records import (
    EAGAIN, EINTR, IOVEC, MAX_MESSAGE, MMSGHDR, MSG_DONTWAIT, MSG_NOSIGNAL, errno, iovec_at, is_mapped, mmsghdr_at,
    sendmmsg,
)
from .udp_transmit import flip, seal
from ..jit.struct_view import Struct

TX_FRAMES = 256  # packets per `transmit`, so that the caller can also receive
_SENT, _BLOCKED, _NONSENSE = 1, 0, -1


@engine_function
def transmit_frames(wire: int, capture: int, now: int) -> int:
    """Send the waiting frames. Return how many packets were sent, or -1 if the pipe holds invalid data.

    Frames for which the descriptor has no room stay in the pipe. A packet that cannot be sent at all is dropped and
    counted. `capture` is the address of a CAPTURE, or 0; `now` is the time to record there.
    """
    w = ethernet_wire_at(wire)
    if _send_rest(w) == _BLOCKED or _transmit(wire, w.replies, capture, now) == _BLOCKED:
        return 0
    before = w.tx_frames
    if _transmit(wire, w.tx, capture, now) == _NONSENSE:
        return -1
    return w.tx_frames - before


@engine_function
def _transmit(wire: int, end: int, capture: int, now: int) -> int:
    """Send up to TX_FRAMES frames of a pipe. Return _SENT, _BLOCKED, or _NONSENSE."""
    w = ethernet_wire_at(wire)
    taken = 0
    while taken < TX_FRAMES:
        count = _gather(wire, end)
        if count < 0:
            return _NONSENSE
        done = _hand_over(w, count, capture, now) if count != 0 else 0
        if done < count:
            e = pipe_end_at(end)
            e.position, e.reserved = send_slot_at(_slot(w, done)).position, 0
        release(end)
        if done < count or w.rest_at < w.rest_end:
            return _BLOCKED
        if count == 0:
            break
        taken += count
    return _SENT


@device_function
def _slot(w: Struct, i: int) -> int:
    return w.sending + SEND_SLOT.size * i


@engine_function
def _gather(wire: int, end: int) -> int:
    """Describe up to SENDING frames of a pipe in slots, for the kernel. Return how many, or -1 if the pipe is invalid.
    """
    w = ethernet_wire_at(wire)
    count = 0
    while count < SENDING:
        frame = next_frame(end)
        if frame < 0 and count == 0:
            return -1
        if frame <= 0:
            break
        slot = _slot(w, count)
        send_slot_at(slot).position = pipe_end_at(end).position
        if _describe(wire, frame, slot, mmsghdr_at(w.messages + MMSGHDR.size * count)):
            count += 1
        elif count == 0:
            w.tx_dropped += 1
        else:  # dropped once the frames before it are sent
            break
        consume(end)
    return count


@device_function
def _describe(wire: int, frame: int, slot: int, message: Struct) -> int:
    """Describe a frame in a slot and its message. Return 0 if it cannot be sent."""
    w = ethernet_wire_at(wire)
    f = frame_at(frame)
    pieces = slot + SEND_SLOT.iov
    head, body = iovec_at(pieces + IOVEC.size), iovec_at(pieces + 2 * IOVEC.size)
    if f.reference == ETHERNET_FRAME:
        _damage(frame)
        head.base, head.nbytes, body.nbytes = frame + PACKET - w.virtio, w.virtio + f.nbytes, 0
        message.iov_length = 1
    else:
        egress = _egress_of(wire, frame)
        if egress == 0:
            return 0
        headers = slot + SEND_SLOT.headers
        head.base = headers - w.virtio
        head.nbytes = w.virtio + _put_headers(wire, egress, frame, f.nbytes, headers)
        body.base, body.nbytes = frame + PACKET, f.nbytes + ICRC_SIZE
        message.iov_length = 2
    if w.reading == STREAM:
        first = iovec_at(pieces)
        st32(slot + SEND_SLOT.headers - LENGTH, be32(head.nbytes + body.nbytes))
        first.base, first.nbytes = slot + SEND_SLOT.headers - LENGTH, LENGTH
        message.iov_length += 1
    return 1


@device_function
def _damage(frame: int) -> None:
    """Apply the damage that the fault injector requests to an Ethernet frame, once."""
    f = frame_at(frame)
    if 0 < f.corrupt <= 8 * f.nbytes:
        flip(frame + PACKET, f.corrupt - 1)
    f.corrupt = 0


@device_function
def _egress_of(wire: int, frame: int) -> int:
    """Return the EGRESS of a packet, or 0 when it cannot be sent."""
    w, f = ethernet_wire_at(wire), frame_at(frame)
    if egress_of(f.source) >= EGRESSES or f.nbytes < BTH.size or f.nbytes + ICRC_SIZE > MAX_MESSAGE:
        return 0
    egress = w.egresses + EGRESS.size * egress_of(f.source)
    version = egress_at(egress).version
    if version == 0 or (version == 4 and not is_mapped(f.peer_high, f.peer_low)):
        return 0
    return egress


@engine_function
def _put_headers(wire: int, egress: int, frame: int, nbytes: int, h: int) -> int:
    """Write the headers of a packet of `nbytes` to `h`, and append its ICRC. Return the length of the headers."""
    w, e, f = ethernet_wire_at(wire), egress_at(egress), frame_at(frame)
    _put_mac(h + ETHERNET.destination, e.mac)
    _put_mac(h + ETHERNET.source, w.mac)
    ip = h + ETHERNET.size
    length = UDP.size + nbytes + ICRC_SIZE
    if e.version == 4:
        st16(h + ETHERNET.ether_type, be16(ETHER_TYPE_IPV4))
        put_ipv4(ip, e.gid_low, f.peer_low, length, class_of(f.source), hop_limit_of(f.source))
        udp = ip + IPV4.size
    else:
        st16(h + ETHERNET.ether_type, be16(ETHER_TYPE_IPV6))
        put_ipv6(
            ip, e.gid_high, e.gid_low, f.peer_high, f.peer_low, length,
            class_of(f.source), hop_limit_of(f.source), label_of(f.source),
        )
        udp = ip + IPV6.size
    st16(udp + UDP.source_port, be16(e.port))
    st16(udp + UDP.destination_port, be16(ROCE_UDP_PORT))
    st16(udp + UDP.length, be16(length))
    st16(udp + UDP.checksum, 0)  # the ICRC protects more (annex A17.4.5)
    seal(
        frame, nbytes,
        header_crc(w.scratch, e.version, e.gid_high, e.gid_low, f.peer_high, f.peer_low, e.port, nbytes), 0,
    )
    return udp + UDP.size - h


@device_function
def _put_mac(at: int, mac: int) -> None:
    """Store a MAC, given as a native load of its 6 bytes."""
    st32(at, mac)
    st16(at + 4, mac >> 32)


@engine_function
def _hand_over(w: Struct, count: int, capture: int, now: int) -> int:
    """Hand the frames in the slots to the kernel. Return how many are finished: sent, or impossible to send."""
    done = 0
    while done < count and w.rest_at >= w.rest_end:
        if w.gone != 0:
            w.tx_dropped += count - done
            return count
        sent = _send(w, done, count - done)
        if sent > 0:
            if capture != 0:
                for i in range(done, done + sent):
                    _capture(w, i, capture, now)
            w.tx_frames += sent
            done += sent
            continue
        error = errno()
        if error == EAGAIN:
            break
        if error != EINTR:
            w.tx_error = error
            if w.reading == STREAM:
                lose(w)
            w.tx_dropped += 1
            done += 1
    return done


@device_function
def _send(w: Struct, first: int, count: int) -> int:
    """Send frames from the slot `first` on. Return how many were sent, or -1."""
    slot, message = _slot(w, first), w.messages + MMSGHDR.size * first
    if w.reading == FILE or w.reading == PIPE:
        return _write(w, mmsghdr_at(message))
    if w.reading == STREAM:
        return _send_to_stream(w, slot, message)
    return sendmmsg(w.fd, message, count, MSG_DONTWAIT | MSG_NOSIGNAL)


@device_function
def _write(w: Struct, message: Struct) -> int:
    """Write one frame. A `write` of one piece takes a fifth less time than a `writev`."""
    if message.iov_length == 1:
        head = iovec_at(message.iov)
        return 1 if write(w.fd, head.base, head.nbytes) >= 0 else -1
    return 1 if writev(w.fd, message.iov, message.iov_length) >= 0 else -1


@device_function
def _capture(w: Struct, i: int, capture: int, now: int) -> None:
    """Capture a frame that was sent, without the kernel's header before it."""
    pieces = _slot(w, i) + SEND_SLOT.iov
    head, body = iovec_at(pieces + IOVEC.size), iovec_at(pieces + 2 * IOVEC.size)
    capture_frame(capture, head.base + w.virtio, head.nbytes - w.virtio, body.base, body.nbytes, now, 1)


@device_function
def _send_to_stream(w: Struct, slot: int, message: int) -> int:
    """Send a frame after its length. Keep what the stream does not take, to be sent before anything else."""
    sent = sendmsg(w.fd, message, MSG_DONTWAIT | MSG_NOSIGNAL)
    if sent < 0:
        return -1
    at = 0
    for i in range(mmsghdr_at(message).iov_length):
        p = iovec_at(slot + SEND_SLOT.iov + IOVEC.size * i)
        if sent < at + p.nbytes:
            copy(w.rest + at, p.base, p.nbytes)
        at += p.nbytes
    if sent < at:
        w.rest_at, w.rest_end = sent, at
    return 1


@device_function
def _send_rest(w: Struct) -> int:
    """Send the rest of a frame that was sent in part."""
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
