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
)  # fmt: skip
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, copy, ld8, ld32, st32, st64
from ..memory.copies import copy_payload
from ..memory.keys import translate
from ..memory.staging import drop, leave, response_tag, staged
from ..memory.streams import await_moved, copy_failed, ended, device_of, place
from ..queues.completion import RESPONDER, fail_qp, stage_payload
from ..queues.operations import (
    begins, ends, has_imm, header_bytes, is_atomic, is_masked, operation_of, receive_cqe_of, returns_data, right_of,
)  # fmt: skip
from ..queues.psn import distance, is_before, on_wire, packets_of
from ..state import refuse
from ..state.counters import counters_at
from ..state.dma_stream import slot_at
from ..state.message import MESSAGE
from ..state.nic import nic_at
from ..state.qp import RESOURCE, qp_row_at, resource_at
from ..state.reasons import Reason
from ..state.worker import worker_at
from . import masked_atomics
from .execution import (
    atomic, atomic_address, check_length, check_rights, complete_receive, fail_scatter, fits_cqe, authorize,
    receive_scatter, receives_posted,
)  # fmt: skip
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
def _schedule(nic, row):
    """Add the QP to the list of QPs that have something pending for their peer."""
    q = qp_row_at(row)
    if q.pending == 0:
        n = worker_at(nic)
        q.pending = 1
        st64(n.pending + 8 * n.pending_count, row)
        n.pending_count += 1


@device_function
def _schedule_ack(nic, row, syndrome, psn):
    """Schedule an acknowledgement or NAK. It replaces all earlier ones that were not sent yet."""
    q = qp_row_at(row)
    q.ack_pending = 1
    q.ack_syndrome, q.ack_psn = syndrome, on_wire(psn)
    _schedule(nic, row)


@device_function
def _write_aeth(row, at, syndrome):
    st32(at + AETH.syndrome_msn, be32(syndrome << SYNDROME_SHIFT | qp_row_at(row).msn & MSN_MASK))


@device_function
def _nak_of(nic, reason):
    """Return the syndrome of the NAK that tells the peer why its request was refused (IBTA table 49)."""
    syndrome = ld8(nic_at(nic).syndromes + reason)
    if syndrome == Syndrome.REMOTE_INVAL_REQ:
        return _INVALID
    return _ACCESS if syndrome == Syndrome.REMOTE_ACCESS else _OPERATION


@engine_function
def _fail_response(nic, row, resource, reason):
    """Fail a READ whose memory no longer exists or cannot be fetched."""
    e = resource_at(resource)
    e.todo = 0
    fail_qp(nic, row, 0, e.opcode, reason, RESPONDER)
    _schedule_ack(nic, row, _nak_of(nic, reason), e.first + e.next)


@engine_function
def _staged_response(nic, row, resource, offset):
    """Return the slot with byte `offset` of a READ of device memory: 0 if it is not filled yet, or minus a reason."""
    e = resource_at(resource)
    message = worker_at(nic).message
    source = translate(nic, e.rkey, qp_row_at(row).pdn, e.va, e.nbytes, Access.REMOTE_READ, Reason.RKEY_UNKNOWN)
    if source < 0:
        return source
    st64(message + MESSAGE.segments, source)
    st64(message + MESSAGE.segments + 8, e.nbytes)
    return staged(nic, row, response_tag(e.serial), message, offset, e.nbytes)


@engine_function
def _send_response(nic, row, resource):
    """Send a READ's or atomic's response: return 1 if all is sent, 0 if the wire is full, 2 if the READ has failed."""
    q = qp_row_at(row)
    e = resource_at(resource)
    while e.todo > 0:
        psn = e.first + e.next
        last = e.todo == 1
        if is_atomic(e.opcode):
            bth = open_packet(nic, row, q.peer_life, BTH.size + AETH.size + ATOMIC_ACK_ETH.size)
            if bth == 0:
                return 0
            write_bth(row, bth, PacketOpcode.RC_ATOMIC_ACKNOWLEDGE, 0, 0, 0, psn)
            _write_aeth(row, bth + BTH.size, _ACK)
            at = bth + BTH.size + AETH.size
            st32(at + ATOMIC_ACK_ETH.original, be32(e.nbytes >> 32))  # an atomic's result
            st32(at + ATOMIC_ACK_ETH.original + 4, be32(e.nbytes))
            close_packet(nic, row, bth, BTH.size + AETH.size + ATOMIC_ACK_ETH.size, 0)
        else:
            offset = e.next * q.mtu
            part = min(q.mtu, e.nbytes - offset)
            source = 0
            if part > 0:
                source = translate(nic, e.rkey, q.pdn, e.va + offset, part, Access.REMOTE_READ, Reason.RKEY_UNKNOWN)
                if source < 0:  # deregistered since the request was accepted
                    counters_at(worker_at(nic).counters).resp_remote_access_errors += 1
                    _fail_response(nic, row, resource, -source)
                    return 2
            slot = 0
            if device_of(source) != 0:
                slot = _staged_response(nic, row, resource, offset)
                if slot == 0:
                    return 0
                if slot < 0:
                    _fail_response(nic, row, resource, -slot)
                    return 2
                source = slot_at(slot).address + offset - slot_at(slot).begin
            operation = PacketOpcode.RC_READ_RESPONSE_MIDDLE
            if e.next == 0:
                operation = PacketOpcode.RC_READ_RESPONSE_ONLY if last else PacketOpcode.RC_READ_RESPONSE_FIRST
            elif last:
                operation = PacketOpcode.RC_READ_RESPONSE_LAST
            headers = BTH.size + (0 if operation == PacketOpcode.RC_READ_RESPONSE_MIDDLE else AETH.size)
            pad = -part & 3
            bth = open_packet(nic, row, q.peer_life, headers + part + pad)
            if bth == 0:
                return 0
            write_bth(row, bth, operation, 0, pad, 0, psn)
            if operation != PacketOpcode.RC_READ_RESPONSE_MIDDLE:
                _write_aeth(row, bth + BTH.size, _ACK)
            at = bth + headers
            if pad:
                st32((at + part) & -4, 0)
            copy_payload(nic, at, source, part)
            close_packet(nic, row, bth, headers + part + pad, part)
            if slot != 0:
                leave(slot, offset + part)
        e.next += 1
        e.todo -= 1
        if e.todo == 0:
            e.answered = 1
    return 1


@engine_function
def _all_moved(nic, row):
    """Return 1 if the bytes to be acknowledged are in place, 0 if they are on their way, -1 if a copy failed.

    A failed copy also fails the QP. Whatever was owed, the NAK is then for the first packet of those bytes.
    """
    q = qp_row_at(row)
    state = ended(q.stream, q.fence, q.failures)
    if state < 0:
        fail_qp(nic, row, 0, WqeOpcode.RDMA_WRITE, copy_failed(nic, q.stream, 0, 0), RESPONDER)
        q.expect_psn = q.fence_psn
        _schedule_ack(nic, row, _OPERATION, q.fence_psn)
    if state != 0:
        q.stream = 0
    return state


@engine_function
def serve_pending(nic, row):
    """Send what a QP owes: return 1 if all is sent, 0 if the wire is full or bytes are still on their way."""
    q = qp_row_at(row)
    if q.state == QpState.RST or q.wire == 0:
        return 1
    if q.stream != 0 and _all_moved(nic, row) == 0:
        return 0
    if q.res_todo:
        oldest = max(q.res_head - q.max_dest_rd, 0)
        for i in range(oldest, q.res_head):
            sent = _send_response(nic, row, q.resources + i % q.max_dest_rd * RESOURCE.size)
            if sent == 0:
                return 0
            if sent == 2:
                break  # no response after it is sent
        q.res_todo = 0
    if q.ack_pending:
        bth = open_packet(nic, row, q.peer_life, BTH.size + AETH.size)
        if bth == 0:
            return 0
        write_bth(row, bth, PacketOpcode.RC_ACKNOWLEDGE, 0, 0, 0, q.ack_psn)
        _write_aeth(row, bth + BTH.size, q.ack_syndrome)
        close_packet(nic, row, bth, BTH.size + AETH.size, 0)
        q.ack_pending = 0
    return 1


# --- refusals ------------------------------------------------------------------------------------------------------


@engine_function
def _refuse(nic, row, opcode, reason):
    """Refuse the expected request: an RC QP goes to ERR and its peer gets a NAK. UC drops the message."""
    q = qp_row_at(row)
    c = counters_at(worker_at(nic).counters)
    q.rx_kind = _NONE
    if q.service != ServiceType.RC:
        c.rx_uc_dropped += 1
        return
    c.rx_refused += 1
    fail_qp(nic, row, 0, opcode, reason, RESPONDER)
    _schedule_ack(nic, row, _nak_of(nic, reason), q.expect_psn)


@engine_function
def _refuse_packet(nic, row, opcode, nbytes):
    """Refuse a packet that is out of sequence within its message, or whose length is wrong (IBTA 9.7.4.1)."""
    q = qp_row_at(row)
    _refuse(nic, row, opcode, refuse.bad_request(nic, nbytes, q.rx_kind, q.rx_done))


@engine_function
def _not_ready(nic, row):
    """Handle a message without a posted receive: RC owes an RNR NAK, UC drops the message."""
    q = qp_row_at(row)
    counters_at(worker_at(nic).counters).out_of_buffer += 1
    if q.service != ServiceType.RC:
        q.rx_kind = _NONE
        return
    q.nak_sent = 1  # the peer also retransmits the packets behind this one
    _schedule_ack(nic, row, _RNR_NAK | q.min_rnr_code, q.expect_psn)


# --- SEND and WRITE ------------------------------------------------------------------------------------------------


@engine_function
def _may_write(nic, row, at):
    """Return 0 if the QP allows the WRITE of this RETH, or a reason: then waiting for a receive would be useless."""
    key, nbytes = be32(ld32(at + RETH.rkey)), be32(ld32(at + RETH.dma_length))
    return check_rights(nic, row, key, get_be64(at + RETH.va), nbytes, Access.REMOTE_WRITE)


@engine_function
def _begin_write(nic, row, at):
    """Begin a WRITE with its RETH: return 1, or 0 if it is refused."""
    q = qp_row_at(row)
    va = get_be64(at + RETH.va)
    key = be32(ld32(at + RETH.rkey))
    nbytes = be32(ld32(at + RETH.dma_length))
    counters_at(worker_at(nic).counters).rx_write_requests += 1
    reason = check_length(nic, row, nbytes)
    if reason != 0:
        _refuse(nic, row, WqeOpcode.RDMA_WRITE, reason)
        return 0
    address = authorize(nic, row, key, va, nbytes, Access.REMOTE_WRITE)
    if address < 0:
        _refuse(nic, row, WqeOpcode.RDMA_WRITE, -address)
        return 0
    q.rx_addr, q.rx_key, q.rx_nbytes = va, key, nbytes
    return 1


@engine_function
def _place_write(nic, row, data, nbytes):
    """Place the next bytes of a WRITE: return 1, or 0 if they are refused."""
    q = qp_row_at(row)
    if nbytes > 0:
        at = q.rx_addr + q.rx_done
        address = translate(nic, q.rx_key, q.pdn, at, nbytes, Access.REMOTE_WRITE, Reason.RKEY_UNKNOWN)
        if address < 0:
            counters_at(worker_at(nic).counters).resp_remote_access_errors += 1
            _refuse(nic, row, WqeOpcode.RDMA_WRITE, -address)
            return 0
        reason = place(nic, row, address, data, nbytes)
        if reason != 0:
            _refuse(nic, row, WqeOpcode.RDMA_WRITE, reason)
            return 0
    return 1


@engine_function
def _place_send(nic, row, data, nbytes):
    """Place the next bytes of a SEND: return 1, or 0 if they are refused, with the receive completed in error."""
    q = qp_row_at(row)
    reason = receive_scatter(nic, row, q.rx_done, q.rx_done + nbytes, data, nbytes)
    if reason == 0:
        return 1
    fail_scatter(nic, row, reason)
    _refuse(nic, row, WqeOpcode.SEND, reason)
    return 0


@engine_function
def _take_data(nic, row, operation, bth, nbytes, pad):
    """Execute a packet of a SEND or WRITE that is in order: return 1, or 0 if it was not executed."""
    q = qp_row_at(row)
    opcode = operation_of(operation)
    writing = right_of(opcode) != 0
    kind = _WRITING if writing else _SENDING
    first, last, with_imm = begins(operation), ends(operation), has_imm(operation)
    payload = nbytes - BTH.size - header_bytes(operation) - pad
    n = worker_at(nic)
    if n.payload_bytes != 0:
        payload = n.payload_bytes if payload == 0 else -1
    if (
        payload < 0
        or payload > q.mtu
        or (not last and (payload != q.mtu or pad != 0))
        or (last and not first and payload == 0)
        or q.rx_kind != (_NONE if first else kind)
    ):  # fmt: skip
        _refuse_packet(nic, row, opcode, nbytes)
        return 0
    at = bth + BTH.size
    if (with_imm if writing else first) and receives_posted(row) == 0:
        reason = _may_write(nic, row, at) if writing and first else 0
        if reason != 0:
            _refuse(nic, row, opcode, reason)
        else:
            _not_ready(nic, row)
        return 0
    if first:
        q.rx_done = 0
        if writing:
            if _begin_write(nic, row, at) == 0:
                return 0
            at += RETH.size
        q.rx_kind = kind
    if (writing and q.rx_done + payload > q.rx_nbytes) or (writing and last and q.rx_done + payload != q.rx_nbytes):
        _refuse_packet(nic, row, opcode, nbytes)
        return 0
    if not writing:
        reason = check_length(nic, row, q.rx_done + payload)
        if reason != 0:
            _refuse(nic, row, opcode, reason)
            return 0
    imm = 0
    if with_imm:
        imm = be32(ld32(at + IMM_DT.imm))
        at += IMM_DT.size
    if n.payload_bytes != 0:
        at = n.payload
    carried = 0
    if first and last and not writing and fits_cqe(row, payload):
        carried = stage_payload(n.message, INLINE_64_BYTES)
        copy(carried, at, payload)
    elif (_place_write(nic, row, at, payload) if writing else _place_send(nic, row, at, payload)) == 0:
        return 0
    q.rx_done += payload
    counters_at(worker_at(nic).counters).rdma_rx_bytes += payload
    if last:
        q.rx_kind = _NONE
        q.msn += 1
        cqe = receive_cqe_of(operation)
        if cqe != 0:
            if q.stream != 0:
                reason = await_moved(nic, row)
                if reason != 0:
                    if not writing:
                        fail_scatter(nic, row, reason)
                    _refuse(nic, row, opcode, reason)
                    return 0
            solicited = ld8(bth + BTH.se_m_pad_tver) & SOLICITED
            if complete_receive(nic, row, cqe, q.rx_done, imm, opcode, solicited, carried) != 0:
                counters_at(worker_at(nic).counters).rx_refused += 1
                if q.service == ServiceType.RC:
                    _schedule_ack(nic, row, _OPERATION, q.expect_psn)
                return 0
    return 1


# --- READ and atomics ----------------------------------------------------------------------------------------------


@engine_function
def _accept(nic, row, opcode, packets):
    """Return the address of a resource for a request that gets a response of its own, or 0 if none is free.

    A resource whose response is being retransmitted for a duplicate request counts as free. The peer's new request
    shows that it has received that response: IBTA 9.7.4.1.3 limits how many requests it has in flight.
    """
    q = qp_row_at(row)
    if q.max_dest_rd == 0:
        return 0
    resource = q.resources + q.res_head % q.max_dest_rd * RESOURCE.size
    e = resource_at(resource)
    if q.res_head >= q.max_dest_rd and e.answered == 0:
        return 0
    if e.todo != 0 and worker_at(nic).stream_count != 0:
        drop(nic, row, response_tag(e.serial))
    e.opcode, e.first, e.packets, e.next, e.todo, e.answered = opcode, q.expect_psn, packets, 0, packets, 0
    e.serial = q.res_head
    q.res_head += 1
    q.res_todo = 1
    q.msn += 1
    _schedule(nic, row)
    return resource


@engine_function
def _take_read(nic, row, bth, nbytes):
    """Accept a READ request that is in order: return the packets of its response, or 0 if it is refused."""
    q = qp_row_at(row)
    counters_at(worker_at(nic).counters).rx_read_requests += 1
    at = bth + BTH.size
    if nbytes != BTH.size + RETH.size:
        _refuse_packet(nic, row, WqeOpcode.RDMA_READ, nbytes)
        return 0
    va = get_be64(at + RETH.va)
    key, length = be32(ld32(at + RETH.rkey)), be32(ld32(at + RETH.dma_length))
    reason = check_length(nic, row, length)
    if reason != 0:
        _refuse(nic, row, WqeOpcode.RDMA_READ, reason)
        return 0
    packets = packets_of(length, q.mtu)
    address = authorize(nic, row, key, va, length, Access.REMOTE_READ)
    if address < 0:
        _refuse(nic, row, WqeOpcode.RDMA_READ, -address)
        return 0
    resource = _accept(nic, row, WqeOpcode.RDMA_READ, packets)
    if resource == 0:
        _refuse_packet(nic, row, WqeOpcode.RDMA_READ, length)
        return 0
    e = resource_at(resource)
    e.va, e.rkey, e.nbytes = va, key, length
    return packets


@engine_function
def _take_atomic(nic, row, operation, bth, nbytes):
    """Execute an atomic request that is in order: return 1, or 0 if it is refused."""
    counters_at(worker_at(nic).counters).rx_atomic_requests += 1
    opcode = operation_of(operation)
    masked = is_masked(opcode)
    at = bth + BTH.size
    word = masked_atomics.word_bytes(at) if masked else _ATOMIC_BYTES
    if nbytes != BTH.size + header_bytes(operation) or (word != _ATOMIC_BYTES and word != _SMALL_ATOMIC_BYTES):
        _refuse_packet(nic, row, opcode, nbytes)
        return 0
    va = get_be64(at + ATOMIC_ETH.va)  # both kinds of header begin alike
    key = be32(ld32(at + ATOMIC_ETH.rkey))
    address = atomic_address(nic, row, key, va, word, masked)
    if address < 0:
        _refuse(nic, row, opcode, -address)
        return 0
    resource = _accept(nic, row, opcode, 1)
    if resource == 0:
        _refuse_packet(nic, row, opcode, word)
        return 0
    if masked:
        old = masked_atomics.execute_packet(opcode, address, at)
    else:
        old = atomic(opcode, address, get_be64(at + ATOMIC_ETH.swap_add), get_be64(at + ATOMIC_ETH.compare))
    resource_at(resource).nbytes = old
    return 1


# --- the packet ----------------------------------------------------------------------------------------------------


@device_function
def _answered_last(row):
    """Return whether the latest request was a READ or atomic.

    Only its response may acknowledge it: on a plain acknowledgement, rxe would complete it without its data.
    """
    q = qp_row_at(row)
    if q.res_head == 0:
        return False
    e = resource_at(q.resources + (q.res_head - 1) % q.max_dest_rd * RESOURCE.size)
    return distance(e.first + e.packets, q.expect_psn) == 0


@engine_function
def _take_duplicate(nic, row, operation, psn, ack_request, bth, nbytes):
    """Answer a request again that was executed before: its response was lost (IBTA 9.7.5.1.3, 9.9.2.4.2).

    SENDs and WRITEs are acknowledged only where the peer asks for it, as new ones are. If a packet in the middle of its
    retransmission is answered with an acknowledgement of everything, rxe stalls.
    """
    q = qp_row_at(row)
    counters_at(worker_at(nic).counters).duplicate_request += 1
    opcode = operation_of(operation)
    if opcode != WqeOpcode.NOP and not returns_data(opcode):
        if ack_request == 0:
            return
        done = psn if _answered_last(row) else q.expect_psn - 1
        # A pending answer that says more stays: a later acknowledgement, or a NAK, which is sent only once.
        if q.ack_pending == 0 or (q.ack_syndrome == _ACK and not is_before(done, q.ack_psn)):
            _schedule_ack(nic, row, _ACK, done)
        return
    for i in range(max(q.res_head - q.max_dest_rd, 0), q.res_head):
        e = resource_at(q.resources + i % q.max_dest_rd * RESOURCE.size)
        begun = distance(psn, e.first)
        reads = opcode == WqeOpcode.RDMA_READ
        if begun >= e.packets or reads == is_atomic(e.opcode):
            continue
        if reads:
            if nbytes != BTH.size + RETH.size:
                return
            at = bth + BTH.size
            va = get_be64(at + RETH.va)
            length = be32(ld32(at + RETH.dma_length))
            offset = begun * q.mtu
            if va != e.va + offset or length > e.nbytes - offset or be32(ld32(at + RETH.rkey)) != e.rkey:
                return  # not the range of the original request
            e.first, e.va, e.nbytes = psn, va, length
            e.packets = packets_of(length, q.mtu)
            if worker_at(nic).stream_count != 0:
                drop(nic, row, response_tag(e.serial))
        e.next, e.todo = 0, e.packets
        q.res_todo = 1
        _schedule(nic, row)
        return


@device_function
def _follows(nic, row, operation, psn, ack_request, bth, nbytes):
    """Return whether an RC packet has the expected PSN, or else answer a duplicate or a gap."""
    q = qp_row_at(row)
    if psn == q.expect_psn:
        q.nak_sent = 0
        return True
    if is_before(psn, q.expect_psn):
        _take_duplicate(nic, row, operation, psn, ack_request, bth, nbytes)
        return False
    counters_at(worker_at(nic).counters).out_of_sequence += 1
    if q.nak_sent == 0:  # one NAK for a gap (IBTA 9.7.5.1.1)
        q.nak_sent = 1
        _schedule_ack(nic, row, _SEQUENCE, q.expect_psn)
    return False


@device_function
def _resume(nic, row, operation, psn):
    """Return whether to take a UC packet: after a gap, only one that begins a message (IBTA 9.8.2.2)."""
    q = qp_row_at(row)
    in_order = psn == q.expect_psn
    q.expect_psn = psn
    if begins(operation):
        q.rx_kind = _NONE  # the end of any message before is lost
        return True
    if in_order and q.rx_kind != _NONE:
        return True
    counters_at(worker_at(nic).counters).rx_uc_dropped += 1
    q.rx_kind = _NONE
    return False


@engine_function
def take_request(nic, row, operation, psn, ack_request, bth, nbytes, pad):
    """Take a request packet for a QP in RTR or RTS. `nbytes` counts from its BTH on and includes the padding."""
    q = qp_row_at(row)
    if q.service != ServiceType.RC:
        if _resume(nic, row, operation, psn) and _take_data(nic, row, operation, bth, nbytes, pad) != 0:
            counters_at(worker_at(nic).counters).rx_accepted += 1
        q.expect_psn = on_wire(psn + 1)
        return
    if not _follows(nic, row, operation, psn, ack_request, bth, nbytes):
        return
    opcode = operation_of(operation)
    reason = 0
    packets = 0
    if opcode != WqeOpcode.NOP and not returns_data(opcode):
        packets = _take_data(nic, row, operation, bth, nbytes, pad)
    elif opcode == WqeOpcode.NOP or q.rx_kind != _NONE:
        _refuse_packet(nic, row, operation, nbytes)
    else:
        if q.stream != 0:  # READs and atomics see the writes before them
            reason = await_moved(nic, row)
        if reason != 0:
            _refuse(nic, row, WqeOpcode.RDMA_READ, reason)
        elif is_atomic(opcode):
            packets = _take_atomic(nic, row, operation, bth, nbytes)
        else:
            packets = _take_read(nic, row, bth, nbytes)
    if packets == 0:
        return
    counters_at(worker_at(nic).counters).rx_accepted += 1
    q.expect_psn = on_wire(q.expect_psn + packets)
    if returns_data(opcode):
        serve_pending(nic, row)  # at once, if the wire has room: a READ must see memory before later requests change it
    elif ack_request:
        _schedule_ack(nic, row, _ACK, psn)
