"""TSO: one WQE, whose payload the NIC cuts into TCP segments of `mss` bytes behind the same headers.

A wire to the kernel takes many segments as one frame, as a card does.
"""

from __future__ import annotations

from ...device.checksum import fold, pseudo_sum
from ...fabric.ethernet_records import GSO_ECN, GSO_TCPV4, GSO_TCPV6, NEEDS_CHECKSUM, VIRTIO_NET, VirtioNet
from ...fabric.ip_headers import tag_bytes
from ...fabric.offloads import set_length, set_tcp
from ...formats.packet import ETHERNET, GROUP_MAC, IPV4, IP_PROTOCOL_TCP, TCP, TCP_CWR, TCP_OFFSET_SHIFT
from ...formats.wqe import EthChecksum
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, ld16, ld8, st16
from ..state import refuse
from ..state.ethernet_queues import SqRow
from ..state.flow import Packet
from ..state.message import MESSAGE, Message
from ..state.qp import QpRow
from ..state.wire import WireState
from ..state.worker import WorkerState
from ..steering.parse import PROTOCOL, parse
from .eth_frame import NO_ROOM, SENT, build_frame, leave, write_checksums
from .lan import load_mac

LOG_MAX_TSO = 18  # of the bytes of a TSO's payload
_SHARE = 256  # frames that a TSO may send in a turn, so that one with a tiny MSS does not hold up other queues
_LARGEST = 65535  # bytes of a frame of many segments: what the length of an IPv4 header can say, and less


@device_function
def _at_once(worker: WorkerState, qp: QpRow, head: int, head_bytes: int, mss: int) -> int:
    """Return how many segments may leave as one frame. Faults and captures are of segments."""
    wire = WireState(qp.wire)
    if wire == 0 or wire.segments == 0 or wire.faults != 0 or worker.capture != 0:
        return 1
    mac = load_mac(head)
    if mac == worker.mac or mac & GROUP_MAC:  # it comes back
        return 1
    return max((_LARGEST - head_bytes) // mss, 1)


@engine_function
def _leave_uncut(frame: int, l3: int, l4: int, head_bytes: int, nbytes: int, mss: int) -> None:
    """Write what the kernel has to know of a frame of many segments, whose IP header is complete."""
    ip = frame + l3
    st16(frame + l4 + TCP.checksum, be16(fold(pseudo_sum(ip, IP_PROTOCOL_TCP, nbytes - l4))))
    offload = VirtioNet(frame - VIRTIO_NET.size)
    kind = GSO_TCPV4 if ld8(ip) >> 4 == 4 else GSO_TCPV6
    if be16(ld16(frame + l4 + TCP.offset_flags)) & TCP_CWR:
        kind |= GSO_ECN
    offload.flags, offload.gso_type, offload.header_bytes, offload.gso_bytes = NEEDS_CHECKSUM, kind, head_bytes, mss
    offload.checksum_start, offload.checksum_offset = l4, TCP.checksum


@engine_function
def send_segments(worker: WorkerState, sq: SqRow, head: int, head_bytes: int, mss: int) -> int:
    """Send the segments that were not sent yet, of what the message lists. Return SENT, NO_ROOM, or minus a reason.

    NO_ROOM is also for what is left when the WQE has had its share of the turn.
    """
    payload = Message(worker.message).nbytes
    if payload > 1 << LOG_MAX_TSO:
        return -refuse.too_long_to_send(worker, payload, 1 << LOG_MAX_TSO)
    if mss == 0 or head_bytes < ETHERNET.size + IPV4.size + TCP.size:
        return -refuse.segmentation_headers(worker, mss, head_bytes)
    count = max((payload + mss - 1) // mss, 1)
    most = _at_once(worker, sq, head, head_bytes, mss)
    frames = 0
    while sq.packets < count:
        if frames == _SHARE:
            return NO_ROOM
        offset = sq.packets * mss
        packets = min(count - sq.packets, most)
        nbytes = min(payload - offset, packets * mss)
        total = head_bytes + nbytes
        listed = worker.message + MESSAGE.segments
        frame = build_frame(worker, sq, head, head_bytes, listed, offset, nbytes, 0, min(nbytes, mss))
        if frame <= 0:
            return frame
        l3 = ETHERNET.size + tag_bytes(frame, total)
        set_length(frame, l3, total, sq.packets)
        parse(Packet(worker.packet), frame, total)
        l4 = Packet(worker.packet).l4
        tcp = frame + l4
        whole = l4 != 0 and ld8(worker.packet + PROTOCOL) == IP_PROTOCOL_TCP
        if not whole or l4 + (be16(ld16(tcp + TCP.offset_flags)) >> TCP_OFFSET_SHIFT) * 4 != head_bytes:
            return -refuse.segmentation_headers(worker, mss, head_bytes)
        set_tcp(tcp, offset, sq.packets == 0, sq.packets + packets == count)
        if packets == 1 or frame == worker.frame:  # it comes back if the program has changed its MAC since `_at_once`
            write_checksums(worker, frame, total, EthChecksum.L3 | EthChecksum.L4)
        else:
            write_checksums(worker, frame, total, EthChecksum.L3)
            _leave_uncut(frame, l3, l4, head_bytes, total, mss)
        leave(worker, sq, frame, total, packets, head_bytes)
        sq.packets += packets
        frames += 1
    sq.packets = 0
    return SENT
