"""Ethernet frames that SQs send: their bytes from a WQE, the VLAN tag, checksums, and the way onto the wire.

A frame to the port's own MAC comes back, and one to a group also does, as from the switch inside a card: flow rules
decide which queues of the port get it.
"""

from __future__ import annotations

from ...device.checksum import internet_sum, pseudo_sum, store_checksum
from ...fabric.capture import CaptureRing, capture_frame
from ...fabric.ip_headers import MOST_TAGS, tag_bytes
from ...formats.ethernet_queues import InlineMode, SelfLbBlock
from ...formats.packet import (
    ETHERNET, ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, GROUP_MAC, IPV4, IPV6, IP_PROTOCOL_UDP, TCP, TCP_OFFSET_SHIFT,
    UDP, VLAN_TAG,
)
from ...formats.wqe import ETH_INSERT_SVLAN, EthChecksum
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, copy, ld16, ld32, ld64, ld8, st16, st32, st64
from ..memory.streams import DEVICE_SHIFT, copy_and_wait
from ..state import refuse
from ..state.counters import COUNTERS, CounterSet
from ..state.ethernet_queues import SqRow, TirRow, TisRow
from ..state.flow import Fate, FlowTableRow, Packet
from ..state.qp import QpRow
from ..state.wire import WireState
from ..state.worker import WorkerState
from ..steering.parse import PROTOCOL, parse
from ..steering.steer import look_up_fate, look_up_frame
from .frame_sorting import UNDECIDED, follow
from .lan import load_mac
from .wire_kinds import frame_room, send_frame

NO_ROOM, SENT = 0, 1  # or minus a reason
MAC_BYTES = 6


# --- the bytes -----------------------------------------------------------------------------------------------------


@engine_function
def copy_data(worker: WorkerState, segment: int, offset: int, nbytes: int, to: int) -> int:
    """Copy bytes from the listed data from `segment` on, which are so many. Return 0, or a reason."""
    while nbytes > 0:
        part = ld64(segment + 8) - offset
        if part > 0:
            part = min(part, nbytes)
            reason = copy_and_wait(worker, to, ld64(segment) + offset, part)
            if reason != 0:
                return reason
            to += part
            nbytes -= part
            offset = 0
        else:
            offset = -part
        segment += 16
    return 0


@engine_function
def _first_bytes(worker: WorkerState, head: int, head_bytes: int, segment: int, offset: int) -> int:
    """Return the address of a frame's first MAC_BYTES, or minus a reason."""
    if head_bytes >= MAC_BYTES:
        return head
    if head_bytes == 0 and ld64(segment + 8) - offset >= MAC_BYTES and ld64(segment) >> DEVICE_SHIFT == 0:
        return ld64(segment) + offset
    room = worker.frame
    copy(room, head, head_bytes)
    reason = copy_data(worker, segment, offset, MAC_BYTES - head_bytes, room + head_bytes)
    return room if reason == 0 else -reason


@device_function
def _insert_tag(frame: int, tag: int) -> None:
    """Move the MACs, which are behind the room for a VLAN tag, to the frame's beginning, and write the tag."""
    at = frame + VLAN_TAG.size
    first, second, third = ld32(at), ld32(at + 4), ld32(at + 8)  # words that a GPU loads: 4 divides `frame`
    st32(frame, first)
    st32(frame + 4, second)
    st32(frame + 8, third)
    service = tag >> 16 & ETH_INSERT_SVLAN
    st16(frame + ETHERNET.ether_type, be16(ETHER_TYPE_SERVICE_VLAN if service else ETHER_TYPE_VLAN))
    st16(frame + ETHERNET.size, be16(tag & 0xFFFF))


# --- checksums -----------------------------------------------------------------------------------------------------


@engine_function
def _write_l4_checksum(packet: Packet, frame: int, protocol: int) -> None:
    """Write the checksum of a TCP or UDP packet (RFC 9293 3.1, RFC 768, RFC 8200 8.1)."""
    ip, l4 = frame + packet.l3, frame + packet.l4
    nbytes = packet.end - packet.l4
    at = l4 + TCP.checksum
    if protocol == IP_PROTOCOL_UDP:
        length = be16(ld16(l4 + UDP.length))
        if length < UDP.size or length > nbytes:
            return
        nbytes = length
        at = l4 + UDP.checksum
    st16(at, 0)
    store_checksum(at, pseudo_sum(ip, protocol, nbytes) + internet_sum(l4, nbytes), protocol)


@engine_function
def write_checksums(worker: WorkerState, frame: int, nbytes: int, flags: int) -> None:
    """Write the checksums that cs_flags ask for, whatever is in their place. Headers that are damaged get none."""
    packet = Packet(worker.packet)
    parse(packet, frame, nbytes)
    if packet.l3 == 0:
        return
    ip = frame + packet.l3
    version = ld8(ip) >> 4
    if flags & EthChecksum.L3 and version == 4:
        st16(ip + IPV4.checksum, 0)
        st16(ip + IPV4.checksum, be16(internet_sum(ip, (ld8(ip) & 0xF) * 4) ^ 0xFFFF))
    if flags & EthChecksum.L4 and packet.l4 != 0:
        _write_l4_checksum(packet, frame, ld8(packet + PROTOCOL))


@engine_function
def _headers_needed(worker: WorkerState, mode: int, frame: int, nbytes: int) -> int:
    """Return the bytes of a frame, from its beginning, that `min_wqe_inline_mode` wants in the WQE."""
    packet = Packet(worker.packet)
    parse(packet, frame, nbytes)
    if mode == InlineMode.L2 or packet.l3 == 0:
        return ETHERNET.size + tag_bytes(frame, nbytes)
    ip = frame + packet.l3
    if mode == InlineMode.TCP_UDP and packet.l4 != 0:
        if ld8(packet + PROTOCOL) == IP_PROTOCOL_UDP:
            return packet.l4 + UDP.size
        return packet.l4 + (be16(ld16(frame + packet.l4 + TCP.offset_flags)) >> TCP_OFFSET_SHIFT) * 4
    return packet.l3 + ((ld8(ip) & 0xF) * 4 if ld8(ip) >> 4 == 4 else IPV6.size)


# --- the way back --------------------------------------------------------------------------------------------------


@device_function
def _is_blocked(sq: SqRow, tir: TirRow, mac: int) -> int:
    """Return whether a TIR takes no such packets from SQs of its own transport domain."""
    blocked = SelfLbBlock.MULTICAST if mac & GROUP_MAC else SelfLbBlock.UNICAST
    return tir.self_lb_block & blocked and tir.transport_domain == TisRow(sq.tis).transport_domain


@engine_function
def _come_back(worker: WorkerState, sq: SqRow, nbytes: int, mac: int) -> None:
    """Give the frame in the worker's room for frames to queues of this NIC."""
    frame = worker.frame
    CounterSet(worker.counters).rx_frames += 1
    CounterSet(worker.counters).rx_frame_bytes += nbytes
    look_up_frame(worker, frame, nbytes)
    fate = look_up_fate(worker, nbytes)
    if fate == Fate.TIR and _is_blocked(sq, TirRow(Packet(worker.packet).tir), mac):
        result = COUNTERS.rx_frame_own
    else:
        result = follow(worker, fate, frame, nbytes)
    if result == UNDECIDED:
        result = COUNTERS.rx_frame_own
    st64(worker.counters + result, ld64(worker.counters + result) + 1)


# --- sending -------------------------------------------------------------------------------------------------------


@engine_function
def build_frame(
    worker: WorkerState, qp: QpRow, head: int, head_bytes: int, segment: int, offset: int, nbytes: int, tag: int,
    longest: int,
) -> int:
    """Write a frame to where it leaves: `head_bytes` from the WQE, then `nbytes` of the listed data.

    The data begin at the `offset` of what the message lists from `segment` on. `tag` is 0, or what the Ethernet segment
    says of a VLAN tag to insert. `longest` is how many bytes of the data a packet on the wire has at most. Return the
    frame's address, NO_ROOM, or minus a reason.
    """
    insert = VLAN_TAG.size if tag else 0
    total, packet = head_bytes + nbytes + insert, head_bytes + longest + insert
    most = qp.mtu + ETHERNET.size
    if packet - insert < ETHERNET.size or packet > most + MOST_TAGS * VLAN_TAG.size:
        return -refuse.frame_length(worker, packet, ETHERNET.size, most)
    first = _first_bytes(worker, head, head_bytes, segment, offset)
    if first < 0:
        return first
    mac = load_mac(first)
    frame = worker.frame if mac == worker.mac else frame_room(worker, WireState(qp.wire), total, mac)
    if frame == 0:
        return NO_ROOM
    copy(frame + insert, head, head_bytes)
    reason = copy_data(worker, segment, offset, nbytes, frame + insert + head_bytes)
    if reason != 0:
        return -reason
    if insert:
        _insert_tag(frame, tag)
    if packet > most + tag_bytes(frame, total):
        return -refuse.frame_length(worker, packet, ETHERNET.size, most)
    mode = SqRow(qp).inline_mode
    if mode != InlineMode.NONE:
        needed = _headers_needed(worker, mode, frame, total)
        if head_bytes < needed:
            return -refuse.inline_headers(worker, head_bytes, needed)
    return frame


@device_function
def send_packet(
    worker: WorkerState, qp: QpRow, head: int, head_bytes: int, segment: int, offset: int, nbytes: int, flags: int,
    tag: int,
) -> int:
    """Build a frame, with the checksums that `flags` (EthChecksum) ask for, and send it.

    Return SENT, even if nobody gets it, NO_ROOM, or minus a reason.
    """
    frame = build_frame(worker, qp, head, head_bytes, segment, offset, nbytes, tag, nbytes)
    if frame <= 0:
        return frame
    total = head_bytes + nbytes + (VLAN_TAG.size if tag else 0)
    if flags:
        write_checksums(worker, frame, total, flags)
    leave(worker, qp, frame, total, 1, 0)
    return SENT


@engine_function
def leave(worker: WorkerState, qp: QpRow, frame: int, nbytes: int, packets: int, head_bytes: int) -> None:
    """Send a frame that is complete, to the wire or back, or both.

    On the wire, it is so many `packets`, which repeat its first `head_bytes`. Where it was built says whether it is for
    the port itself: the program may have changed its MAC since then.
    """
    counters = CounterSet(worker.counters)
    mac = load_mac(frame)
    if worker.link_down:
        counters.tx_frame_link_down += 1
        return
    sq = SqRow(qp)
    on_wire = nbytes + (packets - 1) * head_bytes
    counters.tx_frames += packets
    counters.tx_frame_bytes += on_wire
    sq.frames += packets
    sq.frame_bytes += on_wire
    if frame == worker.frame:
        if worker.capture != 0:
            capture_frame(CaptureRing(worker.capture), frame, nbytes, frame, 0, worker.now, 1)
        _come_back(worker, SqRow(qp), nbytes, mac)
        return
    back = mac & GROUP_MAC and FlowTableRow(worker.flow_tables).miss != 0
    if back:
        copy(worker.frame, frame, nbytes)
    send_frame(worker, WireState(qp.wire), nbytes)
    if back:
        _come_back(worker, SqRow(qp), nbytes, mac)
