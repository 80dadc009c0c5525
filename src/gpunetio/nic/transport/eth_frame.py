"""Ethernet frames that SQs send: their bytes from a WQE, the VLAN tag, checksums, and the way onto the wire.

A frame to the port's own MAC comes back, and one to a group also does, as from the switch inside a card: flow rules
decide which queues of the port get it.
"""

from __future__ import annotations

from ...device.checksum import internet_sum, pseudo_sum, store_checksum
from ...fabric.capture import capture_frame
from ...fabric.ip_headers import MOST_TAGS, tag_bytes
from ...formats.ethernet_queues import InlineMode, SelfLbBlock
from ...formats.packet import (
    ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, ETHERNET, GROUP_MAC, IP_PROTOCOL_UDP, IPV4, IPV6, TCP, TCP_OFFSET_SHIFT,
    UDP, VLAN_TAG,
)  # fmt: skip
from ...formats.wqe import ETH_INSERT_SVLAN, EthChecksum
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, copy, ld8, ld16, ld32, ld64, st16, st32, st64
from ..memory.streams import DEVICE_SHIFT, move_now
from ..state import refuse
from ..state.counters import COUNTERS, counters_at
from ..state.ethernet_queues import sq_row_at, tir_row_at, tis_row_at
from ..state.flow import Fate, flow_table_at, packet_at
from ..state.nic import nic_at
from ..state.qp import qp_row_at
from ..state.worker import worker_at
from ..steering.parse import PROTOCOL, parse
from ..steering.steer import read_frame, steer
from .frame_sorting import UNDECIDED, follow
from .lan import load_mac
from .wire_kinds import frame_room, send_frame

NO_ROOM, SENT = 0, 1  # or minus a reason
MAC_BYTES = 6


# --- the bytes -----------------------------------------------------------------------------------------------------


@engine_function
def copy_data(nic, segment, offset, nbytes, to):
    """Copy bytes from the listed data from `segment` on, which are so many. Return 0, or a reason."""
    while nbytes > 0:
        part = ld64(segment + 8) - offset
        if part > 0:
            part = min(part, nbytes)
            reason = move_now(nic, to, ld64(segment) + offset, part)
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
def _first_bytes(nic, head, head_bytes, segment, offset):
    """Return the address of a frame's first MAC_BYTES, or minus a reason."""
    if head_bytes >= MAC_BYTES:
        return head
    if head_bytes == 0 and ld64(segment + 8) - offset >= MAC_BYTES and ld64(segment) >> DEVICE_SHIFT == 0:
        return ld64(segment) + offset
    room = worker_at(nic).frame
    copy(room, head, head_bytes)
    reason = copy_data(nic, segment, offset, MAC_BYTES - head_bytes, room + head_bytes)
    return room if reason == 0 else -reason


@device_function
def _insert_tag(frame, tag):
    """Move the MACs, which are behind the room for a VLAN tag, to the frame's beginning, and write the tag."""
    first, second = ld64(frame + VLAN_TAG.size), ld32(frame + VLAN_TAG.size + 8)
    st64(frame, first)
    st32(frame + 8, second)
    service = tag >> 16 & ETH_INSERT_SVLAN
    st16(frame + ETHERNET.ether_type, be16(ETHER_TYPE_SERVICE_VLAN if service else ETHER_TYPE_VLAN))
    st16(frame + ETHERNET.size, be16(tag & 0xFFFF))


# --- checksums -----------------------------------------------------------------------------------------------------


@engine_function
def _write_l4_checksum(packet, frame, protocol):
    """Write the checksum of a TCP or UDP packet (RFC 9293 3.1, RFC 768, RFC 8200 8.1)."""
    p = packet_at(packet)
    ip, l4 = frame + p.l3, frame + p.l4
    nbytes = p.end - p.l4
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
def write_checksums(nic, frame, nbytes, flags):
    """Write the checksums that cs_flags ask for, whatever is in their place. Headers that are damaged get none."""
    packet = worker_at(nic).packet
    parse(packet, frame, nbytes)
    p = packet_at(packet)
    if p.l3 == 0:
        return
    ip = frame + p.l3
    version = ld8(ip) >> 4
    if flags & EthChecksum.L3 and version == 4:
        st16(ip + IPV4.checksum, 0)
        st16(ip + IPV4.checksum, be16(internet_sum(ip, (ld8(ip) & 0xF) * 4) ^ 0xFFFF))
    if flags & EthChecksum.L4 and p.l4 != 0:
        _write_l4_checksum(packet, frame, ld8(packet + PROTOCOL))


@engine_function
def _headers_needed(nic, mode, frame, nbytes):
    """Return the bytes of a frame, from its beginning, that `min_wqe_inline_mode` wants in the WQE."""
    packet = worker_at(nic).packet
    parse(packet, frame, nbytes)
    p = packet_at(packet)
    if mode == InlineMode.L2 or p.l3 == 0:
        return ETHERNET.size + tag_bytes(frame, nbytes)
    ip = frame + p.l3
    if mode == InlineMode.TCP_UDP and p.l4 != 0:
        if ld8(packet + PROTOCOL) == IP_PROTOCOL_UDP:
            return p.l4 + UDP.size
        return p.l4 + (be16(ld16(frame + p.l4 + TCP.offset_flags)) >> TCP_OFFSET_SHIFT) * 4
    return p.l3 + ((ld8(ip) & 0xF) * 4 if ld8(ip) >> 4 == 4 else IPV6.size)


# --- the way back --------------------------------------------------------------------------------------------------


@device_function
def _is_blocked(row, tir, mac):
    """Return whether a TIR takes no such packets from SQs of its own transport domain."""
    t = tir_row_at(tir)
    blocked = SelfLbBlock.MULTICAST if mac & GROUP_MAC else SelfLbBlock.UNICAST
    return t.self_lb_block & blocked and t.transport_domain == tis_row_at(sq_row_at(row).tis).transport_domain


@engine_function
def _come_back(nic, row, nbytes, mac):
    """Give the frame in the worker's room for frames to queues of this NIC."""
    n = worker_at(nic)
    frame = n.frame
    counters_at(n.counters).rx_frames += 1
    counters_at(n.counters).rx_frame_bytes += nbytes
    read_frame(nic, frame, nbytes)
    fate = steer(nic, nbytes)
    if fate == Fate.TIR and _is_blocked(row, packet_at(n.packet).tir, mac):
        result = COUNTERS.rx_frame_own
    else:
        result = follow(nic, fate, frame, nbytes)
    if result == UNDECIDED:
        result = COUNTERS.rx_frame_own
    st64(n.counters + result, ld64(n.counters + result) + 1)


# --- sending -------------------------------------------------------------------------------------------------------


@engine_function
def build_frame(nic, row, head, head_bytes, segment, offset, nbytes, tag, longest):
    """Write a frame to where it leaves: `head_bytes` from the WQE, then `nbytes` of the listed data.

    The data begin at the `offset` of what the message lists from `segment` on. `tag` is 0, or what the Ethernet segment
    says of a VLAN tag to insert. `longest` is how many bytes of the data a packet on the wire has at most. Return the
    frame's address, NO_ROOM, or minus a reason.
    """
    n = worker_at(nic)
    q = qp_row_at(row)
    insert = VLAN_TAG.size if tag else 0
    total, packet = head_bytes + nbytes + insert, head_bytes + longest + insert
    most = q.mtu + ETHERNET.size
    if packet - insert < ETHERNET.size or packet > most + MOST_TAGS * VLAN_TAG.size:
        return -refuse.frame_length(nic, packet, ETHERNET.size, most)
    first = _first_bytes(nic, head, head_bytes, segment, offset)
    if first < 0:
        return first
    mac = load_mac(first)
    frame = n.frame if mac == nic_at(nic).mac else frame_room(nic, q.wire, total, mac)
    if frame == 0:
        return NO_ROOM
    copy(frame + insert, head, head_bytes)
    reason = copy_data(nic, segment, offset, nbytes, frame + insert + head_bytes)
    if reason != 0:
        return -reason
    if insert:
        _insert_tag(frame, tag)
    if packet > most + tag_bytes(frame, total):
        return -refuse.frame_length(nic, packet, ETHERNET.size, most)
    mode = sq_row_at(row).inline_mode
    if mode != InlineMode.NONE:
        needed = _headers_needed(nic, mode, frame, total)
        if head_bytes < needed:
            return -refuse.inline_headers(nic, head_bytes, needed)
    return frame


@device_function
def send_packet(nic, row, head, head_bytes, segment, offset, nbytes, flags, tag):
    """Build a frame, with the checksums that `flags` (EthChecksum) ask for, and send it.

    Return SENT, even if nobody gets it, NO_ROOM, or minus a reason.
    """
    frame = build_frame(nic, row, head, head_bytes, segment, offset, nbytes, tag, nbytes)
    if frame <= 0:
        return frame
    total = head_bytes + nbytes + (VLAN_TAG.size if tag else 0)
    if flags:
        write_checksums(nic, frame, total, flags)
    leave(nic, row, frame, total, 1, 0)
    return SENT


@engine_function
def leave(nic, row, frame, nbytes, packets, head_bytes):
    """Send a frame that is complete, to the wire or back, or both.

    On the wire, it is so many `packets`, which repeat its first `head_bytes`. Where it was built says whether it is for
    the port itself: the program may have changed its MAC since then.
    """
    n = worker_at(nic)
    c = counters_at(n.counters)
    mac = load_mac(frame)
    if n.link_down:
        c.tx_frame_link_down += 1
        return
    s = sq_row_at(row)
    on_wire = nbytes + (packets - 1) * head_bytes
    c.tx_frames += packets
    c.tx_frame_bytes += on_wire
    s.frames += packets
    s.frame_bytes += on_wire
    if frame == n.frame:
        if n.capture != 0:
            capture_frame(n.capture, frame, nbytes, frame, 0, n.now, 1)
        _come_back(nic, row, nbytes, mac)
        return
    back = mac & GROUP_MAC and flow_table_at(n.flow_tables).miss != 0
    if back:
        copy(n.frame, frame, nbytes)
    send_frame(nic, qp_row_at(row).wire, nbytes)
    if back:
        _come_back(nic, row, nbytes, mac)
