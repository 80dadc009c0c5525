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
)
from ..memory.keys import translate
from ..memory.streams import copy_and_wait, device_of, drain_copies, start_copy, write_payload
from ..queues.completion import RESPONDER, Completion, fail_qp, fail_receive, format_for, stage_payload, write_cqe
from ..queues.events import raise_event, raise_qp_event
from ..queues.operations import is_atomic, is_masked, receive_cqe, returns_data, right_of
from ..state import refuse
from ..state.counters import CounterSet
from ..state.cq import Channel, CqRow
from ..state.message import MESSAGE, Message
from ..state.qp import EXTENDED_ATOMICS, QpRow
from ..state.reasons import Reason
from ..state.srq import SrqRow
from ..state.worker import WorkerState
from .masked_atomics import masked_atomic

_SEGMENTS = MESSAGE.segments


@device_function
def establish(worker: WorkerState, qp: QpRow) -> None:
    """Raise COMM_EST on the first request in RTR: the peer may send already (IBTA 11.6.3.2)."""
    if qp.state == QpState.RTR and qp.established == 0:
        qp.established = 1
        raise_qp_event(worker, qp, EventType.COMM_EST)


@device_function
def check_length(worker: WorkerState, qp: QpRow, nbytes: int) -> int:
    """Return 0 if the QP takes messages of this length (log_msg_max), or the reason for a refusal."""
    return 0 if nbytes <= qp.msg_max else refuse.message_too_long(worker, nbytes, qp.msg_max)


@engine_function
def respond(worker: WorkerState, qp: QpRow, message: Message) -> int:
    """Execute the request at `message` on the QP at `qp`: return 0, or the reason for a refusal.

    Every refusal but RNR takes an RC QP to ERR (IBTA 9.9.3, class C). A failed copy fails the requester only. If a
    stream carries bytes of the request (`WORKER.touched`), the receive completes once they are in place (moving.py).
    """
    opcode = message.opcode
    establish(worker, qp)
    counters = CounterSet(worker.counters)
    counters.rdma_rx_bytes += message.nbytes
    reason = check_length(worker, qp, message.nbytes)
    if reason == 0:
        reason = _execute(worker, qp, message, opcode)
    reliable = qp.service == ServiceType.RC
    if reason != 0 and reason != Reason.RNR and reason != Reason.COPY_FAILED and reliable:
        fail_qp(worker, qp, message.index, opcode, reason, RESPONDER)
    return reason


@engine_function
def _execute(worker: WorkerState, qp: QpRow, message: Message, opcode: int) -> int:
    counters = CounterSet(worker.counters)
    if right_of(opcode) == 0:
        return _receive(worker, qp, message)
    if is_atomic(opcode):
        counters.rx_atomic_requests += 1
        return _atomic(worker, qp, message, opcode)
    if returns_data(opcode):
        counters.rx_read_requests += 1
        return _read(worker, qp, message)
    counters.rx_write_requests += 1
    if receive_cqe(opcode) != 0:
        return _write_imm(worker, qp, message)
    return _write(worker, qp, message)


@device_function
def check_rights(worker: WorkerState, qp: QpRow, key: int, addr: int, nbytes: int, right: int) -> int:
    """Return 0 if the QP itself grants this right (IBTA 9.7.4.1.2), or the reason for a refusal."""
    return 0 if qp.rights & right == right else refuse.remote_access(worker, key, addr, nbytes, qp.rights, right)


@device_function
def authorize(worker: WorkerState, qp: QpRow, key: int, addr: int, nbytes: int, right: int) -> int:
    """Check the QP's rights, then the key's: return the address of the remote range, or minus a reason.

    The key of an empty request is not checked (IBTA 9.7.4.1.6): its address is 0.
    """
    reason = check_rights(worker, qp, key, addr, nbytes, right)
    if reason != 0:
        return -reason
    if nbytes == 0:
        return 0
    address = translate(worker, key, qp.pdn, addr, nbytes, right, Reason.RKEY_UNKNOWN)
    if address < 0:
        CounterSet(worker.counters).resp_remote_access_errors += 1
    return address


@engine_function
def _write(worker: WorkerState, qp: QpRow, message: Message) -> int:
    address = authorize(worker, qp, message.rkey, message.raddr, message.nbytes, Access.REMOTE_WRITE)
    if address < 0:
        return -address
    return move_segments(worker, message, address, 0)


@engine_function
def _read(worker: WorkerState, qp: QpRow, message: Message) -> int:
    address = authorize(worker, qp, message.rkey, message.raddr, message.nbytes, Access.REMOTE_READ)
    if address < 0:
        return -address
    return move_segments(worker, message, address, 1)


@device_function
def move_segments(worker: WorkerState, message: Message, address: int, scatter: int) -> int:
    """Copy the requester's segments to `address`, or with `scatter` from there into them: return 0, or a reason."""
    segment = message + _SEGMENTS
    end = segment + 16 * message.nsegments
    while segment != end:
        nbytes = ld64(segment + 8)
        own = ld64(segment)
        reason = start_copy(worker, own, address, nbytes) if scatter else start_copy(worker, address, own, nbytes)
        if reason != 0:
            return reason
        address += nbytes
        segment += 16
    return 0


@engine_function
def atomic_address(worker: WorkerState, qp: QpRow, key: int, addr: int, nbytes: int, masked: int) -> int:
    """Return the address of an atomic's word, or minus a reason. `masked`: the QP must allow masked atomics, too."""
    if masked:
        reason = check_rights(worker, qp, key, addr, nbytes, Access.REMOTE_ATOMIC | EXTENDED_ATOMICS)
        if reason != 0:
            return -reason
    if addr & (nbytes - 1):
        return -refuse.misaligned_atomic(worker, key, addr, nbytes)
    address = authorize(worker, qp, key, addr, nbytes, Access.REMOTE_ATOMIC)
    if address > 0 and device_of(address) != 0:
        return -refuse.device_atomic(worker, key, addr, nbytes)
    if address > 0 and address & (nbytes - 1):  # the iova and the memory of the region are aligned differently
        return -refuse.misaligned_atomic(worker, key, address, nbytes)
    return address


@device_function
def atomic(opcode: int, address: int, swap_add: int, compare: int) -> int:
    """Execute an atomic: return the old word. Words are in host byte order.

    On a GPU, those in host memory are atomic for what the GPU does, and not for the CPU.
    """
    if opcode == WqeOpcode.ATOMIC_FA:
        return fetch_add_acq_rel_gpu64(address, swap_add)
    return cas_acq_rel_gpu64(address, compare, swap_add)


@engine_function
def execute_atomic(worker: WorkerState, message: Message, opcode: int, address: int) -> int:
    """Execute the atomic at `message` on a word that was checked: return 0, or a reason."""
    # The result travels in `compare`, which is no longer needed.
    if is_masked(opcode):
        old = masked_atomic(
            opcode, address, message.nbytes, message.swap_add, message.compare, message.swap_mask, message.compare_mask
        )
        message.compare = be32(old) if message.nbytes == 4 else old  # as in mlx5: only 8-byte words are in host order
    else:
        message.compare = atomic(opcode, address, message.swap_add, message.compare)
    return move_segments(worker, message, message + MESSAGE.compare, 1)


@engine_function
def _atomic(worker: WorkerState, qp: QpRow, message: Message, opcode: int) -> int:
    address = atomic_address(worker, qp, message.rkey, message.raddr, message.nbytes, is_masked(opcode))
    return -address if address < 0 else execute_atomic(worker, message, opcode, address)


# --- receives ------------------------------------------------------------------------------------------------------


@device_function
def shared_posted(srq: SrqRow) -> int:
    """Return how many WQEs wait in a shared receive queue."""
    return srq.returned_count + ((be32(ld_acquire32(srq.dbrec + QP_DBREC.rcv)) - srq.taken) & PI_MASK)


@device_function
def receives_posted(qp: QpRow) -> int:
    """Return how many receive WQEs wait for the QP."""
    if qp.srq != 0:
        return shared_posted(SrqRow(qp.srq)) + (1 if qp.rx_wqe != 0 else 0)
    if qp.rq_stride == 0:
        return 0
    producer = be32(ld_acquire32(qp.dbrec + QP_DBREC.rcv))
    return (producer - qp.rq_ci) & PI_MASK


@engine_function
def take_shared(worker: WorkerState, srq: SrqRow) -> int:
    """Take a WQE from a shared receive queue, for a message that begins (IBTA 10.2.9.1). Return its index."""
    if srq.returned_count != 0:
        srq.returned_count -= 1
        index = ld64(srq.returned + 8 * srq.returned_count)
    else:
        index = srq.next
        srq.taken += 1
        srq.next = (index + 1) & ((1 << srq.log) - 1)
        if srq.linked:
            srq.next = be16(ld16(srq.addr + index * srq.stride + SRQ_NEXT_SEG.next_wqe_index)) & ((1 << srq.log) - 1)
    if srq.limit != 0 and shared_posted(srq) < srq.limit:
        srq.limit = 0  # the event is raised once (IBTA 10.2.9.2)
        raise_event(worker, Channel(srq.channel), srq.cookie, EventType.SRQ_RQ_LIMIT, srq.srqn, 0)
    return index


@device_function
def shared_segments(srq: SrqRow, index: int) -> int:
    """Return the address of the data segments of a WQE of a shared receive queue."""
    return srq.addr + index * srq.stride + srq.header


@engine_function
def resize_shared(srq: SrqRow, new: SrqRow) -> None:
    """Switch to the larger ring that the row at `new` names. It begins with the contents of the old one."""
    for i in range(srq.returned_count):
        st64(new.returned + 8 * i, ld64(srq.returned + 8 * i))
    srq.addr, srq.log, srq.returned = new.addr, new.log, new.returned


@engine_function
def return_shared(qp: QpRow) -> None:
    """Return the WQE of a message to the shared receive queue: when the QP ends, or drops the message."""
    if qp.srq != 0 and qp.rx_wqe != 0:
        srq = SrqRow(qp.srq)
        st64(srq.returned + 8 * srq.returned_count, qp.rx_index)
        srq.returned_count += 1
        qp.rx_wqe = 0


@device_function
def _receive_wqe(worker: WorkerState, qp: QpRow) -> int:
    """Return the address of the next receive's segments."""
    if qp.srq == 0:
        return qp.rq_addr + (qp.rq_ci & ((1 << qp.rq_log) - 1)) * qp.rq_stride
    if qp.rx_wqe == 0:
        qp.rx_index = take_shared(worker, SrqRow(qp.srq))
        qp.rx_wqe = shared_segments(SrqRow(qp.srq), qp.rx_index)
    return qp.rx_wqe


@device_function
def _consume_receive(worker: WorkerState, qp: QpRow) -> int:
    """Consume the next receive: return its index."""
    if qp.srq == 0:
        qp.rq_ci += 1
        return qp.rq_ci - 1
    _receive_wqe(worker, qp)
    qp.rx_wqe = 0
    return qp.rx_index


@device_function
def capacity_of(segment: int) -> int:
    """Return the bytes of a receive's segment; byte_count 0 means 2 GiB, as in a send."""
    nbytes = be32(ld32(segment + DATA_SEG.byte_count))
    return nbytes if nbytes != 0 else INLINE_SEG


@device_function
def _no_receive(worker: WorkerState) -> int:
    CounterSet(worker.counters).out_of_buffer += 1
    return Reason.RNR


@device_function
def _receive_segments(qp: QpRow, wqe: int) -> int:
    """Return how many data segments the receive has."""
    room = qp.rq_stride
    if qp.srq != 0:
        room = SrqRow(qp.srq).stride - SrqRow(qp.srq).header
    return count_segments(wqe, room)


@device_function
def count_segments(segments: int, room: int) -> int:
    """Return how many data segments a receive has, of which `room` bytes can hold some."""
    count = 0
    while count * SEGMENT < room and be32(ld32(segments + count * SEGMENT + DATA_SEG.lkey)) != INVALID_LKEY:
        count += 1
    return count


@engine_function
def receive_scatter(worker: WorkerState, qp: QpRow, offset: int, total: int, data: int, nbytes: int) -> int:
    """Copy bytes [offset, offset + nbytes) of a message into the next receive: return 0, or a reason.

    `total` is the length of the message as far as it is known. Before any byte of a segment is copied, the part of it
    that `total` will fill is checked.
    """
    wqe = _receive_wqe(worker, qp)
    count = _receive_segments(qp, wqe)
    pdn = SrqRow(qp.srq).pdn if qp.srq != 0 else qp.pdn
    room = 0
    for i in range(count):
        room += capacity_of(wqe + i * SEGMENT)
    if total > room:
        return refuse.receive_too_small(worker, total, room)
    segment = wqe
    begin = 0  # where the segment begins in the message
    while nbytes > 0:
        capacity = capacity_of(segment)
        if offset < begin + capacity:
            addr = be64(ld64(segment + DATA_SEG.addr))
            lkey = be32(ld32(segment + DATA_SEG.lkey))
            filled = min(capacity, total - begin)
            target = translate(worker, lkey, pdn, addr, filled, Access.LOCAL_WRITE, Reason.LKEY_UNKNOWN)
            if target < 0:
                return Reason.RECV_LKEY
            part = min(begin + capacity - offset, nbytes)
            if qp.service == ServiceType.UD:
                reason = copy_and_wait(worker, target + offset - begin, data, part)
            elif qp.wire == 0:
                reason = start_copy(worker, target + offset - begin, data, part)
            else:
                reason = write_payload(worker, qp, target + offset - begin, data, part)
            if reason != 0:
                return reason
            data += part
            nbytes -= part
            offset += part
        begin += capacity
        segment += SEGMENT
    return 0


@device_function
def fits_cqe(qp: QpRow, nbytes: int) -> bool:
    """Return whether the payload of a SEND goes into the CQE. The receive's segments are then ignored."""
    return format_for(qp.cs_res, nbytes) != CqeFormat.NO_INLINE


@engine_function
def fail_scatter(worker: WorkerState, qp: QpRow, reason: int) -> None:
    """Complete the next receive with the error that `receive_scatter` found."""
    if worker.stream_count != 0:
        drain_copies(worker, qp)
    index = _consume_receive(worker, qp)
    syndrome = Syndrome.LOCAL_LENGTH if reason == Reason.RECV_TOO_SMALL else Syndrome.LOCAL_PROT
    fail_receive(worker, qp, index, reason, syndrome)


@engine_function
def _receive(worker: WorkerState, qp: QpRow, message: Message) -> int:
    if receives_posted(qp) == 0:
        return _no_receive(worker)
    reason = 0
    payload = stage_payload(message, INLINE_64_BYTES) if fits_cqe(qp, message.nbytes) else 0
    done = 0
    segment = message + _SEGMENTS
    end = segment + 16 * message.nsegments
    if segment == end:
        reason = receive_scatter(worker, qp, 0, 0, 0, 0)
    while segment != end and reason == 0:
        nbytes = ld64(segment + 8)
        if payload != 0:
            reason = copy_and_wait(worker, payload + done, ld64(segment), nbytes)
        else:
            reason = receive_scatter(worker, qp, done, message.nbytes, ld64(segment), nbytes)
        done += nbytes
        segment += 16
    if reason == Reason.COPY_FAILED:
        return reason
    if reason != 0:
        fail_scatter(worker, qp, reason)
        return reason
    if worker.touched != 0:
        return 0
    return complete_receive(
        worker, qp, receive_cqe(message.opcode), message.nbytes, message.imm, message.opcode, message.solicited, payload
    )


@engine_function
def _write_imm(worker: WorkerState, qp: QpRow, message: Message) -> int:
    reason = check_rights(worker, qp, message.rkey, message.raddr, message.nbytes, Access.REMOTE_WRITE)
    if reason != 0:
        return reason
    if receives_posted(qp) == 0:
        return _no_receive(worker)
    reason = _write(worker, qp, message)
    if reason != 0 or worker.touched != 0:
        return reason
    return complete_receive(
        worker, qp, receive_cqe(message.opcode), message.nbytes, message.imm, message.opcode, message.solicited, 0
    )


@engine_function
def complete_receive(
    worker: WorkerState, qp: QpRow, kind: int, nbytes: int, imm: int, opcode: int, solicited: int, head: int
) -> int:
    """Write the CQE of the next receive, which a message or immediate data has consumed: return 0 or REMOTE_ABORT.

    `head` is the address of what the CQE carries, or 0: the payload, or who has sent a datagram.
    """
    if kind == CqeOpcode.RESP_SEND:
        imm = 0
    index = _consume_receive(worker, qp)
    form = format_for(qp.cs_res, nbytes) if head != 0 and qp.service != ServiceType.UD else CqeFormat.NO_INLINE
    said = Completion(
        kind, qp.qpn, qp.user_index, index, nbytes=nbytes, imm=imm, form=form, head=head, solicited=solicited
    )
    reason = write_cqe(worker, CqRow(qp.recv_cq), said)
    if reason != 0:
        fail_qp(worker, qp, index, opcode, reason, RESPONDER)
        return Reason.REMOTE_ABORT
    return 0


@engine_function
def flush_receives(worker: WorkerState, qp: QpRow) -> int:
    """Complete every posted receive of a QP in ERR with a flush error: return how many.

    From a shared receive queue, only a receive already taken is flushed. An event then reports that the QP takes no
    more (IBTA 10.2.9.3).
    """
    count = receives_posted(qp)
    if qp.srq != 0:
        count = 1 if qp.rx_wqe != 0 else 0
    for _ in range(count):
        fail_receive(worker, qp, _consume_receive(worker, qp), refuse.flushed(worker), Syndrome.WR_FLUSH)
    if qp.srq != 0 and qp.drained == 0:
        qp.drained = 1
        raise_qp_event(worker, qp, EventType.SRQ_LAST_WQE)
    return count
