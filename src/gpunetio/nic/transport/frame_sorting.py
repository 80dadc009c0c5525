"""The engine's side of a wire that carries Ethernet frames: sorts them, checks packets of RoCE v2, and takes those.

It makes system calls, so the engine must be on a CPU.
"""

from __future__ import annotations

from ...device.checksum import internet_sum
from ...fabric.capture import CaptureRing, capture_frame
from ...fabric.ethernet_receive import mark_frames, receive_frames
from ...fabric.ethernet_records import (
    ARRIVED, BATCH as READ_TOGETHER, OWN_GID, PIPE, Arrived, EthernetEnd, OwnGid, send,
)
from ...fabric.ethernet_transmit import transmit_frames
from ...fabric.frames import PACKET, PipeEnd, commit, reserve_frame
from ...fabric.icrc import packet_icrc, received_crc
from ...fabric.ip_headers import tag_bytes, whole_ipv4, whole_ipv6
from ...fabric.udp_records import MAPPED, MSG_DONTWAIT, MSG_NOSIGNAL
from ...formats.packet import (
    ETHERNET, ETHER_TYPE_ARP, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, GROUP_MAC,
    ICRC_SIZE, IPV4, IPV4_FRAGMENT_MASK, IPV6, IP_PROTOCOL_FRAGMENT, IP_PROTOCOL_ICMPV6, IP_PROTOCOL_UDP, NEIGHBOUR,
    NEIGHBOUR_ADVERTISEMENT, NEIGHBOUR_SOLICITATION, ROCE_UDP_PORT, UDP,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, ld16, ld32, ld64, ld8, st64
from ..state.counters import COUNTERS, CounterSet
from ..state.ethernet_queues import RqRow
from ..state.extensions import ETHERNET_WIRES
from ..state.flow import Fate, FlowTableRow
from ..state.qp import QpRow
from ..state.wire import WIRE, WireState
from ..state.worker import WorkerState
from ..steering.steer import look_up_fate, look_up_frames, select_frame
from .delivery import BATCH, addressee, date_captured, take_checked
from .eth_receive import ANY_NUMBER, receive_frame, room_for

ROUNDS = 8  # batches per turn
# Instead of a counter: the frame is a packet of RoCE v2 for this port; no flow rule has decided about it.
_ROCE, UNDECIDED = -1, -2


# --- what a frame is -----------------------------------------------------------------------------------------------
# These functions return the offset of the counter that says why a frame is none of RoCE's, or _ROCE.


@engine_function
def sort_frame(ethernet: EthernetEnd, frame: int, nbytes: int) -> int:
    """Say what a frame is. For a packet of RoCE v2 with intact headers, fill in the fields `bth` … of ETHERNET_WIRE.

    Every length is checked before the bytes are read. The UDP checksum is not looked at: senders of RoCE v2 leave it
    out, and the kernel does not compute it for frames that stay in this machine. The ICRC covers all that it does.
    """
    if nbytes < ETHERNET.size:
        return COUNTERS.rx_frame_malformed
    if not _is_for_port(ethernet, frame):
        return COUNTERS.rx_frame_other_mac
    kind = be16(ld16(frame + ETHERNET.ether_type))
    if kind == ETHER_TYPE_IPV4:
        return _sort_ipv4(ethernet, frame + ETHERNET.size, nbytes - ETHERNET.size)
    if kind == ETHER_TYPE_IPV6:
        return _sort_ipv6(ethernet, frame + ETHERNET.size, nbytes - ETHERNET.size)
    if kind == ETHER_TYPE_ARP:
        return COUNTERS.rx_frame_neighbour
    if kind == ETHER_TYPE_VLAN or kind == ETHER_TYPE_SERVICE_VLAN:
        return _sort_tagged(ethernet, frame, nbytes)
    return COUNTERS.rx_frame_other_protocol


@device_function
def _is_for_port(ethernet: EthernetEnd, frame: int) -> bool:
    """Return whether a frame's destination is the port's MAC, or a group's."""
    return ld32(frame) | ld16(frame + 4) << 32 == ethernet.mac or ld8(frame) & GROUP_MAC != 0


@device_function
def _own_gid(ethernet: EthernetEnd, high: int, low: int) -> int:
    """Return the index of an own GID, or -1."""
    for i in range(ethernet.gid_count):
        gid = OwnGid(ethernet.gids + OWN_GID.size * i)
        if gid.low == low and gid.high == high:
            return i
    return -1


@engine_function
def _sort_tagged(ethernet: EthernetEnd, frame: int, nbytes: int) -> int:
    """Sort a frame with VLAN tags: the port answers questions for its addresses in any VLAN, and takes nothing else."""
    at = ETHERNET.size + tag_bytes(frame, nbytes)
    kind = be16(ld16(frame + at - 2))
    if kind == ETHER_TYPE_ARP:
        return COUNTERS.rx_frame_neighbour
    if kind == ETHER_TYPE_IPV6 and _sort_ipv6(ethernet, frame + at, nbytes - at) == COUNTERS.rx_frame_neighbour:
        return COUNTERS.rx_frame_neighbour
    return COUNTERS.rx_frame_vlan


@engine_function
def _sort_ipv4(ethernet: EthernetEnd, ip: int, nbytes: int) -> int:
    """RFC 791, RFC 1122 3.2.1."""
    head = whole_ipv4(ip, nbytes)
    if head == 0:
        return COUNTERS.rx_frame_malformed
    if internet_sum(ip, head) != 0xFFFF:
        return COUNTERS.rx_frame_checksum
    ethernet.own = _own_gid(ethernet, 0, ld32(ip + IPV4.destination) << 32 | MAPPED)
    if ethernet.own < 0:
        return COUNTERS.rx_frame_other_address
    if be16(ld16(ip + IPV4.flags_fragment)) & IPV4_FRAGMENT_MASK != 0:
        return COUNTERS.rx_frame_fragment
    if ld8(ip + IPV4.protocol) != IP_PROTOCOL_UDP:
        return COUNTERS.rx_frame_other_protocol
    ethernet.version, ethernet.ip, ethernet.ip_bytes = 4, ip, head
    ethernet.peer_high, ethernet.peer_low = 0, ld32(ip + IPV4.source) << 32 | MAPPED
    return _sort_udp(ethernet, ip + head, be16(ld16(ip + IPV4.total_length)) - head)


@engine_function
def _sort_ipv6(ethernet: EthernetEnd, ip: int, nbytes: int) -> int:
    """RFC 8200."""
    if not whole_ipv6(ip, nbytes):
        return COUNTERS.rx_frame_malformed
    length = be16(ld16(ip + IPV6.payload_length))
    protocol = ld8(ip + IPV6.next_header)
    if protocol == IP_PROTOCOL_ICMPV6 and length >= NEIGHBOUR.size:
        kind = ld8(ip + IPV6.size + NEIGHBOUR.type)
        if kind == NEIGHBOUR_SOLICITATION or kind == NEIGHBOUR_ADVERTISEMENT:
            return COUNTERS.rx_frame_neighbour
    ethernet.own = _own_gid(ethernet, ld64(ip + IPV6.destination), ld64(ip + IPV6.destination + 8))
    if ethernet.own < 0:
        return COUNTERS.rx_frame_other_address
    if protocol == IP_PROTOCOL_FRAGMENT:
        return COUNTERS.rx_frame_fragment
    if protocol != IP_PROTOCOL_UDP:
        return COUNTERS.rx_frame_other_protocol
    ethernet.version, ethernet.ip, ethernet.ip_bytes = 6, ip, IPV6.size
    ethernet.peer_high, ethernet.peer_low = ld64(ip + IPV6.source), ld64(ip + IPV6.source + 8)
    return _sort_udp(ethernet, ip + IPV6.size, length)


@device_function
def _sort_udp(ethernet: EthernetEnd, udp: int, nbytes: int) -> int:
    """RFC 768. What follows the ICRC is padding."""
    if nbytes < UDP.size:
        return COUNTERS.rx_frame_malformed
    length = be16(ld16(udp + UDP.length))
    if length < UDP.size + ICRC_SIZE or length > nbytes:
        return COUNTERS.rx_frame_malformed
    if be16(ld16(udp + UDP.destination_port)) != ROCE_UDP_PORT:
        return COUNTERS.rx_frame_other_protocol
    ethernet.bth, ethernet.nbytes = udp + UDP.size, length - UDP.size - ICRC_SIZE
    return _ROCE


# --- what flow rules do with it --------------------------------------------------------------------------------------


@engine_function
def steer_frame(worker: WorkerState, frame: int, nbytes: int) -> int:
    """Do with the frame that was read what the flow tables say. Return the offset of its counter, or UNDECIDED."""
    return follow(worker, look_up_fate(worker, nbytes), frame, nbytes)


@engine_function
def follow(worker: WorkerState, fate: int, frame: int, nbytes: int) -> int:
    """Do with a frame what `steer` has returned. Return the offset of the counter for its fate, or UNDECIDED."""
    if fate == Fate.TIR:
        return receive_frame(worker, frame, nbytes)
    if fate == Fate.DROP:
        return COUNTERS.rx_frame_rule_dropped
    if fate == Fate.LOOP:
        return COUNTERS.rx_frame_rule_loop
    return UNDECIDED


# --- taking --------------------------------------------------------------------------------------------------------


@engine_function
def _take_packet(worker: WorkerState, wire: WireState, ethernet: EthernetEnd, at: int) -> int:
    """Take the packet at hand, whose position on the wire is `at`. Return 1 if it is intact and for a QP of this NIC.

    Peer and QP are checked before the ICRC, so that packets of strangers cost little.
    """
    worker.arrived_at = ethernet.own
    qp = QpRow(addressee(worker, wire, ethernet.bth, ethernet.nbytes, ethernet.peer_high, ethernet.peer_low, at))
    if qp != 0:
        crc = received_crc(ethernet.scratch, ethernet.ip, ethernet.ip_bytes, ethernet.version)
        if packet_icrc(crc, ethernet.bth, ethernet.nbytes) != ld32(ethernet.bth + ethernet.nbytes):
            CounterSet(worker.counters).rx_icrc_encapsulated += 1
            return 0
    return take_checked(worker, qp, wire, ethernet.bth, ethernet.nbytes, ethernet.peer_high, ethernet.peer_low)


@engine_function
def decide(worker: WorkerState, ethernet: EthernetEnd, frame: int, nbytes: int, cut: int) -> int:
    """Do with a frame what the flow tables say, and if they do not, say what it is, as `sort_frame`.

    If there is a root table, the frame was read. `cut`: not all of the frame is there.
    """
    if worker.link_down:
        return COUNTERS.rx_frame_link_down
    if cut or nbytes < ETHERNET.size:
        return COUNTERS.rx_frame_malformed
    longest = worker.longest_frame
    if nbytes > longest and nbytes > longest + tag_bytes(frame, nbytes):
        return COUNTERS.rx_frame_oversize
    if ethernet.promiscuous == 0 and not _is_for_port(ethernet, frame):
        return COUNTERS.rx_frame_other_mac
    fate = UNDECIDED
    if FlowTableRow(worker.flow_tables).miss != 0:
        fate = steer_frame(worker, frame, nbytes)
    return sort_frame(ethernet, frame, nbytes) if fate == UNDECIDED else fate


@engine_function
def _take_frame(worker: WorkerState, wire: WireState, ethernet: EthernetEnd, arrived: Arrived, at: int) -> int:
    """Take a frame. Return 1 if it is for a queue of this NIC. Every frame counts in `rx_frames`."""
    CounterSet(worker.counters).rx_frames += 1
    CounterSet(worker.counters).rx_frame_bytes += arrived.nbytes
    if worker.capture != 0:
        capture_frame(CaptureRing(worker.capture), arrived.frame, arrived.nbytes, arrived.frame, 0, worker.now, 0)
    fate = decide(worker, ethernet, arrived.frame, arrived.nbytes, arrived.cut)
    if fate == _ROCE:
        return _take_packet(worker, wire, ethernet, at)
    if fate == COUNTERS.rx_frame_neighbour:
        send(ethernet.thread, arrived.frame, arrived.nbytes, MSG_DONTWAIT | MSG_NOSIGNAL)
    st64(worker.counters + fate, ld64(worker.counters + fate) + 1)
    return 1 if fate == COUNTERS.rx_frame_delivered else 0


@engine_function
def _credit(ethernet: EthernetEnd) -> int:
    """Return how many frames the queues of the wire have room for."""
    least = ANY_NUMBER
    for i in range(ethernet.queue_count):
        least = min(least, room_for(RqRow(ld64(ethernet.queues + 8 * i)), ethernet.longest))
    return least


@ETHERNET_WIRES.function
def take_in(worker: WorkerState, wire: WireState) -> int:
    """Take the frames that have arrived at the wire's descriptor. Return how many.

    The wire's share of a turn ends with the batch that brings the BATCHth frame for a queue of this NIC, or after
    ROUNDS batches.
    """
    ethernet = wire.medium
    w = EthernetEnd(ethernet)
    done = 0
    ours = 0
    for _ in range(ROUNDS):
        at = w.position
        if w.reading == PIPE and w.credit < READ_TOGETHER:
            w.credit = _credit(ethernet)
        count = receive_frames(ethernet)
        date_captured(worker, count)
        if FlowTableRow(worker.flow_tables).miss != 0:
            look_up_frames(worker, w.first, count)
        for i in range(count):
            select_frame(worker, i)
            ours += _take_frame(worker, wire, ethernet, w.first + i * ARRIVED.size, at)
        done += count
        if w.more == 0 or ours >= BATCH:
            break
    worker.arrived_at = -1
    return done


@ETHERNET_WIRES.function
def send_out(worker: WorkerState, wire: WireState) -> int:
    """Send the frames that wait for the descriptor."""
    ethernet = wire.medium
    w = EthernetEnd(ethernet)
    sent = transmit_frames(ethernet, worker.capture, worker.now)
    if w.tx_dropped != 0:
        CounterSet(worker.counters).tx_dropped += w.tx_dropped
        w.tx_dropped = 0
    return sent


@engine_function
def frame_room(worker: WorkerState, wire: WireState, nbytes: int, mac: int) -> int:
    """Return the address for the bytes of a frame that is to be sent, or 0 if the pipe is full."""
    frame = reserve_frame(PipeEnd(wire + WIRE.tx), nbytes)
    return frame + PACKET if frame != 0 else 0


@engine_function
def send_frame(worker: WorkerState, wire: WireState, nbytes: int) -> int:
    """Send the frame that was written to where `frame_room` said."""
    commit(PipeEnd(wire + WIRE.tx))
    return 1


@ETHERNET_WIRES.function
def arrivals(wire: WireState) -> int:
    """Return the position from which on everything has arrived after this call."""
    return mark_frames(wire.medium)


@ETHERNET_WIRES.function
def unsent(wire: WireState) -> int:
    """Return the end of the pipe of packets that wait for the descriptor."""
    return EthernetEnd(wire.medium).tx
