"""The receive queues of Ethernet frames: a frame that flow tables give to a TIR is placed in a receive, and completed.

A striding queue has large receives of many strides. Frames lie in them one after another, each from the beginning of a
stride on. If a frame does not fit into the rest of a receive, a filler CQE skips that rest. A receive is consumed once
CQEs have told of all its strides.
"""

from __future__ import annotations

from ...device.checksum import fold, pseudo_sum, raw_sum
from ...enums import Access
from ...formats.commands import WqType
from ...formats.cqe import (
    CQE64, FILLER, INLINE_32_BYTES, RX_L3_SHIFT, RX_L4_SHIFT, STRIDES_SHIFT, STRIDING_LENGTH_MASK, CqeOpcode,
    RxChecksum, RxHeaders, RxL3Type, RxL4Type, Syndrome,
)
from ...formats.doorbell import PI_MASK, QP_DBREC
from ...formats.ethernet_queues import QueueState
from ...formats.events import EventQueueType, EventType
from ...formats.packet import (
    ETHERNET, ETHER_TYPE_VLAN, IPV4, IPV6, IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, TCP, TCP_ACK, TCP_OFFSET_SHIFT, UDP,
    VLAN_TAG,
)
from ...formats.wqe import DATA_SEG, SEGMENT, SRQ_NEXT_SEG
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be16, be32, be64, copy, fence_release_sys, ld16, ld32, ld64, ld8, ld_acquire32, pack64, st128, st32, st64,
)
from ..memory.keys import translate
from ..memory.streams import copy_and_wait
from ..queues.completion import (
    RECEIVE_QUEUE, Completion, count_error, record_error, recover_cq, stage_payload, write_cqe,
)
from ..queues.events import raise_event
from ..state import refuse
from ..state.counters import COUNTERS, CounterSet
from ..state.cq import Channel, CqRow
from ..state.ethernet_queues import RQ_COUNTS, RQ_SETUP_BYTES, QCounterRow, RqRow, RqtRow, TirRow
from ..state.extensions import ETHERNET_QUEUES
from ..state.flow import Packet
from ..state.reasons import Reason
from ..state.srq import SrqRow
from ..state.worker import WorkerState
from ..steering.parse import FRAGMENTED, MARKS, PROTOCOL, VERSION_SHIFT
from ..steering.rss import hash_type
from .execution import capacity_of, count_segments, shared_posted, shared_segments, take_shared

ANY_NUMBER = 1 << 30  # of frames: more than any queue has room for
_TAG = 1 << 16  # with the TCI of a tag that was taken out
# The words of a CQE's first 32 bytes: the hash, its type and the checksum, and what was found in the headers.
_HASH, _SUMS, _TOLD = 8, 16, 24


# --- receives ------------------------------------------------------------------------------------------------------


@device_function
def _posted(rq: RqRow) -> int:
    """Return how many receives wait."""
    if rq.srq != 0:
        return shared_posted(SrqRow(rq.srq))
    return (be32(ld_acquire32(rq.dbrec + QP_DBREC.rcv)) - rq.consumed) & PI_MASK


@device_function
def _is_linked(rq: RqRow) -> bool:
    return rq.wq_type == WqType.LINKED_LIST or rq.wq_type == WqType.LINKED_LIST_STRIDING


@device_function
def _segments(rq: RqRow) -> int:
    """Return the address of the data segments of the next receive in the queue's own ring."""
    index = (rq.next if _is_linked(rq) else rq.consumed) & ((1 << rq.log) - 1)
    return rq.addr + index * rq.stride + (0 if rq.wq_type == WqType.CYCLIC else SEGMENT)


@device_function
def _number(rq: RqRow) -> int:
    """Return by which number a CQE names the next receive in the queue's own ring."""
    return rq.next if _is_linked(rq) else rq.consumed


@device_function
def _consume(rq: RqRow) -> None:
    """Consume the next receive in the queue's own ring."""
    if _is_linked(rq):
        rq.next = be16(ld16(_segments(rq) - SEGMENT + SRQ_NEXT_SEG.next_wqe_index)) & ((1 << rq.log) - 1)
    rq.consumed += 1
    rq.used = 0


@engine_function
def room_for(rq: RqRow, nbytes: int) -> int:
    """Return how many frames of up to `nbytes` an RQ has room for: ANY_NUMBER if it loses them all, as it is not ready.

    Frames of a striding queue do not go beyond the end of a receive.
    """
    if rq.state != QueueState.RDY:
        return ANY_NUMBER
    posted = _posted(rq)
    if rq.strides == 0 or posted == 0:
        return posted
    places = min((nbytes + rq.stride_bytes - 1) // rq.stride_bytes, rq.strides)
    return (rq.strides - rq.used) // places + (posted - 1) * (rq.strides // places)


# --- failures ------------------------------------------------------------------------------------------------------


@engine_function
def _no_buffer(rq: RqRow) -> int:
    counter = QCounterRow(rq.counter)
    if counter != 0:
        counter.out_of_buffer += 1
    return COUNTERS.rx_frame_no_buffer


@engine_function
def _fail_receive(worker: WorkerState, rq: RqRow, number: int, strides: int, reason: int, syndrome: int) -> int:
    """Complete a receive with an error. `strides` are those that it takes with it, and `number` names it."""
    count_error(worker, reason, syndrome, RECEIVE_QUEUE)
    head = _start_head(worker, rq, number)
    first = rq.strides - strides if rq.strides != 0 else number
    return write_cqe(worker, CqRow(rq.cq), Completion(
        CqeOpcode.RESP_ERR, rq.rqn, rq.user_index, first, nbytes=strides << STRIDES_SHIFT, head=head, syndrome=syndrome,
        vendor=reason,
    ))


@engine_function
def _to_error(worker: WorkerState, rq: RqRow, number: int, reason: int) -> None:
    """Move an RQ to ERR. The record is there before anyone sees the state, an event or a CQE, and asks why."""
    record_error(worker, RECEIVE_QUEUE, rq.rqn, number, 0, reason, ld8(worker.syndromes + reason))
    fence_release_sys()
    rq.state = QueueState.ERR


@engine_function
def _fail_queue(worker: WorkerState, rq: RqRow, number: int, reason: int) -> int:
    """Move an RQ to ERR, and flush what is posted. Return the counter of the frame that was the cause."""
    _to_error(worker, rq, number, reason)
    if reason == Reason.CQ_OVERRUN and rq.events >> EventType.WQ_CATAS_ERROR & 1:  # no CQE tells of it
        raise_event(worker, Channel(rq.channel), rq.cookie, EventType.WQ_CATAS_ERROR, rq.rqn, EventQueueType.RQ)
    flush(worker, rq)
    return COUNTERS.rx_frame_queue_state


@engine_function
def flush(worker: WorkerState, rq: RqRow) -> None:
    """Complete what is posted to the ring of an RQ in ERR with flush errors, if the RQ is to do so."""
    if rq.flush == 0 or rq.srq != 0:
        return
    for _ in range(min(_posted(rq), 1 << rq.log)):
        left = rq.strides - rq.used
        if _fail_receive(worker, rq, _number(rq), left, refuse.flushed(worker), Syndrome.WR_FLUSH) != 0:
            return
        _consume(rq)


@engine_function
def _too_long(worker: WorkerState, rq: RqRow, number: int, strides: int, nbytes: int, room: int) -> int:
    """Complete a receive that is too short for a frame. The queue goes on."""
    reason = refuse.receive_too_small(worker, nbytes, room)
    overrun = _fail_receive(worker, rq, number, strides, reason, Syndrome.LOCAL_LENGTH)
    return COUNTERS.rx_frame_too_long if overrun == 0 else _fail_queue(worker, rq, number, overrun)


@engine_function
def _refused(worker: WorkerState, rq: RqRow, number: int, strides: int, reason: int) -> int:
    """Complete a receive whose memory was refused. That moves the queue to ERR."""
    _to_error(worker, rq, number, reason)
    _fail_receive(worker, rq, number, strides, reason, Syndrome.LOCAL_PROT)
    flush(worker, rq)
    return COUNTERS.rx_frame_queue_state


# --- what CQEs tell of a frame ---------------------------------------------------------------------------------------


@device_function
def _checked_bytes(packet: Packet, frame: int, protocol: int) -> int:
    """Return how many bytes the checksum of a TCP or UDP packet covers; 0 if there is none."""
    nbytes = packet.end - packet.l4
    if protocol != IP_PROTOCOL_UDP:
        return nbytes
    udp = frame + packet.l4
    length = be16(ld16(udp + UDP.length))
    return length if UDP.size <= length <= nbytes and ld16(udp + UDP.checksum) != 0 else 0


@engine_function
def _check(packet: Packet, frame: int, begin: int, end: int, version: int, protocol: int) -> int:
    """Return what was checked and is right, an RxChecksum, and above its 8 bits the checksum of all bytes from `begin`.

    Each byte is added once: the headers of IP, TCP or UDP with its data, and what follows. IPv6 headers have no
    checksum to be wrong. RFC 791, RFC 9293 3.1, RFC 768, RFC 8200 8.1.
    """
    right = RxChecksum.L2_OK
    total, at = 0, begin
    if packet.l3 != 0:
        ip, at = frame + packet.l3, frame + packet.l4
        if packet.l4 == 0:
            at = ip + (4 * (ld8(ip + IPV4.version_ihl) & 0xF) if version == 4 else IPV6.size)
        header = raw_sum(ip, at - ip)
        total = raw_sum(begin, ip - begin) + header
        if version == 6 or fold(header) == 0xFFFF:
            right |= RxChecksum.L3_OK
        covered = _checked_bytes(packet, frame, protocol) if packet.l4 != 0 else 0
        if covered != 0:
            data = raw_sum(at, covered)
            total += data
            if (pseudo_sum(ip, protocol, covered) + be16(fold(data))) % 0xFFFF == 0:
                right |= RxChecksum.L4_OK
            at += covered
            if covered & 1 and at < end:  # the other byte of the last word
                total += ld8(at) << 8
                at += 1
    return be16(fold(total + raw_sum(at, end - at))) << 8 | right


@engine_function
def _l4_type(packet: Packet, frame: int, protocol: int) -> int:
    """Return the RxL4Type of a packet."""
    if packet.l4 == 0:
        return RxL4Type.NONE
    if protocol == IP_PROTOCOL_UDP:
        return RxL4Type.UDP
    if protocol != IP_PROTOCOL_TCP:
        return RxL4Type.NONE
    word = be16(ld16(frame + packet.l4 + TCP.offset_flags))
    if word & TCP_ACK == 0:
        return RxL4Type.TCP
    return RxL4Type.TCP_ACK_DATA if packet.end - packet.l4 > (word >> TCP_OFFSET_SHIFT) * 4 else RxL4Type.TCP_PURE_ACK


@engine_function
def _header_types(packet: Packet, frame: int, version: int, protocol: int) -> int:
    """Return what l4_hdr_type_etc says of a frame."""
    if packet.l3 == 0:
        return 0
    ip = frame + packet.l3
    if version == 4:
        told = RxL3Type.IPV4 << RX_L3_SHIFT
        more = ld8(ip + IPV4.version_ihl) & 0xF > IPV4.size // 4
    else:
        told = RxL3Type.IPV6 << RX_L3_SHIFT
        more = ld8(ip + IPV6.next_header) != protocol or (packet.l4 != 0 and packet.l4 - packet.l3 != IPV6.size)
    if more:
        told |= RxHeaders.IP_OPTIONS
    if be16(ld16(packet + MARKS)) & FRAGMENTED:
        told |= RxHeaders.FRAGMENT
    return told | _l4_type(packet, frame, protocol) << RX_L4_SHIFT


@device_function
def _start_head(worker: WorkerState, rq: RqRow, number: int) -> int:
    """Return the address of the first 32 bytes of a CQE. In a striding queue, they name the receive.

    They are written as `write_cqe` loads them: a load that spans several stores waits until those are done.
    """
    head = stage_payload(worker.message, INLINE_32_BYTES)
    st128(head, _first_word(rq, number), 0)
    return head


@device_function
def _first_word(rq: RqRow, number: int) -> int:
    return be16(number) << 8 * CQE64.wqe_id if rq.strides != 0 else 0


@engine_function
def _describe(worker: WorkerState, rq: RqRow, number: int, frame: int, tag: int, nbytes: int) -> int:
    """Return the address of the first 32 bytes of a frame's CQE.

    `frame` is where it has arrived, and `nbytes` what is delivered of it: not the `tag` that was taken out.
    """
    packet = Packet(worker.packet)
    head = stage_payload(worker.message, INLINE_32_BYTES)
    version = be16(ld16(packet + MARKS)) >> VERSION_SHIFT & 0xF
    protocol = ld8(packet + PROTOCOL)
    types = _header_types(packet, frame, version, protocol)
    begin = frame + ETHERNET.size
    if tag != 0:
        types |= RxHeaders.VLAN_STRIPPED
        begin += VLAN_TAG.size
    checked = _check(packet, frame, begin, begin + nbytes - ETHERNET.size, version, protocol)
    hashed = hash_type(TirRow(packet.tir), packet)
    hash_ = be32(packet.hash) << 8 * (CQE64.rss_hash_result - _HASH)
    sums = pack64(hashed << 8 * (CQE64.rss_hash_type - _SUMS), be16(checked >> 8))
    told = (checked & 0xFF) << 8 * (CQE64.hds_ip_ext - _TOLD) | types << 8 * (CQE64.l4_hdr_type_etc - _TOLD)
    st128(head, _first_word(rq, number), hash_)
    st128(head + _SUMS, sums, told | be16(tag) << 8 * (CQE64.vlan_info - _TOLD))
    return head


@engine_function
def _complete(worker: WorkerState, rq: RqRow, number: int, counter: int, byte_count: int, head: int) -> int:
    """Write the CQE of a frame that was placed. Return what became of the frame."""
    tag = Packet(worker.packet).tag
    said = Completion(CqeOpcode.RESP_SEND, tag, rq.user_index, counter, nbytes=byte_count, head=head)
    reason = write_cqe(worker, CqRow(rq.cq), said)
    return COUNTERS.rx_frame_delivered if reason == 0 else _fail_queue(worker, rq, number, reason)


# --- placing -------------------------------------------------------------------------------------------------------


@engine_function
def _scatter(worker: WorkerState, pdn: int, segments: int, count: int, data: int, nbytes: int) -> int:
    """Copy a frame into the data segments of a receive. Return 0, or a reason."""
    room = 0
    for i in range(count):
        room += capacity_of(segments + i * SEGMENT)
    if nbytes > room:
        return refuse.receive_too_small(worker, nbytes, room)
    while nbytes > 0:
        reason = _put(worker, pdn, segments, 0, data, min(nbytes, capacity_of(segments)))
        if reason != 0:
            return reason
        data += capacity_of(segments)
        nbytes -= capacity_of(segments)
        segments += SEGMENT
    return 0


@engine_function
def _put(worker: WorkerState, pdn: int, segment: int, offset: int, data: int, nbytes: int) -> int:
    """Copy bytes to an offset in the memory that a data segment names. Return 0, or a reason."""
    lkey, addr = be32(ld32(segment + DATA_SEG.lkey)), be64(ld64(segment + DATA_SEG.addr))
    target = translate(worker, lkey, pdn, addr + offset, nbytes, Access.LOCAL_WRITE, Reason.LKEY_UNKNOWN)
    return copy_and_wait(worker, target, data, nbytes) if target >= 0 else -target


@engine_function
def _receive(worker: WorkerState, rq: RqRow, frame: int, tag: int, data: int, nbytes: int) -> int:
    """Place a frame in the next receive."""
    if _posted(rq) == 0:
        return _no_buffer(rq)
    if rq.srq != 0:
        number = take_shared(worker, SrqRow(rq.srq))
        segments = shared_segments(SrqRow(rq.srq), number)
        room = rq.stride - SrqRow(rq.srq).header
    else:
        number = _number(rq)
        segments = _segments(rq)
        room = rq.stride - (SEGMENT if _is_linked(rq) else 0)
    reason = _scatter(worker, rq.pdn, segments, count_segments(segments, room), data, nbytes)
    if rq.srq == 0:
        _consume(rq)
    if reason == Reason.RECV_TOO_SMALL:
        return _too_long(worker, rq, number, 0, nbytes, worker.why_extra0)
    if reason != 0:
        return _refused(worker, rq, number, 0, reason)
    return _complete(worker, rq, number, number, nbytes, _describe(worker, rq, number, frame, tag, nbytes))


@engine_function
def _skip_rest(worker: WorkerState, rq: RqRow) -> int:
    """Skip the rest of a receive of a striding queue. Return 0, or a reason."""
    number, rest = _number(rq), rq.strides - rq.used
    head = _start_head(worker, rq, number)
    count = FILLER | rest << STRIDES_SHIFT
    completion = Completion(CqeOpcode.RESP_SEND, 0, rq.user_index, rq.used, nbytes=count, head=head)
    reason = write_cqe(worker, CqRow(rq.cq), completion)
    _consume(rq)
    return reason


@engine_function
def _receive_striding(worker: WorkerState, rq: RqRow, frame: int, tag: int, data: int, nbytes: int) -> int:
    """Place a frame in the next strides."""
    if _posted(rq) == 0:
        return _no_buffer(rq)
    need = 1
    if rq.padding + nbytes > rq.stride_bytes:
        need = (rq.padding + nbytes + rq.stride_bytes - 1) // rq.stride_bytes
    if rq.used != 0 and rq.used + need > rq.strides:
        number = _number(rq)
        reason = _skip_rest(worker, rq)
        if reason != 0:
            return _fail_queue(worker, rq, number, reason)
        if _posted(rq) == 0:
            return _no_buffer(rq)
    number, segments, first = _number(rq), _segments(rq), rq.used
    offset = first * rq.stride_bytes + rq.padding
    room = min(rq.strides * rq.stride_bytes, capacity_of(segments)) - offset
    if nbytes > room or nbytes > STRIDING_LENGTH_MASK:
        _consume(rq)
        return _too_long(worker, rq, number, rq.strides - first, nbytes, room)
    reason = _put(worker, rq.pdn, segments, offset, data, nbytes)
    if reason != 0:
        _consume(rq)
        return _refused(worker, rq, number, rq.strides - first, reason)
    rq.used = first + need
    if rq.used == rq.strides:
        _consume(rq)
    head = _describe(worker, rq, number, frame, tag, nbytes)
    return _complete(worker, rq, number, first, need << STRIDES_SHIFT | nbytes, head)


@device_function
def _strip(frame: int) -> int:
    """Move the MACs over the VLAN tag behind them. Return its TCI and, so that no tag is 0, _TAG."""
    first, second, third = ld32(frame), ld32(frame + 4), ld32(frame + 8)  # words that a GPU loads: 4 divides `frame`
    tag = _TAG | be16(ld16(frame + ETHERNET.size))
    st32(frame + VLAN_TAG.size, first)
    st32(frame + VLAN_TAG.size + 4, second)
    st32(frame + VLAN_TAG.size + 8, third)
    return tag


@device_function
def _count(worker: WorkerState, rq: RqRow, fate: int, nbytes: int) -> int:
    """Count a frame of `nbytes` with its RQ. `fate` is the offset of the NIC's counter for it; return that."""
    if fate == COUNTERS.rx_frame_delivered:
        rq.frames += 1
        rq.frame_bytes += nbytes
        CounterSet(worker.counters).rx_frame_delivered_bytes += nbytes
    elif fate == COUNTERS.rx_frame_no_buffer:
        rq.no_buffer += 1
    elif fate == COUNTERS.rx_frame_too_long:
        rq.too_long += 1
    else:
        rq.not_ready += 1
    return fate


@engine_function
def receive_frame(worker: WorkerState, frame: int, nbytes: int) -> int:
    """Give a frame to the TIR that the worker's PACKET names. Return the offset of the counter for its fate."""
    packet = Packet(worker.packet)
    row = TirRow(packet.tir).rq
    if row == 0:
        table = RqtRow(TirRow(packet.tir).rqt)
        row = ld64(table.rqs + 8 * (packet.hash & table.count - 1))
    rq = RqRow(row)
    if rq.state != QueueState.RDY:
        return _count(worker, RqRow(row), COUNTERS.rx_frame_queue_state, nbytes)
    tag, data = 0, frame
    if rq.keep_vlan == 0 and be16(ld16(frame + ETHERNET.ether_type)) == ETHER_TYPE_VLAN:
        if nbytes >= ETHERNET.size + VLAN_TAG.size:
            tag, data = _strip(frame), frame + VLAN_TAG.size
            nbytes -= VLAN_TAG.size
    if rq.strides != 0:
        fate = _receive_striding(worker, RqRow(row), frame, tag, data, nbytes)
    else:
        fate = _receive(worker, RqRow(row), frame, tag, data, nbytes)
    return _count(worker, RqRow(row), fate, nbytes)


# --- commands ------------------------------------------------------------------------------------------------------


@ETHERNET_QUEUES.function
def modify_receive_queue(worker: WorkerState, rq: RqRow, source: int, expected: int) -> int:
    """Change an RQ as a command has prepared. Return 0 if it is not in the state that the command expects, else 1."""
    if rq.state != expected:
        return 0
    copy(rq, source, RQ_SETUP_BYTES)
    if rq.state == QueueState.RST:
        recover_cq(CqRow(rq.cq))
        for offset in range(RQ_SETUP_BYTES, RQ_COUNTS, 8):
            st64(rq + offset, 0)
    elif rq.state == QueueState.ERR and expected != QueueState.ERR:
        flush(worker, rq)
    return 1
