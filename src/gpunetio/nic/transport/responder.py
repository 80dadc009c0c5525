"""The responder of a QP whose peer is across a wire: executes request packets in order and acknowledges them (IBTA 9.7,
responder side; 9.8 for UC).

The QP's row holds the acknowledgement and the responses that are pending. `serve_pending` sends them when the wire has
room. One acknowledgement answers several requests that arrived together.
"""

from __future__ import annotations

from ...enums import Access
from ...formats.commands import QpState, ServiceType
from ...formats.cqe import INLINE_64_BYTES, Syndrome
from ...formats.packet import (
    ACK_KIND_SHIFT, AETH, ATOMIC_ACK_ETH, ATOMIC_ETH, BTH, IMM_DT, MSN_MASK, NO_CREDITS, RETH, SOLICITED,
    SYNDROME_SHIFT, AckKind, NakCode, PacketOpcode,
)
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, copy, ld32, ld8, st32, st64
from ..memory.copies import copy_payload
from ..memory.keys import translate
from ..memory.staging import abandon_slots, free_if_sent, response_tag, staged_slot
from ..memory.streams import await_copies, copy_failed, copy_status, device_of, write_payload
from ..queues.completion import RESPONDER, fail_qp, stage_payload
from ..queues.operations import (
    has_imm, header_bytes, is_atomic, is_first, is_last, is_masked, receive_cqe_of, returns_data, right_of,
    wqe_opcode_of,
)
from ..queues.psn import distance, is_before, on_wire, packets_of
from ..state import refuse
from ..state.counters import CounterSet
from ..state.dma_stream import DmaStream, Slot
from ..state.message import MESSAGE, Message
from ..state.qp import RESOURCE, QpRow, Resource
from ..state.reasons import Reason
from ..state.worker import WorkerState
from . import masked_atomics
from .execution import (
    atomic, atomic_address, authorize, check_length, check_rights, complete_receive, fail_scatter, fits_cqe,
    receive_scatter, receives_posted,
)
from .packets import close_packet, get_be64, open_packet, write_bth

_ACK = AckKind.ACK << ACK_KIND_SHIFT | NO_CREDITS
_RNR_NAK, _NAK = AckKind.RNR_NAK << ACK_KIND_SHIFT, AckKind.NAK << ACK_KIND_SHIFT
_SEQUENCE, _INVALID = _NAK | NakCode.PSN_SEQUENCE, _NAK | NakCode.INVALID_REQUEST
_ACCESS, _OPERATION = _NAK | NakCode.REMOTE_ACCESS, _NAK | NakCode.REMOTE_OPERATION

_ATOMIC_BYTES, _SMALL_ATOMIC_BYTES = 8, 4  # of a word; only masked atomics have words of 4 bytes

# QP_ROW.rx_kind: the message that has begun but not ended.
_NONE, _SENDING, _WRITING = 0, 1, 2


# --- what is pending -----------------------------------------------------------------------------------------------


@device_function
def _schedule(worker: WorkerState, qp: QpRow) -> None:
    """Add the QP to the list of QPs that have something pending for their peer."""
    if qp.pending == 0:
        qp.pending = 1
        st64(worker.pending + 8 * worker.pending_count, qp)
        worker.pending_count += 1


@device_function
def _schedule_ack(worker: WorkerState, qp: QpRow, syndrome: int, psn: int) -> None:
    """Schedule an acknowledgement or NAK. It replaces all earlier ones that were not sent yet."""
    qp.ack_pending = 1
    qp.ack_syndrome, qp.ack_psn = syndrome, on_wire(psn)
    _schedule(worker, qp)


@device_function
def _write_aeth(qp: QpRow, at: int, syndrome: int) -> None:
    st32(at + AETH.syndrome_msn, be32(syndrome << SYNDROME_SHIFT | qp.msn & MSN_MASK))


@device_function
def _nak_of(worker: WorkerState, reason: int) -> int:
    """Return the syndrome of the NAK that tells the peer why its request was refused (IBTA table 49)."""
    syndrome = ld8(worker.syndromes + reason)
    if syndrome == Syndrome.REMOTE_INVAL_REQ:
        return _INVALID
    return _ACCESS if syndrome == Syndrome.REMOTE_ACCESS else _OPERATION


@engine_function
def _fail_response(worker: WorkerState, qp: QpRow, resource: Resource, reason: int) -> None:
    """Fail a READ whose memory no longer exists or cannot be fetched."""
    resource.todo = 0
    fail_qp(worker, qp, 0, resource.opcode, reason, RESPONDER)
    _schedule_ack(worker, qp, _nak_of(worker, reason), resource.first + resource.next)


@engine_function
def _staged_response(worker: WorkerState, qp: QpRow, resource: Resource, offset: int) -> int:
    """Return the slot with byte `offset` of a READ of device memory: 0 if it is not filled yet, or minus a reason."""
    message = worker.message
    rkey, va, right = resource.rkey, resource.va, Access.REMOTE_READ
    source = translate(worker, rkey, qp.pdn, va, resource.nbytes, right, Reason.RKEY_UNKNOWN)
    if source < 0:
        return source
    st64(message + MESSAGE.segments, source)
    st64(message + MESSAGE.segments + 8, resource.nbytes)
    return staged_slot(worker, qp, response_tag(resource.serial), message, offset, resource.nbytes)


@engine_function
def _send_response(worker: WorkerState, qp: QpRow, resource: Resource) -> int:
    """Send a READ's or atomic's response: return 1 if all is sent, 0 if the wire is full, 2 if the READ has failed."""
    while resource.todo > 0:
        psn = resource.first + resource.next
        last = resource.todo == 1
        if is_atomic(resource.opcode):
            bth = open_packet(worker, qp, qp.peer_life, BTH.size + AETH.size + ATOMIC_ACK_ETH.size)
            if bth == 0:
                return 0
            write_bth(qp, bth, PacketOpcode.RC_ATOMIC_ACKNOWLEDGE, 0, 0, 0, psn)
            _write_aeth(qp, bth + BTH.size, _ACK)
            at = bth + BTH.size + AETH.size
            st32(at + ATOMIC_ACK_ETH.original, be32(resource.nbytes >> 32))  # an atomic's result
            st32(at + ATOMIC_ACK_ETH.original + 4, be32(resource.nbytes))
            close_packet(worker, qp, bth, BTH.size + AETH.size + ATOMIC_ACK_ETH.size, 0)
        else:
            offset = resource.next * qp.mtu
            part = min(qp.mtu, resource.nbytes - offset)
            source = 0
            if part > 0:
                rkey, va, right = resource.rkey, resource.va + offset, Access.REMOTE_READ
                source = translate(worker, rkey, qp.pdn, va, part, right, Reason.RKEY_UNKNOWN)
                if source < 0:  # deregistered since the request was accepted
                    CounterSet(worker.counters).resp_remote_access_errors += 1
                    _fail_response(worker, qp, resource, -source)
                    return 2
            slot = 0
            if device_of(source) != 0:
                slot = _staged_response(worker, qp, resource, offset)
                if slot == 0:
                    return 0
                if slot < 0:
                    _fail_response(worker, qp, resource, -slot)
                    return 2
                source = Slot(slot).address + offset - Slot(slot).begin
            operation = PacketOpcode.RC_READ_RESPONSE_MIDDLE
            if resource.next == 0:
                operation = PacketOpcode.RC_READ_RESPONSE_ONLY if last else PacketOpcode.RC_READ_RESPONSE_FIRST
            elif last:
                operation = PacketOpcode.RC_READ_RESPONSE_LAST
            headers = BTH.size + (0 if operation == PacketOpcode.RC_READ_RESPONSE_MIDDLE else AETH.size)
            pad = -part & 3
            bth = open_packet(worker, qp, qp.peer_life, headers + part + pad)
            if bth == 0:
                return 0
            write_bth(qp, bth, operation, 0, pad, 0, psn)
            if operation != PacketOpcode.RC_READ_RESPONSE_MIDDLE:
                _write_aeth(qp, bth + BTH.size, _ACK)
            at = bth + headers
            if pad:
                st32((at + part) & -4, 0)
            copy_payload(worker, at, source, part)
            close_packet(worker, qp, bth, headers + part + pad, part)
            if slot != 0:
                free_if_sent(Slot(slot), offset + part)
        resource.next += 1
        resource.todo -= 1
        if resource.todo == 0:
            resource.answered = 1
    return 1


@engine_function
def _all_moved(worker: WorkerState, qp: QpRow) -> int:
    """Return 1 if the bytes to be acknowledged are in place, 0 if they are on their way, -1 if a copy failed.

    A failed copy also fails the QP. Whatever was owed, the NAK is then for the first packet of those bytes.
    """
    state = copy_status(DmaStream(qp.stream), qp.fence, qp.failures)
    if state < 0:
        fail_qp(worker, qp, 0, WqeOpcode.RDMA_WRITE, copy_failed(worker, DmaStream(qp.stream), 0, 0), RESPONDER)
        qp.expect_psn = qp.fence_psn
        _schedule_ack(worker, qp, _OPERATION, qp.fence_psn)
    if state != 0:
        qp.stream = 0
    return state


@engine_function
def serve_pending(worker: WorkerState, qp: QpRow) -> int:
    """Send what a QP owes: return 1 if all is sent, 0 if the wire is full or bytes are still on their way."""
    if qp.state == QpState.RST or qp.wire == 0:
        return 1
    if qp.stream != 0 and _all_moved(worker, qp) == 0:
        return 0
    if qp.res_todo:
        oldest = max(qp.res_head - qp.max_dest_rd, 0)
        for i in range(oldest, qp.res_head):
            sent = _send_response(worker, qp, Resource(qp.resources + i % qp.max_dest_rd * RESOURCE.size))
            if sent == 0:
                return 0
            if sent == 2:
                break  # no response after it is sent
        qp.res_todo = 0
    if qp.ack_pending:
        bth = open_packet(worker, qp, qp.peer_life, BTH.size + AETH.size)
        if bth == 0:
            return 0
        write_bth(qp, bth, PacketOpcode.RC_ACKNOWLEDGE, 0, 0, 0, qp.ack_psn)
        _write_aeth(qp, bth + BTH.size, qp.ack_syndrome)
        close_packet(worker, qp, bth, BTH.size + AETH.size, 0)
        qp.ack_pending = 0
    return 1


# --- refusals ------------------------------------------------------------------------------------------------------


@engine_function
def _refuse(worker: WorkerState, qp: QpRow, opcode: int, reason: int) -> None:
    """Refuse the expected request: an RC QP goes to ERR and its peer gets a NAK. UC drops the message."""
    counters = CounterSet(worker.counters)
    qp.rx_kind = _NONE
    if qp.service != ServiceType.RC:
        counters.rx_uc_dropped += 1
        return
    counters.rx_refused += 1
    fail_qp(worker, qp, 0, opcode, reason, RESPONDER)
    _schedule_ack(worker, qp, _nak_of(worker, reason), qp.expect_psn)


@engine_function
def _refuse_packet(worker: WorkerState, qp: QpRow, opcode: int, nbytes: int) -> None:
    """Refuse a packet that is out of sequence within its message, or whose length is wrong (IBTA 9.7.4.1)."""
    _refuse(worker, qp, opcode, refuse.bad_request(worker, nbytes, qp.rx_kind, qp.rx_done))


@engine_function
def _not_ready(worker: WorkerState, qp: QpRow) -> None:
    """Handle a message without a posted receive: RC owes an RNR NAK, UC drops the message."""
    CounterSet(worker.counters).out_of_buffer += 1
    if qp.service != ServiceType.RC:
        qp.rx_kind = _NONE
        return
    qp.nak_sent = 1  # the peer also retransmits the packets behind this one
    _schedule_ack(worker, qp, _RNR_NAK | qp.min_rnr_code, qp.expect_psn)


# --- SEND and WRITE ------------------------------------------------------------------------------------------------
#
# A packet of a SEND or WRITE goes through the checks of IBTA 9.7.4.1 in their order: sequence, resources, rights and
# key, length. Then it is executed, and the last one of a message completes it. Each step returns whether the next one
# follows; otherwise it has refused the packet.


@device_function
def _writes(operation: int) -> bool:
    """Return whether a packet belongs to a WRITE; else it belongs to a SEND."""
    return right_of(wqe_opcode_of(operation)) != 0


@device_function
def _check_sequence(worker: WorkerState, qp: QpRow, operation: int, nbytes: int, payload: int, pad: int) -> int:
    """Check that a packet continues the message at hand and has the length of its kind."""
    kind = _WRITING if _writes(operation) else _SENDING
    first, last = is_first(operation), is_last(operation)
    if (
        payload < 0
        or payload > qp.mtu
        or (not last and (payload != qp.mtu or pad != 0))
        or (last and not first and payload == 0)
        or qp.rx_kind != (_NONE if first else kind)
    ):
        _refuse_packet(worker, qp, wqe_opcode_of(operation), nbytes)
        return 0
    return 1


@engine_function
def _check_resources(worker: WorkerState, qp: QpRow, operation: int, headers: int) -> int:
    """Check that a receive is posted for a message that needs one."""
    writes, first = _writes(operation), is_first(operation)
    needs_receive = has_imm(operation) if writes else first
    if not needs_receive or receives_posted(qp) != 0:
        return 1
    # If the QP does not allow the WRITE, waiting for a receive would be useless.
    reason = _may_write(worker, qp, headers) if writes and first else 0
    if reason != 0:
        _refuse(worker, qp, WqeOpcode.RDMA_WRITE, reason)
    else:
        _not_ready(worker, qp)
    return 0


@engine_function
def _may_write(worker: WorkerState, qp: QpRow, reth: int) -> int:
    """Return 0 if the QP allows the WRITE of this RETH, or the reason for a refusal."""
    key, nbytes = be32(ld32(reth + RETH.rkey)), be32(ld32(reth + RETH.dma_length))
    return check_rights(worker, qp, key, get_be64(reth + RETH.va), nbytes, Access.REMOTE_WRITE)


@engine_function
def _check_write(worker: WorkerState, qp: QpRow, reth: int) -> int:
    """Begin a WRITE: check its length, rights and key."""
    va = get_be64(reth + RETH.va)
    key = be32(ld32(reth + RETH.rkey))
    nbytes = be32(ld32(reth + RETH.dma_length))
    CounterSet(worker.counters).rx_write_requests += 1
    reason = check_length(worker, qp, nbytes)
    if reason != 0:
        _refuse(worker, qp, WqeOpcode.RDMA_WRITE, reason)
        return 0
    address = authorize(worker, qp, key, va, nbytes, Access.REMOTE_WRITE)
    if address < 0:
        _refuse(worker, qp, WqeOpcode.RDMA_WRITE, -address)
        return 0
    qp.rx_addr, qp.rx_key, qp.rx_nbytes = va, key, nbytes
    return 1


@engine_function
def _begin(worker: WorkerState, qp: QpRow, operation: int, headers: int) -> int:
    """Begin a message with its first packet."""
    if not is_first(operation):
        return 1
    qp.rx_done = 0
    writes = _writes(operation)
    if writes and _check_write(worker, qp, headers) == 0:
        return 0
    qp.rx_kind = _WRITING if writes else _SENDING
    return 1


@device_function
def _check_length(worker: WorkerState, qp: QpRow, operation: int, nbytes: int, payload: int) -> int:
    """Check that a WRITE has the length that its RETH named, and that a SEND is not too long for the QP."""
    length = qp.rx_done + payload
    if _writes(operation):
        if length > qp.rx_nbytes or (is_last(operation) and length != qp.rx_nbytes):
            _refuse_packet(worker, qp, wqe_opcode_of(operation), nbytes)
            return 0
        return 1
    reason = check_length(worker, qp, length)
    if reason != 0:
        _refuse(worker, qp, wqe_opcode_of(operation), reason)
        return 0
    return 1


@engine_function
def _place_write(worker: WorkerState, qp: QpRow, data: int, nbytes: int) -> int:
    """Place the next bytes of a WRITE. The key is checked again: it may have been invalidated."""
    if nbytes == 0:
        return 1
    at = qp.rx_addr + qp.rx_done
    address = translate(worker, qp.rx_key, qp.pdn, at, nbytes, Access.REMOTE_WRITE, Reason.RKEY_UNKNOWN)
    if address < 0:
        CounterSet(worker.counters).resp_remote_access_errors += 1
        _refuse(worker, qp, WqeOpcode.RDMA_WRITE, -address)
        return 0
    reason = write_payload(worker, qp, address, data, nbytes)
    if reason != 0:
        _refuse(worker, qp, WqeOpcode.RDMA_WRITE, reason)
        return 0
    return 1


@engine_function
def _place_send(worker: WorkerState, qp: QpRow, data: int, nbytes: int) -> int:
    """Place the next bytes of a SEND. If they do not fit, the receive completes in error."""
    reason = receive_scatter(worker, qp, qp.rx_done, qp.rx_done + nbytes, data, nbytes)
    if reason == 0:
        return 1
    fail_scatter(worker, qp, reason)
    _refuse(worker, qp, WqeOpcode.SEND, reason)
    return 0


@engine_function
def _complete(worker: WorkerState, qp: QpRow, operation: int, bth: int, carried: int) -> int:
    """Complete a message with its last packet. `carried` is the address of the payload for the CQE, or 0."""
    qp.rx_kind = _NONE
    qp.msn += 1
    cqe = receive_cqe_of(operation)
    if cqe == 0:
        return 1
    opcode = wqe_opcode_of(operation)
    reason = await_copies(worker, qp) if qp.stream != 0 else 0
    if reason != 0:
        if not _writes(operation):
            fail_scatter(worker, qp, reason)
        _refuse(worker, qp, opcode, reason)
        return 0
    imm = 0
    if has_imm(operation):  # the last header
        imm = be32(ld32(bth + BTH.size + header_bytes(operation) - IMM_DT.size + IMM_DT.imm))
    solicited = ld8(bth + BTH.se_m_pad_tver) & SOLICITED
    if complete_receive(worker, qp, cqe, qp.rx_done, imm, opcode, solicited, carried) != 0:
        CounterSet(worker.counters).rx_refused += 1
        if qp.service == ServiceType.RC:
            _schedule_ack(worker, qp, _OPERATION, qp.expect_psn)
        return 0
    return 1


@engine_function
def _take_data(worker: WorkerState, qp: QpRow, operation: int, bth: int, nbytes: int, pad: int) -> int:
    """Execute a packet of a SEND or WRITE that has the expected PSN: return 1, or 0 if it was not executed."""
    headers = bth + BTH.size
    data = headers + header_bytes(operation)
    payload = nbytes - BTH.size - header_bytes(operation) - pad
    if worker.payload_bytes != 0:  # the peer's memory has the payload, and the packet none
        data, payload = worker.payload, worker.payload_bytes if payload == 0 else -1
    if not (
        _check_sequence(worker, qp, operation, nbytes, payload, pad)
        and _check_resources(worker, qp, operation, headers)
        and _begin(worker, qp, operation, headers)
        and _check_length(worker, qp, operation, nbytes, payload)
    ):
        return 0
    carried = 0
    if _writes(operation):
        if _place_write(worker, qp, data, payload) == 0:
            return 0
    elif is_first(operation) and is_last(operation) and fits_cqe(qp, payload):
        carried = stage_payload(Message(worker.message), INLINE_64_BYTES)
        copy(carried, data, payload)
    elif _place_send(worker, qp, data, payload) == 0:
        return 0
    qp.rx_done += payload
    CounterSet(worker.counters).rdma_rx_bytes += payload
    return _complete(worker, qp, operation, bth, carried) if is_last(operation) else 1


# --- READ and atomics ----------------------------------------------------------------------------------------------


@engine_function
def _accept(worker: WorkerState, qp: QpRow, opcode: int, packets: int) -> int:
    """Return the address of a resource for a request that gets a response of its own, or 0 if none is free.

    A resource whose response is being retransmitted for a duplicate request counts as free. The peer's new request
    shows that it has received that response: IBTA 9.7.4.1.3 limits how many requests it has in flight.
    """
    if qp.max_dest_rd == 0:
        return 0
    resource = Resource(qp.resources + qp.res_head % qp.max_dest_rd * RESOURCE.size)
    if qp.res_head >= qp.max_dest_rd and resource.answered == 0:
        return 0
    if resource.todo != 0 and worker.stream_count != 0:
        abandon_slots(worker, qp, response_tag(resource.serial))
    resource.opcode, resource.first, resource.packets = opcode, qp.expect_psn, packets
    resource.next, resource.todo, resource.answered = 0, packets, 0
    resource.serial = qp.res_head
    qp.res_head += 1
    qp.res_todo = 1
    qp.msn += 1
    _schedule(worker, qp)
    return resource


@engine_function
def _take_read(worker: WorkerState, qp: QpRow, bth: int, nbytes: int) -> int:
    """Accept a READ request that is in order: return the packets of its response, or 0 if it is refused."""
    CounterSet(worker.counters).rx_read_requests += 1
    at = bth + BTH.size
    if nbytes != BTH.size + RETH.size:
        _refuse_packet(worker, qp, WqeOpcode.RDMA_READ, nbytes)
        return 0
    va = get_be64(at + RETH.va)
    key, length = be32(ld32(at + RETH.rkey)), be32(ld32(at + RETH.dma_length))
    reason = check_length(worker, qp, length)
    if reason != 0:
        _refuse(worker, qp, WqeOpcode.RDMA_READ, reason)
        return 0
    packets = packets_of(length, qp.mtu)
    address = authorize(worker, qp, key, va, length, Access.REMOTE_READ)
    if address < 0:
        _refuse(worker, qp, WqeOpcode.RDMA_READ, -address)
        return 0
    resource = Resource(_accept(worker, qp, WqeOpcode.RDMA_READ, packets))
    if resource == 0:
        _refuse_packet(worker, qp, WqeOpcode.RDMA_READ, length)
        return 0
    resource.va, resource.rkey, resource.nbytes = va, key, length
    return packets


@engine_function
def _take_atomic(worker: WorkerState, qp: QpRow, operation: int, bth: int, nbytes: int) -> int:
    """Execute an atomic request that is in order: return 1, or 0 if it is refused."""
    CounterSet(worker.counters).rx_atomic_requests += 1
    opcode = wqe_opcode_of(operation)
    masked = is_masked(opcode)
    at = bth + BTH.size
    word = masked_atomics.word_bytes(at) if masked else _ATOMIC_BYTES
    if nbytes != BTH.size + header_bytes(operation) or (word != _ATOMIC_BYTES and word != _SMALL_ATOMIC_BYTES):
        _refuse_packet(worker, qp, opcode, nbytes)
        return 0
    va = get_be64(at + ATOMIC_ETH.va)  # both kinds of header begin alike
    key = be32(ld32(at + ATOMIC_ETH.rkey))
    address = atomic_address(worker, qp, key, va, word, masked)
    if address < 0:
        _refuse(worker, qp, opcode, -address)
        return 0
    resource = Resource(_accept(worker, qp, opcode, 1))
    if resource == 0:
        _refuse_packet(worker, qp, opcode, word)
        return 0
    if masked:
        old = masked_atomics.execute_packet(opcode, address, at)
    else:
        old = atomic(opcode, address, get_be64(at + ATOMIC_ETH.swap_add), get_be64(at + ATOMIC_ETH.compare))
    resource.nbytes = old
    return 1


# --- the packet ----------------------------------------------------------------------------------------------------


@device_function
def _answered_last(qp: QpRow) -> bool:
    """Return whether the latest request was a READ or atomic.

    Only its response may acknowledge it: on a plain acknowledgement, rxe would complete it without its data.
    """
    if qp.res_head == 0:
        return False
    resource = Resource(qp.resources + (qp.res_head - 1) % qp.max_dest_rd * RESOURCE.size)
    return distance(resource.first + resource.packets, qp.expect_psn) == 0


@engine_function
def _take_duplicate(
    worker: WorkerState, qp: QpRow, operation: int, psn: int, ack_request: int, bth: int, nbytes: int
) -> None:
    """Answer a request again that was executed before: its response was lost (IBTA 9.7.5.1.3, 9.9.2.4.2).

    SENDs and WRITEs are acknowledged only where the peer asks for it, as new ones are. If a packet in the middle of its
    retransmission is answered with an acknowledgement of everything, rxe stalls.
    """
    CounterSet(worker.counters).duplicate_request += 1
    opcode = wqe_opcode_of(operation)
    if opcode != WqeOpcode.NOP and not returns_data(opcode):
        if ack_request == 0:
            return
        done = psn if _answered_last(qp) else qp.expect_psn - 1
        # A pending answer that says more stays: a later acknowledgement, or a NAK, which is sent only once.
        if qp.ack_pending == 0 or (qp.ack_syndrome == _ACK and not is_before(done, qp.ack_psn)):
            _schedule_ack(worker, qp, _ACK, done)
        return
    for i in range(max(qp.res_head - qp.max_dest_rd, 0), qp.res_head):
        resource = Resource(qp.resources + i % qp.max_dest_rd * RESOURCE.size)
        begun = distance(psn, resource.first)
        reads = opcode == WqeOpcode.RDMA_READ
        if begun >= resource.packets or reads == is_atomic(resource.opcode):
            continue
        if reads:
            if nbytes != BTH.size + RETH.size:
                return
            at = bth + BTH.size
            va = get_be64(at + RETH.va)
            length = be32(ld32(at + RETH.dma_length))
            offset = begun * qp.mtu
            rkey = be32(ld32(at + RETH.rkey))
            if va != resource.va + offset or length > resource.nbytes - offset or rkey != resource.rkey:
                return  # not the range of the original request
            resource.first, resource.va, resource.nbytes = psn, va, length
            resource.packets = packets_of(length, qp.mtu)
            if worker.stream_count != 0:
                abandon_slots(worker, qp, response_tag(resource.serial))
        resource.next, resource.todo = 0, resource.packets
        qp.res_todo = 1
        _schedule(worker, qp)
        return


@device_function
def _follows(worker: WorkerState, qp: QpRow, operation: int, psn: int, ack_request: int, bth: int, nbytes: int) -> bool:
    """Return whether an RC packet has the expected PSN, or else answer a duplicate or a gap."""
    if psn == qp.expect_psn:
        qp.nak_sent = 0
        return True
    if is_before(psn, qp.expect_psn):
        _take_duplicate(worker, qp, operation, psn, ack_request, bth, nbytes)
        return False
    CounterSet(worker.counters).out_of_sequence += 1
    if qp.nak_sent == 0:  # one NAK for a gap (IBTA 9.7.5.1.1)
        qp.nak_sent = 1
        _schedule_ack(worker, qp, _SEQUENCE, qp.expect_psn)
    return False


@device_function
def _resume(worker: WorkerState, qp: QpRow, operation: int, psn: int) -> bool:
    """Return whether to take a UC packet: after a gap, only one that begins a message (IBTA 9.8.2.2)."""
    in_order = psn == qp.expect_psn
    qp.expect_psn = psn
    if is_first(operation):
        qp.rx_kind = _NONE  # the end of any message before is lost
        return True
    if in_order and qp.rx_kind != _NONE:
        return True
    CounterSet(worker.counters).rx_uc_dropped += 1
    qp.rx_kind = _NONE
    return False


@engine_function
def take_request(
    worker: WorkerState, qp: QpRow, operation: int, psn: int, ack_request: int, bth: int, nbytes: int, pad: int
) -> None:
    """Take a request packet for a QP in RTR or RTS. `nbytes` counts from its BTH on and includes the padding."""
    if qp.service != ServiceType.RC:
        if _resume(worker, qp, operation, psn) and _take_data(worker, qp, operation, bth, nbytes, pad) != 0:
            CounterSet(worker.counters).rx_accepted += 1
        qp.expect_psn = on_wire(psn + 1)
        return
    if not _follows(worker, qp, operation, psn, ack_request, bth, nbytes):
        return
    opcode = wqe_opcode_of(operation)
    reason = 0
    packets = 0
    if opcode != WqeOpcode.NOP and not returns_data(opcode):
        packets = _take_data(worker, qp, operation, bth, nbytes, pad)
    elif opcode == WqeOpcode.NOP or qp.rx_kind != _NONE:
        _refuse_packet(worker, qp, operation, nbytes)
    else:
        if qp.stream != 0:  # READs and atomics see the writes before them
            reason = await_copies(worker, qp)
        if reason != 0:
            _refuse(worker, qp, WqeOpcode.RDMA_READ, reason)
        elif is_atomic(opcode):
            packets = _take_atomic(worker, qp, operation, bth, nbytes)
        else:
            packets = _take_read(worker, qp, bth, nbytes)
    if packets == 0:
        return
    CounterSet(worker.counters).rx_accepted += 1
    qp.expect_psn = on_wire(qp.expect_psn + packets)
    if returns_data(opcode):
        # At once, if the wire has room: a READ must see memory before later requests change it.
        serve_pending(worker, qp)
    elif ack_request:
        _schedule_ack(worker, qp, _ACK, psn)
