"""The send path of an Ethernet wire: frames to its descriptor. Packets of queue pairs get their headers here.

A socket takes many frames per call.
"""

from __future__ import annotations

from ..formats.packet import BTH, ETHERNET, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ICRC_SIZE, IPV4, IPV6, ROCE_UDP_PORT, UDP
from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, copy, st16, st32
from .capture import CaptureRing, capture_frame
from .ethernet_receive import lose
from .ethernet_records import (
    EGRESS, EGRESSES, FILE, LENGTH, PIPE, SENDING, SEND_SLOT, STREAM, Egress, EthernetEnd, SendSlot, send, sendmsg,
    write, writev,
)
from .frames import (
    ETHERNET_FRAME, PACKET, Frame, PipeEnd, class_of, consume, egress_of, hop_limit_of, label_of, next_frame, release,
)
from .icrc import header_crc
from .ip_headers import put_ipv4, put_ipv6
from .udp_records import (
    EAGAIN, EINTR, IOVEC, MAX_MESSAGE, MMSGHDR, MSG_DONTWAIT, MSG_NOSIGNAL, IoVec, MmsgHdr, errno, is_mapped, sendmmsg,
)
from .udp_transmit import flip, seal

TX_FRAMES = 256  # packets per `transmit`, so that the caller can also receive
_SENT, _BLOCKED, _NONSENSE = 1, 0, -1


@engine_function
def transmit_frames(ethernet: EthernetEnd, capture: CaptureRing, now: int) -> int:
    """Send the waiting frames. Return how many packets were sent, or -1 if the pipe holds invalid data.

    Frames for which the descriptor has no room stay in the pipe. A packet that cannot be sent at all is dropped and
    counted. `capture` is the address of a CAPTURE, or 0; `now` is the time to record there.
    """
    if _send_rest(ethernet) == _BLOCKED or _transmit(ethernet, PipeEnd(ethernet.replies), capture, now) == _BLOCKED:
        return 0
    before = ethernet.tx_frames
    if _transmit(ethernet, PipeEnd(ethernet.tx), capture, now) == _NONSENSE:
        return -1
    return ethernet.tx_frames - before


@engine_function
def _transmit(ethernet: EthernetEnd, end: PipeEnd, capture: CaptureRing, now: int) -> int:
    """Send up to TX_FRAMES frames of a pipe. Return _SENT, _BLOCKED, or _NONSENSE."""
    taken = 0
    while taken < TX_FRAMES:
        count = _gather(ethernet, end)
        if count < 0:
            return _NONSENSE
        done = _hand_over(ethernet, count, capture, now) if count != 0 else 0
        if done < count:
            end.position, end.reserved = SendSlot(_slot(ethernet, done)).position, 0
        release(end)
        if done < count or ethernet.rest_at < ethernet.rest_end:
            return _BLOCKED
        if count == 0:
            break
        taken += count
    return _SENT


@device_function
def _slot(ethernet: EthernetEnd, i: int) -> int:
    return ethernet.sending + SEND_SLOT.size * i


@engine_function
def _gather(ethernet: EthernetEnd, end: PipeEnd) -> int:
    """Describe up to SENDING frames of a pipe in slots, for the kernel. Return how many, or -1 if the pipe is invalid.
    """
    count = 0
    while count < SENDING:
        frame = Frame(next_frame(end))
        if frame < 0 and count == 0:
            return -1
        if frame <= 0:
            break
        slot = SendSlot(_slot(ethernet, count))
        slot.position = end.position
        if _describe(ethernet, frame, slot, MmsgHdr(ethernet.messages + MMSGHDR.size * count)):
            count += 1
        elif count == 0:
            ethernet.tx_dropped += 1
        else:  # dropped once the frames before it are sent
            break
        consume(end)
    return count


@device_function
def _describe(ethernet: EthernetEnd, frame: Frame, slot: int, header: MmsgHdr) -> int:
    """Describe a frame in a slot and its message. Return 0 if it cannot be sent."""
    pieces = IoVec(slot + SEND_SLOT.iov)
    head, body = IoVec(pieces + IOVEC.size), IoVec(pieces + 2 * IOVEC.size)
    if frame.reference == ETHERNET_FRAME:
        _damage(frame)
        head.base, head.nbytes, body.nbytes = frame + PACKET - ethernet.virtio, ethernet.virtio + frame.nbytes, 0
        header.iov_length = 1
    else:
        egress = Egress(_egress_of(ethernet, frame))
        if egress == 0:
            return 0
        headers = slot + SEND_SLOT.headers
        head.base = headers - ethernet.virtio
        head.nbytes = ethernet.virtio + _put_headers(ethernet, egress, frame, frame.nbytes, headers)
        body.base, body.nbytes = frame + PACKET, frame.nbytes + ICRC_SIZE
        header.iov_length = 2
    if ethernet.reading == STREAM:
        st32(slot + SEND_SLOT.headers - LENGTH, be32(head.nbytes + body.nbytes))
        pieces.base, pieces.nbytes = slot + SEND_SLOT.headers - LENGTH, LENGTH
        header.iov_length += 1
    return 1


@device_function
def _damage(frame: Frame) -> None:
    """Apply the damage that the fault injector requests to an Ethernet frame, once."""
    if 0 < frame.corrupt <= 8 * frame.nbytes:
        flip(frame + PACKET, frame.corrupt - 1)
    frame.corrupt = 0


@device_function
def _egress_of(ethernet: EthernetEnd, frame: Frame) -> int:
    """Return the EGRESS of a packet, or 0 when it cannot be sent."""
    if egress_of(frame.source) >= EGRESSES or frame.nbytes < BTH.size or frame.nbytes + ICRC_SIZE > MAX_MESSAGE:
        return 0
    egress = Egress(ethernet.egresses + EGRESS.size * egress_of(frame.source))
    version = egress.version
    if version == 0 or (version == 4 and not is_mapped(frame.peer_high, frame.peer_low)):
        return 0
    return egress


@engine_function
def _put_headers(ethernet: EthernetEnd, egress: Egress, frame: Frame, nbytes: int, h: int) -> int:
    """Write the headers of a packet of `nbytes` to `h`, and append its ICRC. Return the length of the headers."""
    _put_mac(h + ETHERNET.destination, egress.mac)
    _put_mac(h + ETHERNET.source, ethernet.mac)
    ip = h + ETHERNET.size
    length = UDP.size + nbytes + ICRC_SIZE
    if egress.version == 4:
        st16(h + ETHERNET.ether_type, be16(ETHER_TYPE_IPV4))
        put_ipv4(ip, egress.gid_low, frame.peer_low, length, class_of(frame.source), hop_limit_of(frame.source))
        udp = ip + IPV4.size
    else:
        st16(h + ETHERNET.ether_type, be16(ETHER_TYPE_IPV6))
        put_ipv6(
            ip, egress.gid_high, egress.gid_low, frame.peer_high, frame.peer_low, length,
            class_of(frame.source), hop_limit_of(frame.source), label_of(frame.source),
        )
        udp = ip + IPV6.size
    st16(udp + UDP.source_port, be16(egress.port))
    st16(udp + UDP.destination_port, be16(ROCE_UDP_PORT))
    st16(udp + UDP.length, be16(length))
    st16(udp + UDP.checksum, 0)  # the ICRC protects more (annex A17.4.5)
    seal(
        frame, nbytes,
        header_crc(
            ethernet.scratch, egress.version, egress.gid_high, egress.gid_low, frame.peer_high, frame.peer_low,
            egress.port, nbytes,
        ), 0,
    )
    return udp + UDP.size - h


@device_function
def _put_mac(at: int, mac: int) -> None:
    """Store a MAC, given as a native load of its 6 bytes."""
    st32(at, mac)
    st16(at + 4, mac >> 32)


@engine_function
def _hand_over(ethernet: EthernetEnd, count: int, capture: CaptureRing, now: int) -> int:
    """Hand the frames in the slots to the kernel. Return how many are finished: sent, or impossible to send."""
    done = 0
    while done < count and ethernet.rest_at >= ethernet.rest_end:
        if ethernet.gone != 0:
            ethernet.tx_dropped += count - done
            return count
        sent = _send(ethernet, done, count - done)
        if sent > 0:
            if capture != 0:
                for i in range(done, done + sent):
                    _capture(ethernet, i, capture, now)
            ethernet.tx_frames += sent
            done += sent
            continue
        error = errno()
        if error == EAGAIN:
            break
        if error != EINTR:
            ethernet.tx_error = error
            if ethernet.reading == STREAM:
                lose(ethernet)
            ethernet.tx_dropped += 1
            done += 1
    return done


@device_function
def _send(ethernet: EthernetEnd, first: int, count: int) -> int:
    """Send frames from the slot `first` on. Return how many were sent, or -1."""
    slot, message = _slot(ethernet, first), ethernet.messages + MMSGHDR.size * first
    if ethernet.reading == FILE or ethernet.reading == PIPE:
        return _write(ethernet, MmsgHdr(message))
    if ethernet.reading == STREAM:
        return _send_to_stream(ethernet, slot, MmsgHdr(message))
    return sendmmsg(ethernet.fd, message, count, MSG_DONTWAIT | MSG_NOSIGNAL)


@device_function
def _write(ethernet: EthernetEnd, header: MmsgHdr) -> int:
    """Write one frame. A `write` of one piece takes a fifth less time than a `writev`."""
    if header.iov_length == 1:
        head = IoVec(header.iov)
        return 1 if write(ethernet.fd, head.base, head.nbytes) >= 0 else -1
    return 1 if writev(ethernet.fd, header.iov, header.iov_length) >= 0 else -1


@device_function
def _capture(ethernet: EthernetEnd, i: int, capture: CaptureRing, now: int) -> None:
    """Capture a frame that was sent, without the kernel's header before it."""
    pieces = _slot(ethernet, i) + SEND_SLOT.iov
    head, body = IoVec(pieces + IOVEC.size), IoVec(pieces + 2 * IOVEC.size)
    capture_frame(capture, head.base + ethernet.virtio, head.nbytes - ethernet.virtio, body.base, body.nbytes, now, 1)


@device_function
def _send_to_stream(ethernet: EthernetEnd, slot: int, header: MmsgHdr) -> int:
    """Send a frame after its length. Keep what the stream does not take, to be sent before anything else."""
    sent = sendmsg(ethernet.fd, header, MSG_DONTWAIT | MSG_NOSIGNAL)
    if sent < 0:
        return -1
    at = 0
    for i in range(header.iov_length):
        vector = IoVec(slot + SEND_SLOT.iov + IOVEC.size * i)
        if sent < at + vector.nbytes:
            copy(ethernet.rest + at, vector.base, vector.nbytes)
        at += vector.nbytes
    if sent < at:
        ethernet.rest_at, ethernet.rest_end = sent, at
    return 1


@device_function
def _send_rest(ethernet: EthernetEnd) -> int:
    """Send the rest of a frame that was sent in part."""
    while ethernet.rest_at < ethernet.rest_end and ethernet.gone == 0:
        left = ethernet.rest_end - ethernet.rest_at
        sent = send(ethernet.fd, ethernet.rest + ethernet.rest_at, left, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < 0:
            error = errno()
            if error == EAGAIN or error == EINTR:
                return _BLOCKED
            lose(ethernet)
        else:
            ethernet.rest_at += sent
    return _SENT
