"""The receive path of an Ethernet wire: frames from its descriptor, a TAP device or a socket. Callers interpret them.

The kernel delivers some frames in the form that it gives to hardware: without a checksum, or with many segments in one.
They are completed here (offloads.py), so that callers get frames as they look on a network.
"""

from __future__ import annotations

from ..formats.packet import ETHERNET, ETHER_TYPE_VLAN, VLAN_TAG
from ..jit.compile import device_function, engine_function
from ..jit.ops import be16, be32, ld16, ld32, ld64, ld8, st16, st32, st64, st8
from .ethernet_records import (
    ARRIVED, AUXDATA, BATCH, CONTROL_ROOM, FILE, LENGTH, LONGEST, MOST_WAITING, PACKET_AUXDATA, PIPE, READ_ROOM,
    SOL_PACKET, STATUS_VLAN_TPID_VALID, STATUS_VLAN_VALID, STREAM, STREAM_ROOM, Arrived, EthernetEnd, read, recv, send,
)
from .frames import PACKET, PipeEnd, consume, next_frame, release
from .neighbours import GONE
from .offloads import LargeFrame, begin_cutting, cut, finish_checksum, is_large, move_start, offload_of
from .udp_records import (
    CMSGHDR, EAGAIN, EINTR, MMSGHDR, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_TRUNC, IoVec, MmsgHdr, errno, recvmmsg,
)


@engine_function
def receive_frames(ethernet: EthernetEnd) -> int:
    """Take a batch of frames. Return how many of the ARRIVED records at `first` are valid until the next call.

    `more` becomes 1 if more frames may wait.
    """
    if ethernet.read_at == ethernet.read_end and not _is_cutting(ethernet):
        ethernet.read_at, ethernet.read_end = 0, _read(ethernet)
    count = _cut(ethernet) if _is_cutting(ethernet) else _hand_out(ethernet)
    enough = 1 if ethernet.reading == STREAM else BATCH  # a stream is empty only if a read finds nothing
    is_left = ethernet.read_at < ethernet.read_end or _is_cutting(ethernet)
    ethernet.more = 1 if is_left or ethernet.read_end >= enough else 0
    ethernet.position += count
    if ethernet.more == 0 and ethernet.marked != 0:
        ethernet.marked = 0
        ethernet.position += MOST_WAITING
    return count


@device_function
def _is_cutting(ethernet: EthernetEnd) -> bool:
    large = LargeFrame(ethernet.cutting)
    return large.next < large.count


@device_function
def _hand_out(ethernet: EthernetEnd) -> int:
    """Hand out frames that were read, up to a large one. If the first is large, hand out its first segments."""
    begin = ethernet.read_at
    ethernet.first = ethernet.arrived + ARRIVED.size * begin
    while ethernet.read_at < ethernet.read_end:
        arrived = Arrived(ethernet.arrived + ARRIVED.size * ethernet.read_at)
        if is_large(arrived.offload):
            if ethernet.read_at > begin:
                break
            ethernet.read_at += 1
            if begin_cutting(LargeFrame(ethernet.cutting), arrived.frame, arrived.nbytes, arrived.offload):
                return _cut(ethernet)
            arrived.cut = 1
            break
        if arrived.offload != 0 and finish_checksum(arrived.frame, arrived.nbytes, arrived.offload) == 0:
            arrived.cut = 1
        ethernet.read_at += 1
    return ethernet.read_at - begin


@device_function
def _cut(ethernet: EthernetEnd) -> int:
    """Hand out the next segments of a large frame."""
    ethernet.first = ethernet.segments
    count = 0
    while count < BATCH and _is_cutting(ethernet):
        arrived = Arrived(ethernet.segments + ARRIVED.size * count)
        arrived.nbytes = cut(LargeFrame(ethernet.cutting), arrived.frame)
        count += 1
    return count


@device_function
def _read(ethernet: EthernetEnd) -> int:
    if ethernet.gone != 0:
        return 0
    if ethernet.reading == FILE:
        return _read_file(ethernet)
    if ethernet.reading == STREAM:
        return _read_stream(ethernet)
    if ethernet.reading == PIPE:
        return _read_pipe(ethernet)
    return _read_socket(ethernet)


@device_function
def _read_pipe(ethernet: EthernetEnd) -> int:
    """Take up to `credit` frames of a pipe in place. The next call gives their room back."""
    release(PipeEnd(ethernet.rx))
    count = 0
    while count < min(BATCH, ethernet.credit):
        place = next_frame(PipeEnd(ethernet.rx))
        if place <= 0:
            break
        arrived = Arrived(ethernet.arrived + ARRIVED.size * count)
        arrived.frame, arrived.nbytes, arrived.cut = place + PACKET, PipeEnd(ethernet.rx).nbytes, 0
        consume(PipeEnd(ethernet.rx))
        count += 1
    ethernet.credit -= count
    return count


@device_function
def _read_file(ethernet: EthernetEnd) -> int:
    count = 0
    while count < BATCH:
        arrived = Arrived(ethernet.arrived + ARRIVED.size * count)
        nbytes = read(ethernet.fd, arrived.frame - ethernet.virtio, READ_ROOM) - ethernet.virtio
        if nbytes <= 0:
            error = errno()
            if nbytes == -ethernet.virtio or (error != EAGAIN and error != EINTR):
                lose(ethernet)
            break
        arrived.nbytes, arrived.cut = nbytes, 0
        if ethernet.virtio != 0:
            arrived.offload = offload_of(arrived.frame - ethernet.virtio)
        count += 1
    return count


@device_function
def lose(ethernet: EthernetEnd) -> None:
    """Note that the other end is gone, and wake the thread. If the socket is full, the frames in it wake it."""
    ethernet.gone = 1
    send(ethernet.thread, ethernet.scratch, GONE, MSG_DONTWAIT | MSG_NOSIGNAL)


@device_function
def _read_socket(ethernet: EthernetEnd) -> int:
    """Take a batch of frames from a packet socket or a datagram socket."""
    count = recvmmsg(ethernet.fd, ethernet.vector, BATCH, MSG_DONTWAIT, 0)
    for i in range(count):  # -1 is EAGAIN, or ENETDOWN, which is reported once
        header = MmsgHdr(ethernet.vector + MMSGHDR.size * i)
        arrived = Arrived(ethernet.arrived + ARRIVED.size * i)
        arrived.frame = IoVec(header.iov).base + ethernet.virtio
        arrived.nbytes, arrived.cut = ld32(header + MMSGHDR.nbytes) - ethernet.virtio, header.flags & MSG_TRUNC
        if ethernet.virtio != 0:
            arrived.offload = offload_of(arrived.frame - ethernet.virtio)
        if _has_vlan_tag(header):
            _put_tag_back(arrived, header.control + CMSGHDR.size)
        header.control_length = CONTROL_ROOM
    return max(count, 0)


@device_function
def _read_stream(ethernet: EthernetEnd) -> int:
    """Take the complete frames of a stream. If there are none, read more."""
    count = _split(ethernet)
    if count != 0 or ethernet.gone != 0:
        return count
    for i in range(ethernet.end - ethernet.begin):  # a frame whose end was not read yet
        st8(ethernet.buffer + i, ld8(ethernet.buffer + ethernet.begin + i))
    ethernet.end -= ethernet.begin
    ethernet.begin = 0
    nbytes = recv(ethernet.fd, ethernet.buffer + ethernet.end, STREAM_ROOM - ethernet.end, MSG_DONTWAIT)
    if nbytes <= 0:
        error = errno()
        if nbytes == 0 or (error != EAGAIN and error != EINTR):
            lose(ethernet)
        return 0
    ethernet.end += nbytes
    return _split(ethernet)


@device_function
def _split(ethernet: EthernetEnd) -> int:
    """Split the bytes that were read from a stream into frames. A length that no frame can have ends the connection."""
    count = 0
    while count < BATCH and ethernet.end - ethernet.begin >= LENGTH:
        nbytes = be32(ld32(ethernet.buffer + ethernet.begin))
        if nbytes > LONGEST:
            lose(ethernet)
            break
        if ethernet.end - ethernet.begin < LENGTH + nbytes:
            break
        arrived = Arrived(ethernet.arrived + ARRIVED.size * count)
        arrived.frame, arrived.nbytes, arrived.cut = ethernet.buffer + ethernet.begin + LENGTH, nbytes, 0
        ethernet.begin += LENGTH + nbytes
        count += 1
    return count


@device_function
def _has_vlan_tag(header: MmsgHdr) -> int:
    """Return whether the kernel has removed a VLAN tag from the frame of a message."""
    if header.control_length < CMSGHDR.size + AUXDATA.size:
        return 0
    if ld32(header.control + CMSGHDR.level) != SOL_PACKET or ld32(header.control + CMSGHDR.type) != PACKET_AUXDATA:
        return 0
    return ld32(header.control + CMSGHDR.size + AUXDATA.status) & STATUS_VLAN_VALID


@device_function
def _put_tag_back(arrived: Arrived, auxdata: int) -> None:
    """Put back the VLAN tag that the kernel has removed from a frame. There is room before the frame."""
    macs, rest = ld64(arrived.frame), ld32(arrived.frame + 8)
    arrived.frame -= VLAN_TAG.size
    arrived.nbytes += VLAN_TAG.size
    arrived.offload = move_start(arrived.offload, VLAN_TAG.size)
    st64(arrived.frame, macs)
    st32(arrived.frame + 8, rest)
    told = ld32(auxdata + AUXDATA.status) & STATUS_VLAN_TPID_VALID
    kind = ld16(auxdata + AUXDATA.vlan_tpid) if told else ETHER_TYPE_VLAN
    st16(arrived.frame + ETHERNET.ether_type, be16(kind))
    st16(arrived.frame + ETHERNET.size, be16(ld16(auxdata + AUXDATA.vlan_tci)))


@device_function
def mark_frames(ethernet: EthernetEnd) -> int:
    """Return a `position`: frames at or after it arrived after this call. Some later frames get a lower position."""
    ethernet.marked = 1
    return ethernet.position + MOST_WAITING
