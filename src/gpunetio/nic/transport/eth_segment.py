"""TSO: one WQE, whose payload the NIC cuts into TCP segments of `mss` bytes behind the same headers.

A wire to the kernel takes many segments as one frame, as a card does.
"""

from __future__ import annotations

from ...device.checksum import fold, pseudo_sum
from ...fabric.ethernet_records import GSO_ECN, GSO_TCPV4, GSO_TCPV6, NEEDS_CHECKSUM, VIRTIO_NET, virtio_net_at
from ...fabric.ip_headers import tag_bytes
from ...fabric.offloads import set_length, set_tcp
from ...formats.packet import ETHERNET, GROUP_MAC, IP_PROTOCOL_TCP, IPV4, TCP, TCP_CWR, TCP_OFFSET_SHIFT
from ...formats.wqe import EthChecksum
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, ld8, ld16, st16
from ..state import refuse
from ..state.ethernet_queues import sq_row_at
from ..state.flow import packet_at
from ..state.message import MESSAGE, message_at
from ..state.nic import nic_at
from ..state.qp import qp_row_at
from ..state.wire import wire_at
from ..state.worker import worker_at
from ..steering.parse import PROTOCOL, parse
from .eth_frame import NO_ROOM, SENT, build_frame, leave, write_checksums
from .lan import load_mac

LOG_MAX_TSO = 18  # of the bytes of a TSO's payload
_SHARE = 256  # frames that a TSO may send in a turn, so that one with a tiny MSS does not hold up other queues
_LARGEST = 65535  # bytes of a frame of many segments: what the length of an IPv4 header can say, and less


@device_function
def _at_once(nic, row, head, head_bytes, mss):
    """Return how many segments may leave as one frame. Faults and captures are of segments."""
    n = worker_at(nic)
    wire = qp_row_at(row).wire
    if wire == 0 or wire_at(wire).segments == 0 or wire_at(wire).faults != 0 or n.capture != 0:
        return 1
    mac = load_mac(head)
    if mac == nic_at(nic).mac or mac & GROUP_MAC:  # it comes back
        return 1
    return max((_LARGEST - head_bytes) // mss, 1)


@engine_function
def _leave_uncut(frame, l3, l4, head_bytes, nbytes, mss):
    """Write what the kernel has to know of a frame of many segments, whose IP header is complete."""
    ip = frame + l3
    st16(frame + l4 + TCP.checksum, be16(fold(pseudo_sum(ip, IP_PROTOCOL_TCP, nbytes - l4))))
    v = virtio_net_at(frame - VIRTIO_NET.size)
    kind = GSO_TCPV4 if ld8(ip) >> 4 == 4 else GSO_TCPV6
    if be16(ld16(frame + l4 + TCP.offset_flags)) & TCP_CWR:
        kind |= GSO_ECN
    v.flags, v.gso_type, v.header_bytes, v.gso_bytes = NEEDS_CHECKSUM, kind, head_bytes, mss
    v.checksum_start, v.checksum_offset = l4, TCP.checksum


@engine_function
def send_segments(nic, row, head, head_bytes, mss):
    """Send the segments that were not sent yet, of what the message lists. Return SENT, NO_ROOM, or minus a reason.

    NO_ROOM is also for what is left when the WQE has had its share of the turn.
    """
    n = worker_at(nic)
    s = sq_row_at(row)
    payload = message_at(n.message).nbytes
    if payload > 1 << LOG_MAX_TSO:
        return -refuse.too_long_to_send(nic, payload, 1 << LOG_MAX_TSO)
    if mss == 0 or head_bytes < ETHERNET.size + IPV4.size + TCP.size:
        return -refuse.segmentation_headers(nic, mss, head_bytes)
    count = max((payload + mss - 1) // mss, 1)
    most = _at_once(nic, row, head, head_bytes, mss)
    frames = 0
    while s.packets < count:
        if frames == _SHARE:
            return NO_ROOM
        offset = s.packets * mss
        packets = min(count - s.packets, most)
        nbytes = min(payload - offset, packets * mss)
        total = head_bytes + nbytes
        listed = n.message + MESSAGE.segments
        frame = build_frame(nic, row, head, head_bytes, listed, offset, nbytes, 0, min(nbytes, mss))
        if frame <= 0:
            return frame
        l3 = ETHERNET.size + tag_bytes(frame, total)
        set_length(frame, l3, total, s.packets)
        parse(n.packet, frame, total)
        l4 = packet_at(n.packet).l4
        tcp = frame + l4
        whole = l4 != 0 and ld8(n.packet + PROTOCOL) == IP_PROTOCOL_TCP
        if not whole or l4 + (be16(ld16(tcp + TCP.offset_flags)) >> TCP_OFFSET_SHIFT) * 4 != head_bytes:
            return -refuse.segmentation_headers(nic, mss, head_bytes)
        set_tcp(tcp, offset, s.packets == 0, s.packets + packets == count)
        if packets == 1 or frame == n.frame:  # it comes back if the program has changed its MAC since `_at_once`
            write_checksums(nic, frame, total, EthChecksum.L3 | EthChecksum.L4)
        else:
            write_checksums(nic, frame, total, EthChecksum.L3)
            _leave_uncut(frame, l3, l4, head_bytes, total, mss)
        leave(nic, row, frame, total, packets, head_bytes)
        s.packets += packets
        frames += 1
    s.packets = 0
    return SENT
