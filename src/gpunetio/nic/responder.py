"""Responder: executes a request on the receiving QP and says how it ended (IBTA 9.7, responder side).

Runs in the engine of the NIC that owns the receiving QP, whether the request came over a wire or from a QP beside it.
"""

from __future__ import annotations

from ..device.compile import device_function, engine_function
from ..device.ops import (
    be32, be64, cas_sys64, copy, fetch_add_sys64, ld32, ld64, ld_acquire32,
)  # fmt: skip
from ..enums import Access
from ..fabric.inprocess import MESSAGE, message_at
from ..formats.cqe import CqeOpcode, Syndrome
from ..formats.doorbell import PI_MASK, QP_DBREC
from ..formats.wqe import DATA_SEG, INLINE_SEG, INVALID_LKEY, SEGMENT, WqeOpcode
from .completion import RESPONDER, fail_qp, fail_receive, write_cqe
from .mkey import translate
from .reasons import Reason
from .tables import counters_at, nic_at, qp_row_at

_WRITE, _WRITE_IMM = int(WqeOpcode.RDMA_WRITE), int(WqeOpcode.RDMA_WRITE_IMM)
_SEND, _SEND_IMM = int(WqeOpcode.SEND), int(WqeOpcode.SEND_IMM)
_READ, _CS, _FA = int(WqeOpcode.RDMA_READ), int(WqeOpcode.ATOMIC_CS), int(WqeOpcode.ATOMIC_FA)
_LOCAL_WRITE, _REMOTE_WRITE = int(Access.LOCAL_WRITE), int(Access.REMOTE_WRITE)
_REMOTE_READ, _REMOTE_ATOMIC = int(Access.REMOTE_READ), int(Access.REMOTE_ATOMIC)
_RKEY_UNKNOWN, _LKEY_UNKNOWN, _RECV_LKEY = int(Reason.RKEY_UNKNOWN), int(Reason.LKEY_UNKNOWN), int(Reason.RECV_LKEY)
_QP_RIGHTS, _ATOMIC_ALIGNMENT, _RNR = int(Reason.QP_RIGHTS), int(Reason.ATOMIC_ALIGNMENT), int(Reason.RNR)
_RECV_TOO_SMALL, _FLUSH = int(Reason.RECV_TOO_SMALL), int(Reason.FLUSH)
_REMOTE_ABORT = int(Reason.REMOTE_ABORT)
_LOCAL_LENGTH, _LOCAL_PROT, _WR_FLUSH = int(Syndrome.LOCAL_LENGTH), int(Syndrome.LOCAL_PROT), int(Syndrome.WR_FLUSH)
_RESP_SEND, _RESP_SEND_IMM = int(CqeOpcode.RESP_SEND), int(CqeOpcode.RESP_SEND_IMM)
_RESP_WR_IMM = int(CqeOpcode.RESP_WR_IMM)
_SEGMENTS = MESSAGE.segments


@device_function
def explain(nic, key, addr, nbytes, extra0, extra1):
    """What the next error record says."""
    n = nic_at(nic)
    n.why_key, n.why_addr, n.why_nbytes, n.why_extra0, n.why_extra1 = key, addr, nbytes, extra0, extra1


@device_function
def respond(nic, row, message):
    """Execute the request at `message` on the QP at `row`: 0, or the reason why not.

    Anything but RNR that is refused takes the QP to ERR (IBTA 9.9.3, class C).
    """
    m = message_at(message)
    opcode = m.opcode
    counters = counters_at(nic_at(nic).counters)
    counters.port_rcv_data += m.nbytes
    if opcode == _WRITE:
        counters.rx_write_requests += 1
        reason = _write(nic, row, message)
    else:
        reason = _respond_other(nic, row, message, opcode)
    if reason != 0 and reason != _RNR:
        fail_qp(nic, row, m.index, opcode, reason, RESPONDER)
    return reason


@engine_function
def _respond_other(nic, row, message, opcode):
    counters = counters_at(nic_at(nic).counters)
    if opcode == _SEND or opcode == _SEND_IMM:
        return _receive(nic, row, message)
    if opcode == _WRITE_IMM:
        counters.rx_write_requests += 1
        return _write_imm(nic, row, message)
    if opcode == _READ:
        counters.rx_read_requests += 1
        return _read(nic, row, message)
    counters.rx_atomic_requests += 1
    return _atomic(nic, row, message, opcode)


@device_function
def _allows(nic, row, message, nbytes, right):
    """Whether the QP itself has the right (IBTA 9.7.4.1.2); if not, the reason is QP_RIGHTS."""
    q = qp_row_at(row)
    m = message_at(message)
    if q.rights & right == right:
        return True
    explain(nic, m.rkey, m.raddr, nbytes, q.rights, right)
    return False


@device_function
def _grant(nic, row, message, nbytes, right):
    """The address of the remote range, or minus a reason: the QP's rights first, then the key's.

    The key of an empty request is not checked (IBTA 9.7.4.1.6): its address is 0.
    """
    q = qp_row_at(row)
    m = message_at(message)
    if not _allows(nic, row, message, nbytes, right):
        return -_QP_RIGHTS
    if nbytes == 0:
        return 0
    address = translate(nic, m.rkey, q.pdn, m.raddr, nbytes, right, _RKEY_UNKNOWN)
    if address < 0:
        counters_at(nic_at(nic).counters).resp_remote_access_errors += 1
    return address


@device_function
def _write(nic, row, message):
    m = message_at(message)
    address = _grant(nic, row, message, m.nbytes, _REMOTE_WRITE)
    if address < 0:
        return -address
    segment = message + _SEGMENTS
    end = segment + 16 * m.nsegments
    while segment != end:
        nbytes = ld64(segment + 8)
        copy(address, ld64(segment), nbytes)
        address += nbytes
        segment += 16
    return 0


@device_function
def _read(nic, row, message):
    m = message_at(message)
    address = _grant(nic, row, message, m.nbytes, _REMOTE_READ)
    if address < 0:
        return -address
    scatter(message, address)
    return 0


@device_function
def scatter(message, address):
    """Copy the bytes at `address` into the requester's segments."""
    segment = message + _SEGMENTS
    end = segment + 16 * message_at(message).nsegments
    while segment != end:
        nbytes = ld64(segment + 8)
        copy(ld64(segment), address, nbytes)
        address += nbytes
        segment += 16


@device_function
def _atomic(nic, row, message, opcode):
    m = message_at(message)
    if m.raddr & 7:
        explain(nic, m.rkey, m.raddr, 8, 0, 0)
        return _ATOMIC_ALIGNMENT
    address = _grant(nic, row, message, 8, _REMOTE_ATOMIC)
    if address < 0:
        return -address
    if address & 7:  # a region whose iova and memory are aligned differently
        explain(nic, m.rkey, address, 8, 0, 0)
        return _ATOMIC_ALIGNMENT
    if opcode == _FA:
        old = fetch_add_sys64(address, m.swap_add)
    else:
        old = cas_sys64(address, m.compare, m.swap_add)
    # The result travels in `compare`, which is no longer needed; like the word itself it is in host byte order.
    m.compare = old
    scatter(message, message + MESSAGE.compare)
    return 0


# --- receives ------------------------------------------------------------------------------------------------------


@device_function
def _receives_posted(row):
    """How many receive WQEs wait in the queue."""
    q = qp_row_at(row)
    if q.rq_stride == 0:
        return 0
    producer = be32(ld_acquire32(q.dbrec + QP_DBREC.rcv))
    return (producer - q.rq_ci) & PI_MASK


@device_function
def _receive_wqe(row):
    q = qp_row_at(row)
    return q.rq_addr + (q.rq_ci & ((1 << q.rq_log) - 1)) * q.rq_stride


@device_function
def _capacity(segment):
    """Bytes of a receive's segment; byte_count 0 means 2 GiB, as in a send."""
    nbytes = be32(ld32(segment + DATA_SEG.byte_count))
    return nbytes if nbytes != 0 else INLINE_SEG


@device_function
def _no_receive(nic):
    counters_at(nic_at(nic).counters).out_of_buffer += 1
    return _RNR


@device_function
def _receive(nic, row, message):
    q = qp_row_at(row)
    m = message_at(message)
    if _receives_posted(row) == 0:
        return _no_receive(nic)
    wqe = _receive_wqe(row)
    room = 0
    nsegments = 0
    while nsegments * SEGMENT < q.rq_stride:
        segment = wqe + nsegments * SEGMENT
        if be32(ld32(segment + DATA_SEG.lkey)) == INVALID_LKEY:
            break
        room += _capacity(segment)
        nsegments += 1
    if m.nbytes > room:
        explain(nic, 0, 0, m.nbytes, room, 0)
        fail_receive(nic, row, q.rq_ci, _RECV_TOO_SMALL, _LOCAL_LENGTH)
        q.rq_ci += 1
        return _RECV_TOO_SMALL
    if _deliver(nic, row, message, wqe, nsegments) != 0:
        fail_receive(nic, row, q.rq_ci, _RECV_LKEY, _LOCAL_PROT)
        q.rq_ci += 1
        return _RECV_LKEY
    kind = _RESP_SEND_IMM if m.opcode == _SEND_IMM else _RESP_SEND
    return _complete_receive(nic, row, message, kind)


@device_function
def _deliver(nic, row, message, wqe, nsegments):
    """Copy the message into the receive's segments: 0, or minus a reason. Every segment used is checked before it."""
    q = qp_row_at(row)
    m = message_at(message)
    source = message + _SEGMENTS
    taken = 0  # of the source segment
    left = m.nbytes
    for i in range(nsegments):
        segment = wqe + i * SEGMENT
        room = min(_capacity(segment), left)
        if room == 0:
            continue
        addr = be64(ld64(segment + DATA_SEG.addr))
        target = translate(
            nic, be32(ld32(segment + DATA_SEG.lkey)), q.pdn, addr, room, _LOCAL_WRITE, _LKEY_UNKNOWN
        )
        if target < 0:
            return target
        left -= room
        while room > 0:
            part = min(room, ld64(source + 8) - taken)
            copy(target, ld64(source) + taken, part)
            target += part
            taken += part
            room -= part
            if taken == ld64(source + 8):
                source += 16
                taken = 0
    return 0


@device_function
def _write_imm(nic, row, message):
    if not _allows(nic, row, message, message_at(message).nbytes, _REMOTE_WRITE):
        return _QP_RIGHTS
    if _receives_posted(row) == 0:
        return _no_receive(nic)
    reason = _write(nic, row, message)
    return reason if reason != 0 else _complete_receive(nic, row, message, _RESP_WR_IMM)


@device_function
def _complete_receive(nic, row, message, kind):
    q = qp_row_at(row)
    m = message_at(message)
    imm = 0 if kind == _RESP_SEND else m.imm
    reason = write_cqe(nic, q.recv_cq, kind, q.qpn, q.user_index, 0, q.rq_ci, m.nbytes, imm, 0, 0)
    q.rq_ci += 1
    if reason != 0:
        fail_qp(nic, row, q.rq_ci - 1, m.opcode, reason, RESPONDER)
        return _REMOTE_ABORT
    return 0


@engine_function
def flush_receives(nic, row):
    """Complete every posted receive of a QP in ERR with a flush error; returns how many."""
    q = qp_row_at(row)
    count = _receives_posted(row)
    for _ in range(count):
        fail_receive(nic, row, q.rq_ci, _FLUSH, _WR_FLUSH)
        q.rq_ci += 1
    return count
