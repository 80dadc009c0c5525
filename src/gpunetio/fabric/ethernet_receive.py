"""The receive path of an Ethernet wire: frames from its descriptor, a TAP device or a socket. Callers interpret them.

The kernel delivers some frames in the form that it gives to hardware: without a checksum, or with many segments in one.
They are completed here (offloads.py), so that callers get frames as they look on a network.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, ld8, ld16, ld32, ld64, st8, st16, st32, st64
from ..formats.packet import ETHER_TYPE_VLAN, ETHERNET, VLAN_TAG
from .ethernet_records import (
    ARRIVED, AUXDATA, BATCH, CONTROL_ROOM, FILE, LENGTH, LONGEST, MOST_WAITING, PACKET_AUXDATA, PIPE, READ_ROOM,
    SOL_PACKET, STATUS_VLAN_TPID_VALID, STATUS_VLAN_VALID, STREAM, STREAM_ROOM, arrived_at, ethernet_wire_at, read,
    recv, send,
)
from .frames import PACKET, consume, next_frame, pipe_end_at, release
from .neighbours import GONE
from .offloads import begin_cutting, cut, finish_checksum, is_large, large_frame_at, move_start, offload_of
from .udp_records import (
    CMSGHDR, EAGAIN, EINTR, MMSGHDR, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_TRUNC, errno, iovec_at, mmsghdr_at, recvmmsg,
)
from ..jit.struct_view import Struct


@engine_function
def receive_frames(wire: int) -> int:
    """Take a batch of frames. Return how many of the ARRIVED records at `first` are valid until the next call.

    `more` becomes 1 if more frames may wait.
    """
    w = ethernet_wire_at(wire)
    if w.read_at == w.read_end and not _is_cutting(w):
        w.read_at, w.read_end = 0, _read(w)
    count = _cut(w) if _is_cutting(w) else _hand_out(w)
    enough = 1 if w.reading == STREAM else BATCH  # a stream is empty only if a read finds nothing
    w.more = 1 if w.read_at < w.read_end or _is_cutting(w) or w.read_end >= enough else 0
    w.position += count
    if w.more == 0 and w.marked != 0:
        w.marked = 0
        w.position += MOST_WAITING
    return count


@device_function
def _is_cutting(w: Struct) -> bool:
    g = large_frame_at(w.cutting)
    return g.next < g.count


@device_function
def _hand_out(w: Struct) -> int:
    """Hand out frames that were read, up to a large one. If the first is large, hand out its first segments."""
    begin = w.read_at
    w.first = w.arrived + ARRIVED.size * begin
    while w.read_at < w.read_end:
        a = arrived_at(w.arrived + ARRIVED.size * w.read_at)
        if is_large(a.offload):
            if w.read_at > begin:
                break
            w.read_at += 1
            if begin_cutting(w.cutting, a.frame, a.nbytes, a.offload):
                return _cut(w)
            a.cut = 1
            break
        if a.offload != 0 and finish_checksum(a.frame, a.nbytes, a.offload) == 0:
            a.cut = 1
        w.read_at += 1
    return w.read_at - begin


@device_function
def _cut(w: Struct) -> int:
    """Hand out the next segments of a large frame."""
    w.first = w.segments
    count = 0
    while count < BATCH and _is_cutting(w):
        a = arrived_at(w.segments + ARRIVED.size * count)
        a.nbytes = cut(w.cutting, a.frame)
        count += 1
    return count


@device_function
def _read(w: Struct) -> int:
    if w.gone != 0:
        return 0
    if w.reading == FILE:
        return _read_file(w)
    if w.reading == STREAM:
        return _read_stream(w)
    if w.reading == PIPE:
        return _read_pipe(w)
    return _read_socket(w)


@device_function
def _read_pipe(w: Struct) -> int:
    """Take up to `credit` frames of a pipe in place. The next call gives their room back."""
    release(w.rx)
    count = 0
    while count < min(BATCH, w.credit):
        place = next_frame(w.rx)
        if place <= 0:
            break
        a = arrived_at(w.arrived + ARRIVED.size * count)
        a.frame, a.nbytes, a.cut = place + PACKET, pipe_end_at(w.rx).nbytes, 0
        consume(w.rx)
        count += 1
    w.credit -= count
    return count


@device_function
def _read_file(w: Struct) -> int:
    count = 0
    while count < BATCH:
        a = arrived_at(w.arrived + ARRIVED.size * count)
        nbytes = read(w.fd, a.frame - w.virtio, READ_ROOM) - w.virtio
        if nbytes <= 0:
            error = errno()
            if nbytes == -w.virtio or (error != EAGAIN and error != EINTR):
                lose(w)
            break
        a.nbytes, a.cut = nbytes, 0
        if w.virtio != 0:
            a.offload = offload_of(a.frame - w.virtio)
        count += 1
    return count


@device_function
def lose(w: Struct) -> None:
    """Note that the other end is gone, and wake the thread. If the socket is full, the frames in it wake it."""
    w.gone = 1
    send(w.thread, w.scratch, GONE, MSG_DONTWAIT | MSG_NOSIGNAL)


@device_function
def _read_socket(w: Struct) -> int:
    """Take a batch of frames from a packet socket or a datagram socket."""
    count = recvmmsg(w.fd, w.vector, BATCH, MSG_DONTWAIT, 0)
    for i in range(count):  # -1 is EAGAIN, or ENETDOWN, which is reported once
        header = w.vector + MMSGHDR.size * i
        h = mmsghdr_at(header)
        a = arrived_at(w.arrived + ARRIVED.size * i)
        a.frame = iovec_at(h.iov).base + w.virtio
        a.nbytes, a.cut = ld32(header + MMSGHDR.nbytes) - w.virtio, h.flags & MSG_TRUNC
        if w.virtio != 0:
            a.offload = offload_of(a.frame - w.virtio)
        if _has_vlan_tag(h):
            _put_tag_back(a, h.control + CMSGHDR.size)
        h.control_length = CONTROL_ROOM
    return max(count, 0)


@device_function
def _read_stream(w: Struct) -> int:
    """Take the complete frames of a stream. If there are none, read more."""
    count = _split(w)
    if count != 0 or w.gone != 0:
        return count
    for i in range(w.end - w.begin):  # a frame whose end was not read yet
        st8(w.buffer + i, ld8(w.buffer + w.begin + i))
    w.end -= w.begin
    w.begin = 0
    nbytes = recv(w.fd, w.buffer + w.end, STREAM_ROOM - w.end, MSG_DONTWAIT)
    if nbytes <= 0:
        error = errno()
        if nbytes == 0 or (error != EAGAIN and error != EINTR):
            lose(w)
        return 0
    w.end += nbytes
    return _split(w)


@device_function
def _split(w: Struct) -> int:
    """Split the bytes that were read from a stream into frames. A length that no frame can have ends the connection."""
    count = 0
    while count < BATCH and w.end - w.begin >= LENGTH:
        nbytes = be32(ld32(w.buffer + w.begin))
        if nbytes > LONGEST:
            lose(w)
            break
        if w.end - w.begin < LENGTH + nbytes:
            break
        a = arrived_at(w.arrived + ARRIVED.size * count)
        a.frame, a.nbytes, a.cut = w.buffer + w.begin + LENGTH, nbytes, 0
        w.begin += LENGTH + nbytes
        count += 1
    return count


@device_function
def _has_vlan_tag(h: Struct) -> int:
    """Return whether the kernel has removed a VLAN tag from the frame of a message."""
    if h.control_length < CMSGHDR.size + AUXDATA.size:
        return 0
    if ld32(h.control + CMSGHDR.level) != SOL_PACKET or ld32(h.control + CMSGHDR.type) != PACKET_AUXDATA:
        return 0
    return ld32(h.control + CMSGHDR.size + AUXDATA.status) & STATUS_VLAN_VALID


@device_function
def _put_tag_back(a: Struct, auxdata: int) -> None:
    """Put back the VLAN tag that the kernel has removed from a frame. There is room before the frame."""
    macs, rest = ld64(a.frame), ld32(a.frame + 8)
    a.frame -= VLAN_TAG.size
    a.nbytes += VLAN_TAG.size
    a.offload = move_start(a.offload, VLAN_TAG.size)
    st64(a.frame, macs)
    st32(a.frame + 8, rest)
    told = ld32(auxdata + AUXDATA.status) & STATUS_VLAN_TPID_VALID
    kind = ld16(auxdata + AUXDATA.vlan_tpid) if told else ETHER_TYPE_VLAN
    st16(a.frame + ETHERNET.ether_type, be16(kind))
    st16(a.frame + ETHERNET.size, be16(ld16(auxdata + AUXDATA.vlan_tci)))


@device_function
def mark_frames(wire: int) -> int:
    """Return a `position`: frames at or after it arrived after this call. Some later frames get a lower position."""
    w = ethernet_wire_at(wire)
    w.marked = 1
    return w.position + MOST_WAITING
