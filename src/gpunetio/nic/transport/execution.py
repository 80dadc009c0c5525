"""Execution: what a request does at the responder, and whether it may (IBTA 9.7.4, responder side).

Requests from a QP of the same NIC come whole, through `respond`; requests
from a wire come in packets (responder.py).
"""

from __future__ import annotations

from ...enums import Access
from ...formats.commands import QpState, ServiceType
from ...formats.cqe import INLINE_64_BYTES, CqeFormat, CqeOpcode, Syndrome
from ...formats.doorbell import PI_MASK, QP_DBREC
from ...formats.events import EventType
from ...formats.wqe import DATA_SEG, INLINE_SEG, INVALID_LKEY, SEGMENT, SRQ_NEXT_SEG, WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be16, be32, be64, cas_acq_rel_gpu64, fetch_add_acq_rel_gpu64, ld16, ld32, ld64, ld_acquire32, st64,
)  # fmt: skip
from ..memory.keys import translate
from ..memory.streams import device_of, let_arrive, move, move_now, place
from ..queues.completion import (
    RESPONDER, Completion, fail_qp, fail_receive, format_for, stage_payload, write_cqe,
)  # fmt: skip
from ..queues.events import raise_event, tell
from ..queues.operations import is_atomic, is_masked, receive_cqe, returns_data, right_of
from ..state import refuse
from ..state.counters import counters_at
from ..state.message import MESSAGE, message_at
from ..state.qp import EXTENDED_ATOMICS, qp_row_at
from ..state.reasons import Reason
from ..state.srq import srq_row_at
from ..state.worker import worker_at
from .masked_atomics import masked_atomic

_SEGMENTS = MESSAGE.segments


@device_function
def establish(nic, row):
    """Raise COMM_EST on the first request in RTR: the peer may send already (IBTA 11.6.3.2)."""
    q = qp_row_at(row)
    if q.state == QpState.RTR and q.established == 0:
        q.established = 1
        tell(nic, row, EventType.COMM_EST)


@device_function
def check_length(nic, row, nbytes):
    """Return 0 if the QP takes messages of this length (log_msg_max), or the reason for a refusal."""
    q = qp_row_at(row)
    return 0 if nbytes <= q.msg_max else refuse.message_too_long(nic, nbytes, q.msg_max)


@engine_function
def respond(nic, row, message):
    """Execute the request at `message` on the QP at `row`: return 0, or the reason for a refusal.

    Every refusal but RNR takes an RC QP to ERR (IBTA 9.9.3, class C). A failed copy fails the requester only. If a
    stream carries bytes of the request (`WORKER.touched`), the receive completes once they are in place (moving.py).
    """
    m = message_at(message)
    opcode = m.opcode
    establish(nic, row)
    counters = counters_at(worker_at(nic).counters)
    counters.rdma_rx_bytes += m.nbytes
    reason = check_length(nic, row, m.nbytes)
    if reason == 0:
        reason = _execute(nic, row, message, opcode)
    reliable = qp_row_at(row).service == ServiceType.RC
    if reason != 0 and reason != Reason.RNR and reason != Reason.COPY_FAILED and reliable:
        fail_qp(nic, row, m.index, opcode, reason, RESPONDER)
    return reason


@engine_function
def _execute(nic, row, message, opcode):
    counters = counters_at(worker_at(nic).counters)
    if right_of(opcode) == 0:
        return _receive(nic, row, message)
    if is_atomic(opcode):
        counters.rx_atomic_requests += 1
        return _atomic(nic, row, message, opcode)
    if returns_data(opcode):
        counters.rx_read_requests += 1
        return _read(nic, row, message)
    counters.rx_write_requests += 1
    if receive_cqe(opcode) != 0:
        return _write_imm(nic, row, message)
    return _write(nic, row, message)


@device_function
def check_rights(nic, row, key, addr, nbytes, right):
    """Return 0 if the QP itself grants this right (IBTA 9.7.4.1.2), or the reason for a refusal."""
    q = qp_row_at(row)
    return 0 if q.rights & right == right else refuse.remote_access(nic, key, addr, nbytes, q.rights, right)


@device_function
def authorize(nic, row, key, addr, nbytes, right):
    """Check the QP's rights, then the key's: return the address of the remote range, or minus a reason.

    The key of an empty request is not checked (IBTA 9.7.4.1.6): its address is 0.
    """
    reason = check_rights(nic, row, key, addr, nbytes, right)
    if reason != 0:
        return -reason
    if nbytes == 0:
        return 0
    address = translate(nic, key, qp_row_at(row).pdn, addr, nbytes, right, Reason.RKEY_UNKNOWN)
    if address < 0:
        counters_at(worker_at(nic).counters).resp_remote_access_errors += 1
    return address


@engine_function
def _write(nic, row, message):
    m = message_at(message)
    address = authorize(nic, row, m.rkey, m.raddr, m.nbytes, Access.REMOTE_WRITE)
    if address < 0:
        return -address
    return move_segments(nic, message, address, 0)


@engine_function
def _read(nic, row, message):
    m = message_at(message)
    address = authorize(nic, row, m.rkey, m.raddr, m.nbytes, Access.REMOTE_READ)
    if address < 0:
        return -address
    return move_segments(nic, message, address, 1)


@device_function
def move_segments(nic, message, address, scatter):
    """Copy the requester's segments to `address`, or with `scatter` from there into them: return 0, or a reason."""
    segment = message + _SEGMENTS
    end = segment + 16 * message_at(message).nsegments
    while segment != end:
        nbytes = ld64(segment + 8)
        own = ld64(segment)
        reason = move(nic, own, address, nbytes) if scatter else move(nic, address, own, nbytes)
        if reason != 0:
            return reason
        address += nbytes
        segment += 16
    return 0


@engine_function
def atomic_address(nic, row, key, addr, nbytes, masked):
    """Return the address of an atomic's word, or minus a reason. `masked`: the QP must allow masked atomics, too."""
    if masked:
        reason = check_rights(nic, row, key, addr, nbytes, Access.REMOTE_ATOMIC | EXTENDED_ATOMICS)
        if reason != 0:
            return -reason
    if addr & (nbytes - 1):
        return -refuse.misaligned_atomic(nic, key, addr, nbytes)
    address = authorize(nic, row, key, addr, nbytes, Access.REMOTE_ATOMIC)
    if address > 0 and device_of(address) != 0:
        return -refuse.device_atomic(nic, key, addr, nbytes)
    if address > 0 and address & (nbytes - 1):  # the iova and the memory of the region are aligned differently
        return -refuse.misaligned_atomic(nic, key, address, nbytes)
    return address


@device_function
def atomic(opcode, address, swap_add, compare):
    """Execute an atomic: return the old word. Words are in host byte order.

    On a GPU, those in host memory are atomic for what the GPU does, and not for the CPU.
    """
    if opcode == WqeOpcode.ATOMIC_FA:
        return fetch_add_acq_rel_gpu64(address, swap_add)
    return cas_acq_rel_gpu64(address, compare, swap_add)


@engine_function
def execute_atomic(nic, message, opcode, address):
    """Execute the atomic at `message` on a word that was checked: return 0, or a reason."""
    m = message_at(message)
    # The result travels in `compare`, which is no longer needed.
    if is_masked(opcode):
        old = masked_atomic(opcode, address, m.nbytes, m.swap_add, m.compare, m.swap_mask, m.compare_mask)
        m.compare = be32(old) if m.nbytes == 4 else old  # as in mlx5: only 8-byte words are in host order
    else:
        m.compare = atomic(opcode, address, m.swap_add, m.compare)
    return move_segments(nic, message, message + MESSAGE.compare, 1)


@engine_function
def _atomic(nic, row, message, opcode):
    m = message_at(message)
    address = atomic_address(nic, row, m.rkey, m.raddr, m.nbytes, is_masked(opcode))
    return -address if address < 0 else execute_atomic(nic, message, opcode, address)


# --- receives ------------------------------------------------------------------------------------------------------


@device_function
def shared_posted(srq):
    """Return how many WQEs wait in a shared receive queue."""
    s = srq_row_at(srq)
    return s.returned_count + ((be32(ld_acquire32(s.dbrec + QP_DBREC.rcv)) - s.taken) & PI_MASK)


@device_function
def receives_posted(row):
    """Return how many receive WQEs wait for the QP."""
    q = qp_row_at(row)
    if q.srq != 0:
        return shared_posted(q.srq) + (1 if q.rx_wqe != 0 else 0)
    if q.rq_stride == 0:
        return 0
    producer = be32(ld_acquire32(q.dbrec + QP_DBREC.rcv))
    return (producer - q.rq_ci) & PI_MASK


@engine_function
def take_shared(nic, srq):
    """Take a WQE from a shared receive queue, for a message that begins (IBTA 10.2.9.1). Return its index."""
    s = srq_row_at(srq)
    if s.returned_count != 0:
        s.returned_count -= 1
        index = ld64(s.returned + 8 * s.returned_count)
    else:
        index = s.next
        s.taken += 1
        s.next = (index + 1) & ((1 << s.log) - 1)
        if s.linked:
            s.next = be16(ld16(s.addr + index * s.stride + SRQ_NEXT_SEG.next_wqe_index)) & ((1 << s.log) - 1)
    if s.limit != 0 and shared_posted(srq) < s.limit:
        s.limit = 0  # the event is raised once (IBTA 10.2.9.2)
        raise_event(nic, s.channel, s.cookie, EventType.SRQ_RQ_LIMIT, s.srqn, 0)
    return index


@device_function
def shared_segments(srq, index):
    """Return the address of the data segments of a WQE of a shared receive queue."""
    s = srq_row_at(srq)
    return s.addr + index * s.stride + s.header


@engine_function
def resize_shared(srq, source):
    """Switch to the larger ring that the row at `source` names. It begins with the contents of the old one."""
    s, new = srq_row_at(srq), srq_row_at(source)
    for i in range(s.returned_count):
        st64(new.returned + 8 * i, ld64(s.returned + 8 * i))
    s.addr, s.log, s.returned = new.addr, new.log, new.returned


@engine_function
def return_shared(row):
    """Return the WQE of a message to the shared receive queue: when the QP ends, or drops the message."""
    q = qp_row_at(row)
    if q.srq != 0 and q.rx_wqe != 0:
        s = srq_row_at(q.srq)
        st64(s.returned + 8 * s.returned_count, q.rx_index)
        s.returned_count += 1
        q.rx_wqe = 0


@device_function
def _receive_wqe(nic, row):
    """Return the address of the next receive's segments."""
    q = qp_row_at(row)
    if q.srq == 0:
        return q.rq_addr + (q.rq_ci & ((1 << q.rq_log) - 1)) * q.rq_stride
    if q.rx_wqe == 0:
        q.rx_index = take_shared(nic, q.srq)
        q.rx_wqe = shared_segments(q.srq, q.rx_index)
    return q.rx_wqe


@device_function
def _consume_receive(nic, row):
    """Consume the next receive: return its index."""
    q = qp_row_at(row)
    if q.srq == 0:
        q.rq_ci += 1
        return q.rq_ci - 1
    _receive_wqe(nic, row)
    q.rx_wqe = 0
    return q.rx_index


@device_function
def capacity_of(segment):
    """Return the bytes of a receive's segment; byte_count 0 means 2 GiB, as in a send."""
    nbytes = be32(ld32(segment + DATA_SEG.byte_count))
    return nbytes if nbytes != 0 else INLINE_SEG


@device_function
def _no_receive(nic):
    counters_at(worker_at(nic).counters).out_of_buffer += 1
    return Reason.RNR


@device_function
def _receive_segments(row, wqe):
    """Return how many data segments the receive has."""
    q = qp_row_at(row)
    room = q.rq_stride
    if q.srq != 0:
        room = srq_row_at(q.srq).stride - srq_row_at(q.srq).header
    return count_segments(wqe, room)


@device_function
def count_segments(segments, room):
    """Return how many data segments a receive has, of which `room` bytes can hold some."""
    count = 0
    while count * SEGMENT < room and be32(ld32(segments + count * SEGMENT + DATA_SEG.lkey)) != INVALID_LKEY:
        count += 1
    return count


@engine_function
def receive_scatter(nic, row, offset, total, data, nbytes):
    """Copy bytes [offset, offset + nbytes) of a message into the next receive: return 0, or a reason.

    `total` is the length of the message as far as it is known. Before any byte of a segment is copied, the part of it
    that `total` will fill is checked.
    """
    q = qp_row_at(row)
    wqe = _receive_wqe(nic, row)
    count = _receive_segments(row, wqe)
    pdn = srq_row_at(q.srq).pdn if q.srq != 0 else q.pdn
    room = 0
    for i in range(count):
        room += capacity_of(wqe + i * SEGMENT)
    if total > room:
        return refuse.receive_too_small(nic, total, room)
    segment = wqe
    begin = 0  # where the segment begins in the message
    while nbytes > 0:
        capacity = capacity_of(segment)
        if offset < begin + capacity:
            addr = be64(ld64(segment + DATA_SEG.addr))
            lkey = be32(ld32(segment + DATA_SEG.lkey))
            filled = min(capacity, total - begin)
            target = translate(nic, lkey, pdn, addr, filled, Access.LOCAL_WRITE, Reason.LKEY_UNKNOWN)
            if target < 0:
                return Reason.RECV_LKEY
            part = min(begin + capacity - offset, nbytes)
            if q.service == ServiceType.UD:
                reason = move_now(nic, target + offset - begin, data, part)
            elif q.wire == 0:
                reason = move(nic, target + offset - begin, data, part)
            else:
                reason = place(nic, row, target + offset - begin, data, part)
            if reason != 0:
                return reason
            data += part
            nbytes -= part
            offset += part
        begin += capacity
        segment += SEGMENT
    return 0


@device_function
def fits_cqe(row, nbytes):
    """Return whether the payload of a SEND goes into the CQE. The receive's segments are then ignored."""
    return format_for(qp_row_at(row).cs_res, nbytes) != CqeFormat.NO_INLINE


@engine_function
def fail_scatter(nic, row, reason):
    """Complete the next receive with the error that `receive_scatter` found."""
    if worker_at(nic).stream_count != 0:
        let_arrive(nic, row)
    index = _consume_receive(nic, row)
    syndrome = Syndrome.LOCAL_LENGTH if reason == Reason.RECV_TOO_SMALL else Syndrome.LOCAL_PROT
    fail_receive(nic, row, index, reason, syndrome)


@engine_function
def _receive(nic, row, message):
    m = message_at(message)
    if receives_posted(row) == 0:
        return _no_receive(nic)
    reason = 0
    payload = stage_payload(message, INLINE_64_BYTES) if fits_cqe(row, m.nbytes) else 0
    done = 0
    segment = message + _SEGMENTS
    end = segment + 16 * m.nsegments
    if segment == end:
        reason = receive_scatter(nic, row, 0, 0, 0, 0)
    while segment != end and reason == 0:
        nbytes = ld64(segment + 8)
        if payload != 0:
            reason = move_now(nic, payload + done, ld64(segment), nbytes)
        else:
            reason = receive_scatter(nic, row, done, m.nbytes, ld64(segment), nbytes)
        done += nbytes
        segment += 16
    if reason == Reason.COPY_FAILED:
        return reason
    if reason != 0:
        fail_scatter(nic, row, reason)
        return reason
    if worker_at(nic).touched != 0:
        return 0
    return complete_receive(nic, row, receive_cqe(m.opcode), m.nbytes, m.imm, m.opcode, m.solicited, payload)


@engine_function
def _write_imm(nic, row, message):
    m = message_at(message)
    reason = check_rights(nic, row, m.rkey, m.raddr, m.nbytes, Access.REMOTE_WRITE)
    if reason != 0:
        return reason
    if receives_posted(row) == 0:
        return _no_receive(nic)
    reason = _write(nic, row, message)
    if reason != 0 or worker_at(nic).touched != 0:
        return reason
    return complete_receive(nic, row, receive_cqe(m.opcode), m.nbytes, m.imm, m.opcode, m.solicited, 0)


@engine_function
def complete_receive(nic, row, kind, nbytes, imm, opcode, solicited, head):
    """Write the CQE of the next receive, which a message or immediate data has consumed: return 0 or REMOTE_ABORT.

    `head` is the address of what the CQE carries, or 0: the payload, or who has sent a datagram.
    """
    q = qp_row_at(row)
    if kind == CqeOpcode.RESP_SEND:
        imm = 0
    index = _consume_receive(nic, row)
    form = format_for(q.cs_res, nbytes) if head != 0 and q.service != ServiceType.UD else CqeFormat.NO_INLINE
    said = Completion(
        kind, q.qpn, q.user_index, index, nbytes=nbytes, imm=imm, form=form, head=head, solicited=solicited
    )
    reason = write_cqe(nic, q.recv_cq, said)
    if reason != 0:
        fail_qp(nic, row, index, opcode, reason, RESPONDER)
        return Reason.REMOTE_ABORT
    return 0


@engine_function
def flush_receives(nic, row):
    """Complete every posted receive of a QP in ERR with a flush error: return how many.

    From a shared receive queue, only a receive already taken is flushed. An event then reports that the QP takes no
    more (IBTA 10.2.9.3).
    """
    q = qp_row_at(row)
    count = receives_posted(row)
    if q.srq != 0:
        count = 1 if q.rx_wqe != 0 else 0
    for _ in range(count):
        fail_receive(nic, row, _consume_receive(nic, row), refuse.flushed(nic), Syndrome.WR_FLUSH)
    if q.srq != 0 and q.drained == 0:
        q.drained = 1
        tell(nic, row, EventType.SRQ_LAST_WQE)
    return count
