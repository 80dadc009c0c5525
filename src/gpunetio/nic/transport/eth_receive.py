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
)  # fmt: skip
from ...formats.doorbell import PI_MASK, QP_DBREC
from ...formats.ethernet_queues import QueueState
from ...formats.events import EventQueueType, EventType
from ...formats.packet import (
    ETHER_TYPE_VLAN, ETHERNET, IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, IPV4, IPV6, TCP, TCP_ACK, TCP_OFFSET_SHIFT, UDP,
    VLAN_TAG,
)  # fmt: skip
from ...formats.wqe import DATA_SEG, SEGMENT, SRQ_NEXT_SEG
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be16, be32, be64, copy, fence_release_sys, ld8, ld16, ld32, ld64, ld_acquire32, pack64, st32, st64, st128,
)  # fmt: skip
from ..memory.keys import translate
from ..memory.streams import move_now
from ..queues.completion import (
    RECEIVE_QUEUE, Completion, count_error, record_error, recover_cq, stage_payload, write_cqe,
)  # fmt: skip
from ..queues.events import raise_event
from ..state import refuse
from ..state.counters import COUNTERS, counters_at
from ..state.ethernet_queues import RQ_COUNTS, RQ_SETUP_BYTES, q_counter_row_at, rq_row_at, rqt_row_at, tir_row_at
from ..state.extensions import ETHERNET_QUEUES
from ..state.flow import packet_at
from ..state.nic import nic_at
from ..state.reasons import Reason
from ..state.srq import srq_row_at
from ..state.worker import worker_at
from ..steering.parse import FRAGMENTED, MARKS, PROTOCOL, VERSION_SHIFT
from ..steering.rss import hash_type
from .execution import capacity_of, count_segments, shared_posted, shared_segments, take_shared

ANY_NUMBER = 1 << 30  # of frames: more than any queue has room for
_TAG = 1 << 16  # with the TCI of a tag that was taken out
# The words of a CQE's first 32 bytes: the hash, its type and the checksum, and what was found in the headers.
_HASH, _SUMS, _TOLD = 8, 16, 24


# --- receives ------------------------------------------------------------------------------------------------------


@device_function
def _posted(row):
    """Return how many receives wait."""
    r = rq_row_at(row)
    if r.srq != 0:
        return shared_posted(r.srq)
    return (be32(ld_acquire32(r.dbrec + QP_DBREC.rcv)) - r.consumed) & PI_MASK


@device_function
def _is_linked(row):
    r = rq_row_at(row)
    return r.wq_type == WqType.LINKED_LIST or r.wq_type == WqType.LINKED_LIST_STRIDING


@device_function
def _segments(row):
    """Return the address of the data segments of the next receive in the queue's own ring."""
    r = rq_row_at(row)
    index = (r.next if _is_linked(row) else r.consumed) & ((1 << r.log) - 1)
    return r.addr + index * r.stride + (0 if r.wq_type == WqType.CYCLIC else SEGMENT)


@device_function
def _number(row):
    """Return by which number a CQE names the next receive in the queue's own ring."""
    return rq_row_at(row).next if _is_linked(row) else rq_row_at(row).consumed


@device_function
def _consume(row):
    """Consume the next receive in the queue's own ring."""
    r = rq_row_at(row)
    if _is_linked(row):
        r.next = be16(ld16(_segments(row) - SEGMENT + SRQ_NEXT_SEG.next_wqe_index)) & ((1 << r.log) - 1)
    r.consumed += 1
    r.used = 0


@engine_function
def room_for(row, nbytes):
    """Return how many frames of up to `nbytes` an RQ has room for: ANY_NUMBER if it loses them all, as it is not ready.

    Frames of a striding queue do not go beyond the end of a receive.
    """
    r = rq_row_at(row)
    if r.state != QueueState.RDY:
        return ANY_NUMBER
    posted = _posted(row)
    if r.strides == 0 or posted == 0:
        return posted
    places = min((nbytes + r.stride_bytes - 1) // r.stride_bytes, r.strides)
    return (r.strides - r.used) // places + (posted - 1) * (r.strides // places)


# --- failures ------------------------------------------------------------------------------------------------------


@engine_function
def _no_buffer(row):
    counter = rq_row_at(row).counter
    if counter != 0:
        q_counter_row_at(counter).out_of_buffer += 1
    return COUNTERS.rx_frame_no_buffer


@engine_function
def _fail_receive(nic, row, number, strides, reason, syndrome):
    """Complete a receive with an error. `strides` are those that it takes with it, and `number` names it."""
    r = rq_row_at(row)
    count_error(nic, reason, syndrome, RECEIVE_QUEUE)
    head = _start_head(nic, row, number)
    first = r.strides - strides if r.strides != 0 else number
    return write_cqe(nic, r.cq, Completion(
        CqeOpcode.RESP_ERR, r.rqn, r.user_index, first, nbytes=strides << STRIDES_SHIFT, head=head, syndrome=syndrome,
        vendor=reason,
    ))  # fmt: skip


@engine_function
def _to_error(nic, row, number, reason):
    """Move an RQ to ERR. The record is there before anyone sees the state, an event or a CQE, and asks why."""
    r = rq_row_at(row)
    record_error(nic, RECEIVE_QUEUE, r.rqn, number, 0, reason, ld8(nic_at(nic).syndromes + reason))
    fence_release_sys()
    r.state = QueueState.ERR


@engine_function
def _fail_queue(nic, row, number, reason):
    """Move an RQ to ERR, and flush what is posted. Return the counter of the frame that was the cause."""
    r = rq_row_at(row)
    _to_error(nic, row, number, reason)
    if reason == Reason.CQ_OVERRUN and r.events >> EventType.WQ_CATAS_ERROR & 1:  # no CQE tells of it
        raise_event(nic, r.channel, r.cookie, EventType.WQ_CATAS_ERROR, r.rqn, EventQueueType.RQ)
    flush(nic, row)
    return COUNTERS.rx_frame_queue_state


@engine_function
def flush(nic, row):
    """Complete what is posted to the ring of an RQ in ERR with flush errors, if the RQ is to do so."""
    r = rq_row_at(row)
    if r.flush == 0 or r.srq != 0:
        return
    for _ in range(min(_posted(row), 1 << r.log)):
        left = r.strides - r.used
        if _fail_receive(nic, row, _number(row), left, refuse.flushed(nic), Syndrome.WR_FLUSH) != 0:
            return
        _consume(row)


@engine_function
def _too_long(nic, row, number, strides, nbytes, room):
    """Complete a receive that is too short for a frame. The queue goes on."""
    reason = refuse.receive_too_small(nic, nbytes, room)
    overrun = _fail_receive(nic, row, number, strides, reason, Syndrome.LOCAL_LENGTH)
    return COUNTERS.rx_frame_too_long if overrun == 0 else _fail_queue(nic, row, number, overrun)


@engine_function
def _refused(nic, row, number, strides, reason):
    """Complete a receive whose memory was refused. That moves the queue to ERR."""
    _to_error(nic, row, number, reason)
    _fail_receive(nic, row, number, strides, reason, Syndrome.LOCAL_PROT)
    flush(nic, row)
    return COUNTERS.rx_frame_queue_state


# --- what CQEs tell of a frame ---------------------------------------------------------------------------------------


@device_function
def _checked_bytes(packet, frame, protocol):
    """Return how many bytes the checksum of a TCP or UDP packet covers; 0 if there is none."""
    p = packet_at(packet)
    nbytes = p.end - p.l4
    if protocol != IP_PROTOCOL_UDP:
        return nbytes
    udp = frame + p.l4
    length = be16(ld16(udp + UDP.length))
    return length if UDP.size <= length <= nbytes and ld16(udp + UDP.checksum) != 0 else 0


@engine_function
def _check(packet, frame, begin, end, version, protocol):
    """Return what was checked and is right, an RxChecksum, and above its 8 bits the checksum of all bytes from `begin`.

    Each byte is added once: the headers of IP, TCP or UDP with its data, and what follows. IPv6 headers have no
    checksum to be wrong. RFC 791, RFC 9293 3.1, RFC 768, RFC 8200 8.1.
    """
    p = packet_at(packet)
    right = RxChecksum.L2_OK
    total, at = 0, begin
    if p.l3 != 0:
        ip, at = frame + p.l3, frame + p.l4
        if p.l4 == 0:
            at = ip + (4 * (ld8(ip + IPV4.version_ihl) & 0xF) if version == 4 else IPV6.size)
        header = raw_sum(ip, at - ip)
        total = raw_sum(begin, ip - begin) + header
        if version == 6 or fold(header) == 0xFFFF:
            right |= RxChecksum.L3_OK
        covered = _checked_bytes(packet, frame, protocol) if p.l4 != 0 else 0
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
def _l4_type(packet, frame, protocol):
    """Return the RxL4Type of a packet."""
    p = packet_at(packet)
    if p.l4 == 0:
        return RxL4Type.NONE
    if protocol == IP_PROTOCOL_UDP:
        return RxL4Type.UDP
    if protocol != IP_PROTOCOL_TCP:
        return RxL4Type.NONE
    word = be16(ld16(frame + p.l4 + TCP.offset_flags))
    if word & TCP_ACK == 0:
        return RxL4Type.TCP
    return RxL4Type.TCP_ACK_DATA if p.end - p.l4 > (word >> TCP_OFFSET_SHIFT) * 4 else RxL4Type.TCP_PURE_ACK


@engine_function
def _header_types(packet, frame, version, protocol):
    """Return what l4_hdr_type_etc says of a frame."""
    p = packet_at(packet)
    if p.l3 == 0:
        return 0
    ip = frame + p.l3
    if version == 4:
        told = RxL3Type.IPV4 << RX_L3_SHIFT
        more = ld8(ip + IPV4.version_ihl) & 0xF > IPV4.size // 4
    else:
        told = RxL3Type.IPV6 << RX_L3_SHIFT
        more = ld8(ip + IPV6.next_header) != protocol or (p.l4 != 0 and p.l4 - p.l3 != IPV6.size)
    if more:
        told |= RxHeaders.IP_OPTIONS
    if be16(ld16(packet + MARKS)) & FRAGMENTED:
        told |= RxHeaders.FRAGMENT
    return told | _l4_type(packet, frame, protocol) << RX_L4_SHIFT


@device_function
def _start_head(nic, row, number):
    """Return the address of the first 32 bytes of a CQE. In a striding queue, they name the receive.

    They are written as `write_cqe` loads them: a load that spans several stores waits until those are done.
    """
    head = stage_payload(worker_at(nic).message, INLINE_32_BYTES)
    st128(head, _first_word(row, number), 0)
    return head


@device_function
def _first_word(row, number):
    return be16(number) << 8 * CQE64.wqe_id if rq_row_at(row).strides != 0 else 0


@engine_function
def _describe(nic, row, number, frame, tag, nbytes):
    """Return the address of the first 32 bytes of a frame's CQE.

    `frame` is where it has arrived, and `nbytes` what is delivered of it: not the `tag` that was taken out.
    """
    packet = worker_at(nic).packet
    head = stage_payload(worker_at(nic).message, INLINE_32_BYTES)
    version = be16(ld16(packet + MARKS)) >> VERSION_SHIFT & 0xF
    protocol = ld8(packet + PROTOCOL)
    types = _header_types(packet, frame, version, protocol)
    begin = frame + ETHERNET.size
    if tag != 0:
        types |= RxHeaders.VLAN_STRIPPED
        begin += VLAN_TAG.size
    checked = _check(packet, frame, begin, begin + nbytes - ETHERNET.size, version, protocol)
    hashed = hash_type(packet_at(packet).tir, packet)
    hash_ = be32(packet_at(packet).hash) << 8 * (CQE64.rss_hash_result - _HASH)
    sums = pack64(hashed << 8 * (CQE64.rss_hash_type - _SUMS), be16(checked >> 8))
    told = (checked & 0xFF) << 8 * (CQE64.hds_ip_ext - _TOLD) | types << 8 * (CQE64.l4_hdr_type_etc - _TOLD)
    st128(head, _first_word(row, number), hash_)
    st128(head + _SUMS, sums, told | be16(tag) << 8 * (CQE64.vlan_info - _TOLD))
    return head


@engine_function
def _complete(nic, row, number, counter, byte_count, head):
    """Write the CQE of a frame that was placed. Return what became of the frame."""
    r = rq_row_at(row)
    tag = packet_at(worker_at(nic).packet).tag
    said = Completion(CqeOpcode.RESP_SEND, tag, r.user_index, counter, nbytes=byte_count, head=head)
    reason = write_cqe(nic, r.cq, said)
    return COUNTERS.rx_frame_delivered if reason == 0 else _fail_queue(nic, row, number, reason)


# --- placing -------------------------------------------------------------------------------------------------------


@engine_function
def _scatter(nic, pdn, segments, count, data, nbytes):
    """Copy a frame into the data segments of a receive. Return 0, or a reason."""
    room = 0
    for i in range(count):
        room += capacity_of(segments + i * SEGMENT)
    if nbytes > room:
        return refuse.receive_too_small(nic, nbytes, room)
    while nbytes > 0:
        reason = _put(nic, pdn, segments, 0, data, min(nbytes, capacity_of(segments)))
        if reason != 0:
            return reason
        data += capacity_of(segments)
        nbytes -= capacity_of(segments)
        segments += SEGMENT
    return 0


@engine_function
def _put(nic, pdn, segment, offset, data, nbytes):
    """Copy bytes to an offset in the memory that a data segment names. Return 0, or a reason."""
    lkey, addr = be32(ld32(segment + DATA_SEG.lkey)), be64(ld64(segment + DATA_SEG.addr))
    target = translate(nic, lkey, pdn, addr + offset, nbytes, Access.LOCAL_WRITE, Reason.LKEY_UNKNOWN)
    return move_now(nic, target, data, nbytes) if target >= 0 else -target


@engine_function
def _receive(nic, row, frame, tag, data, nbytes):
    """Place a frame in the next receive."""
    r = rq_row_at(row)
    if _posted(row) == 0:
        return _no_buffer(row)
    if r.srq != 0:
        number = take_shared(nic, r.srq)
        segments = shared_segments(r.srq, number)
        room = r.stride - srq_row_at(r.srq).header
    else:
        number = _number(row)
        segments = _segments(row)
        room = r.stride - (SEGMENT if _is_linked(row) else 0)
    reason = _scatter(nic, r.pdn, segments, count_segments(segments, room), data, nbytes)
    if r.srq == 0:
        _consume(row)
    if reason == Reason.RECV_TOO_SMALL:
        return _too_long(nic, row, number, 0, nbytes, worker_at(nic).why_extra0)
    if reason != 0:
        return _refused(nic, row, number, 0, reason)
    return _complete(nic, row, number, number, nbytes, _describe(nic, row, number, frame, tag, nbytes))


@engine_function
def _skip_rest(nic, row):
    """Skip the rest of a receive of a striding queue. Return 0, or a reason."""
    r = rq_row_at(row)
    number, rest = _number(row), r.strides - r.used
    head = _start_head(nic, row, number)
    count = FILLER | rest << STRIDES_SHIFT
    reason = write_cqe(nic, r.cq, Completion(CqeOpcode.RESP_SEND, 0, r.user_index, r.used, nbytes=count, head=head))
    _consume(row)
    return reason


@engine_function
def _receive_striding(nic, row, frame, tag, data, nbytes):
    """Place a frame in the next strides."""
    r = rq_row_at(row)
    if _posted(row) == 0:
        return _no_buffer(row)
    need = 1
    if r.padding + nbytes > r.stride_bytes:
        need = (r.padding + nbytes + r.stride_bytes - 1) // r.stride_bytes
    if r.used != 0 and r.used + need > r.strides:
        number = _number(row)
        reason = _skip_rest(nic, row)
        if reason != 0:
            return _fail_queue(nic, row, number, reason)
        if _posted(row) == 0:
            return _no_buffer(row)
    number, segments, first = _number(row), _segments(row), r.used
    offset = first * r.stride_bytes + r.padding
    room = min(r.strides * r.stride_bytes, capacity_of(segments)) - offset
    if nbytes > room or nbytes > STRIDING_LENGTH_MASK:
        _consume(row)
        return _too_long(nic, row, number, r.strides - first, nbytes, room)
    reason = _put(nic, r.pdn, segments, offset, data, nbytes)
    if reason != 0:
        _consume(row)
        return _refused(nic, row, number, r.strides - first, reason)
    r.used = first + need
    if r.used == r.strides:
        _consume(row)
    head = _describe(nic, row, number, frame, tag, nbytes)
    return _complete(nic, row, number, first, need << STRIDES_SHIFT | nbytes, head)


@device_function
def _strip(frame):
    """Move the MACs over the VLAN tag behind them. Return its TCI and, so that no tag is 0, _TAG."""
    macs, rest = ld64(frame), ld32(frame + 8)
    tag = _TAG | be16(ld16(frame + ETHERNET.size))
    st64(frame + VLAN_TAG.size, macs)
    st32(frame + VLAN_TAG.size + 8, rest)
    return tag


@device_function
def _count(nic, row, fate, nbytes):
    """Count a frame of `nbytes` with its RQ. `fate` is the offset of the NIC's counter for it; return that."""
    r = rq_row_at(row)
    if fate == COUNTERS.rx_frame_delivered:
        r.frames += 1
        r.frame_bytes += nbytes
        counters_at(worker_at(nic).counters).rx_frame_delivered_bytes += nbytes
    elif fate == COUNTERS.rx_frame_no_buffer:
        r.no_buffer += 1
    elif fate == COUNTERS.rx_frame_too_long:
        r.too_long += 1
    else:
        r.not_ready += 1
    return fate


@engine_function
def receive_frame(nic, frame, nbytes):
    """Give a frame to the TIR that the worker's PACKET names. Return the offset of the counter for its fate."""
    p = packet_at(worker_at(nic).packet)
    row = tir_row_at(p.tir).rq
    if row == 0:
        table = rqt_row_at(tir_row_at(p.tir).rqt)
        row = ld64(table.rqs + 8 * (p.hash & table.count - 1))
    r = rq_row_at(row)
    if r.state != QueueState.RDY:
        return _count(nic, row, COUNTERS.rx_frame_queue_state, nbytes)
    tag, data = 0, frame
    if r.keep_vlan == 0 and be16(ld16(frame + ETHERNET.ether_type)) == ETHER_TYPE_VLAN:
        if nbytes >= ETHERNET.size + VLAN_TAG.size:
            tag, data = _strip(frame), frame + VLAN_TAG.size
            nbytes -= VLAN_TAG.size
    if r.strides != 0:
        fate = _receive_striding(nic, row, frame, tag, data, nbytes)
    else:
        fate = _receive(nic, row, frame, tag, data, nbytes)
    return _count(nic, row, fate, nbytes)


# --- commands ------------------------------------------------------------------------------------------------------


@ETHERNET_QUEUES.function
def modify_receive_queue(nic, row, source, expected):
    """Change an RQ as a command has prepared. Return 0 if it is not in the state that the command expects, else 1."""
    r = rq_row_at(row)
    if r.state != expected:
        return 0
    copy(row, source, RQ_SETUP_BYTES)
    if r.state == QueueState.RST:
        recover_cq(r.cq)
        for offset in range(RQ_SETUP_BYTES, RQ_COUNTS, 8):
            st64(row + offset, 0)
    elif r.state == QueueState.ERR and expected != QueueState.ERR:
        flush(nic, row)
    return 1
