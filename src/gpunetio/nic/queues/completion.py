"""Completions: CQEs, error CQEs, the transition of a QP to ERR, and the error record that explains it."""

from __future__ import annotations

from typing import NamedTuple

from ...fabric.ring import lock, next_free, publish, unlock
from ...formats.commands import SCATTER_FORMAT_MASK, QpState
from ...formats.cqe import (
    CI_MASK, CQE64, FORMAT_SHIFT, INIT_OP_OWN, INLINE_32_BYTES, INLINE_64_BYTES, OPCODE_SHIFT, CqeFormat, CqeOpcode,
    Syndrome,
)  # fmt: skip
from ...formats.doorbell import CQ_DBREC
from ...formats.events import CqErrorSyndrome, EventType
from ...formats.wqe import CompletionMode
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be32, be64, copy, fence_release_sys, ld8, ld64, ld_acquire32, pack64, st64, st128, st_relaxed32, st_release32,
)  # fmt: skip
from ..state import refuse
from ..state.counters import counters_at
from ..state.cq import cq_row_at
from ..state.message import MESSAGE
from ..state.nic import error_record_at, nic_at
from ..state.qp import qp_row_at
from ..state.reasons import Reason
from ..state.work_queue import QueueKind, wake
from ..state.worker import worker_at
from .events import notify, raise_event, tell
from .reach import tell_failure
from .wakeups import wake_later

_NO_EVENT = 0
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT << OPCODE_SHIFT
REQUESTER, RESPONDER, RECEIVE_QUEUE, SEND_QUEUE = 0, 1, 2, 3  # the last two are of Ethernet packets


# --- payload in CQEs -------------------------------------------------------------------------------------------------


@device_function
def format_for(scatter, nbytes):
    """Return the CqeFormat of a CQE for `nbytes` of payload. `scatter` is the QP's cs_res or cs_req."""
    form = scatter & SCATTER_FORMAT_MASK
    room = INLINE_64_BYTES if form == CqeFormat.INLINE_64 else INLINE_32_BYTES
    return form if 0 < nbytes <= room else CqeFormat.NO_INLINE


@device_function
def stage_payload(message, nbytes):
    """Clear `nbytes` of the buffer for what a CQE carries: return its address."""
    for offset in range(0, nbytes, 8):
        st64(message + MESSAGE.payload + offset, 0)
    return message + MESSAGE.payload


# --- CQEs ------------------------------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """The contents of a CQE.

    `qpn` is the number of the QP, RQ or SQ, or a flow tag. `head` is the address of the CQE's first 32 bytes, or 0 if
    they are zeros; with INLINE_64, that of the 64 bytes before it.
    """

    opcode: int  # CqeOpcode
    qpn: int
    user_index: int
    counter: int  # index of the WQE
    wqe_opcode: int = 0
    nbytes: int = 0
    imm: int = 0
    form: int = CqeFormat.NO_INLINE
    head: int = 0
    solicited: int = 0
    syndrome: int = 0
    vendor: int = 0


@device_function
def fill_cqe(nic, cqe, said: Completion, head):
    """Write all of a CQE but its last word. `head` is the address of its first 32 bytes, or 0 if they are zeros."""
    if head == 0:
        st128(cqe, 0, 0)
        st128(cqe + 16, 0, 0)
    else:
        st128(cqe, ld64(head), ld64(head + 8))
        st128(cqe + 16, ld64(head + 16), ld64(head + 24))
    st128(cqe + 32, pack64(be32(said.user_index), be32(said.imm)), pack64(0, be32(said.nbytes)))
    # An error CQE has its syndromes where other CQEs have the end of the timestamp.
    errors = pack64(0, be32(said.vendor << 8 | said.syndrome))
    st64(cqe + CQE64.timestamp, errors if said.syndrome else be64(worker_at(nic).now))
    st_relaxed32(cqe + CQE64.sop_drop_qpn, be32(said.wqe_opcode << 24 | said.qpn))


@device_function
def last_word(counter, kind, form, owner):
    """Return the word that makes a CQE valid, as it lies in memory."""
    return be32((counter & 0xFFFF) << 16 | kind << OPCODE_SHIFT | form << FORMAT_SHIFT | owner)


@device_function
def write_cqe(nic, cq, said: Completion):
    """Write a CQE, its last word last. Return 0, or Reason.CQ_OVERRUN if the CQ is full and may not be overrun."""
    c = cq_row_at(cq)
    n = worker_at(nic)
    if not c.overrun:
        consumed = be32(ld_acquire32(c.dbrec + CQ_DBREC.set_ci)) & CI_MASK
        if c.error or (c.pi - consumed) & CI_MASK >= 1 << c.log:
            if c.error == 0:
                raise_event(nic, c.error_channel, c.error_cookie, EventType.CQ_ERROR, c.cqn, CqErrorSyndrome.OVERRUN)
            c.error = 1
            return refuse.full_cq(nic, c.cqn, 1 << c.log)
    if said.syndrome and not c.failed:
        c.failed, c.failed_from = 1, c.pi
    slot = 0 if c.collapsed else c.pi & ((1 << c.log) - 1)
    cqe = c.addr + (slot << c.shift)
    owner = (c.pi >> c.log) & 1
    if said.opcode != CqeOpcode.REQ or said.form != CqeFormat.NO_INLINE:
        # Invalidate the entry first. A reader that still reads the CQE of the previous lap must be able to tell that it
        # has read this CQE's length or payload instead. A card writes all 64 bytes at once.
        st_relaxed32(cqe + CQE64.wqe_counter, be32(_INVALID | owner ^ 1))
        fence_release_sys()
    head = said.head
    if said.form == CqeFormat.INLINE_64:
        copy(cqe - INLINE_64_BYTES, head, INLINE_64_BYTES)
        head = 0
    fill_cqe(nic, cqe, said, head)
    counters_at(n.counters).cqes += 1  # before anyone sees it
    st_release32(cqe + CQE64.wqe_counter, last_word(said.counter, said.opcode, said.form, owner))
    c.pi += 1
    if c.wakeup != 0:
        wake_later(nic, cq)
    if c.channel != 0:
        notify(nic, cq, said.solicited or said.syndrome)  # an error counts as solicited (IBTA 11.4.2.2)
    return 0


@engine_function
def recover_cq(cq):
    """Note that a queue of the CQ is reset or destroyed: completions from now on are of operations after a failure."""
    c = cq_row_at(cq)
    if cq != 0 and c.failed:
        c.failed, c.failed_to = 0, c.pi


@engine_function
def resize_cq(nic, cq, source):
    """Move a CQ to the ring that the row at `source` names. Return 0, or 1 if the old or the new ring is too small.

    The last CQE in the old ring announces the move. The poller copies the CQEs before it (PRM, "Resize CQ").
    """
    c, new = cq_row_at(cq), cq_row_at(source)
    consumed = be32(ld_acquire32(c.dbrec + CQ_DBREC.set_ci)) & CI_MASK
    waiting = (c.pi - consumed) & CI_MASK
    if c.error or waiting >= 1 << c.log or waiting >= 1 << new.log:
        return 1
    cqe = c.addr + ((c.pi & ((1 << c.log) - 1)) << c.shift)
    st_relaxed32(cqe + CQE64.sop_drop_qpn, 0)
    st_release32(cqe + CQE64.wqe_counter, be32(CqeOpcode.RESIZE_CQ << OPCODE_SHIFT | (c.pi >> c.log) & 1))
    if 0 < (c.solicited_pi - consumed) & CI_MASK <= waiting:
        c.solicited_pi += 1  # it moves by one entry, as all CQEs that are copied do
    c.told_pi += 1
    c.pi += 1
    c.addr, c.log, c.near = new.addr, new.log, new.near
    return 0


# --- failures --------------------------------------------------------------------------------------------------------


@engine_function
def record_error(nic, side, qpn, index, opcode, reason, syndrome):
    """Leave an error record for the service thread. If the thread is too far behind, count the loss instead."""
    n = worker_at(nic)
    lock(n.errors)
    slot = next_free(n.errors)
    if slot == 0:
        unlock(n.errors)
        counters_at(n.counters).lost_error_records += 1
        return
    e = error_record_at(slot)
    e.reason, e.side, e.qpn, e.index, e.opcode = reason, side, qpn, index, opcode
    e.key, e.addr, e.nbytes = n.why_key, n.why_addr, n.why_nbytes
    e.extra0, e.extra1, e.syndrome = n.why_extra0, n.why_extra1, syndrome
    publish(n.errors)
    unlock(n.errors)
    n.error_event = 1


@device_function
def count_error(nic, reason, syndrome, side):
    c = counters_at(worker_at(nic).counters)
    if side != REQUESTER:
        c.resp_cqe_error += 1
        if syndrome == Syndrome.WR_FLUSH:
            c.resp_cqe_flush_error += 1
        if reason == Reason.RECV_TOO_SMALL:
            c.resp_local_length_error += 1
        return
    c.req_cqe_error += 1
    if syndrome == Syndrome.WR_FLUSH:
        c.req_cqe_flush_error += 1
    if syndrome == Syndrome.REMOTE_ACCESS:
        c.req_remote_access_errors += 1
    if syndrome == Syndrome.REMOTE_INVAL_REQ:
        c.req_remote_invalid_request += 1
    if reason == Reason.RNR:
        c.req_rnr_retries_exceeded += 1
    if reason == Reason.NO_RESPONSE:
        c.req_transport_retries_exceeded += 1


@device_function
def _event_of(reason, side):
    """Return the type of the event for a failure that no CQE of this QP reports (IBTA 11.6.3.1).

    Such a failure is a CQ overrun, or a request that the responder has refused.
    """
    if reason == Reason.CQ_OVERRUN:
        return EventType.WQ_CATAS_ERROR
    if side == REQUESTER:
        return _NO_EVENT
    if reason >= Reason.RKEY_UNKNOWN and reason <= Reason.RKEY_BOUNDS:
        return EventType.WQ_ACCESS_ERROR
    if reason == Reason.QP_RIGHTS or reason == Reason.BAD_REQUEST:
        return EventType.WQ_INVAL_REQ_ERROR
    if reason == Reason.ATOMIC_ALIGNMENT or reason == Reason.ATOMIC_FAR:
        return EventType.WQ_INVAL_REQ_ERROR
    return _NO_EVENT


@engine_function
def fail_qp(nic, row, index, opcode, reason, side):
    """Move a QP or SQ to ERR. Its first failure also leaves an error record and, for some reasons, raises an event.

    The record is there before anyone sees the state, the event or a CQE, and asks why.
    """
    q = qp_row_at(row)
    first = q.failed == 0
    if first:
        q.failed = 1
        who = SEND_QUEUE if q.kind == QueueKind.ETHERNET_SEND else side
        record_error(nic, who, q.qpn, index, opcode, reason, ld8(nic_at(nic).syndromes + reason))
        fence_release_sys()
    q.state = QpState.ERR
    q.retry_at = 0
    wake(row)
    if first:
        if q.kind != QueueKind.ETHERNET_SEND:
            tell_failure(row)
        event = _event_of(reason, side)
        if event != _NO_EVENT:
            tell(nic, row, event)


@engine_function
def fail_send(nic, row, index, opcode, ce, reason):
    """Fail a send-queue WQE: move the QP to ERR and write an error CQE (IBTA 10.10.3)."""
    q = qp_row_at(row)
    syndrome = ld8(nic_at(nic).syndromes + reason)
    first = q.told == 0
    q.told = 1
    count_error(nic, reason, syndrome, REQUESTER)
    fail_qp(nic, row, index, opcode, reason, REQUESTER)
    if ce == CompletionMode.ON_FIRST_ERROR and not first:
        return
    said = Completion(CqeOpcode.REQ_ERR, q.qpn, q.user_index, index, opcode, syndrome=syndrome, vendor=reason)
    write_cqe(nic, q.send_cq, said)


@engine_function
def fail_receive(nic, row, index, reason, syndrome):
    """Fail a receive WQE: move the QP to ERR and write an error CQE to the receive CQ."""
    q = qp_row_at(row)
    count_error(nic, reason, syndrome, RESPONDER)
    fail_qp(nic, row, index, 0, reason, RESPONDER)
    said = Completion(CqeOpcode.RESP_ERR, q.qpn, q.user_index, index, syndrome=syndrome, vendor=reason)
    write_cqe(nic, q.recv_cq, said)
