"""Completions: CQEs, error CQEs, the transition of a QP to ERR, and the error record that explains it."""

from __future__ import annotations

from typing import NamedTuple

from ...fabric.ring import RingState, lock, next_free, publish, unlock
from ...formats.commands import SCATTER_FORMAT_MASK, QpState
from ...formats.cqe import (
    CI_MASK, CQE64, FORMAT_SHIFT, INIT_OP_OWN, INLINE_32_BYTES, INLINE_64_BYTES, OPCODE_SHIFT, CqeFormat, CqeOpcode,
    Syndrome,
)
from ...formats.doorbell import CQ_DBREC
from ...formats.events import CqErrorSyndrome, EventType
from ...formats.wqe import CompletionMode
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be32, be64, copy, fence_release_sys, ld64, ld8, ld_acquire32, pack64, st128, st64, st_relaxed32, st_release32,
)
from ..state import refuse
from ..state.counters import CounterSet
from ..state.cq import Channel, CqRow
from ..state.message import MESSAGE, Message
from ..state.nic import ErrorRecord
from ..state.qp import QpRow
from ..state.reasons import Reason
from ..state.work_queue import QueueKind, wake
from ..state.worker import WorkerState
from .events import notify, raise_event, raise_qp_event
from .reach import signal_failure
from .wakeups import wake_later

_NO_EVENT = 0
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT << OPCODE_SHIFT
REQUESTER, RESPONDER, RECEIVE_QUEUE, SEND_QUEUE = 0, 1, 2, 3  # the last two are of Ethernet packets


# --- payload in CQEs -------------------------------------------------------------------------------------------------


@device_function
def format_for(scatter: int, nbytes: int) -> int:
    """Return the CqeFormat of a CQE for `nbytes` of payload. `scatter` is the QP's cs_res or cs_req."""
    form = scatter & SCATTER_FORMAT_MASK
    room = INLINE_64_BYTES if form == CqeFormat.INLINE_64 else INLINE_32_BYTES
    return form if 0 < nbytes <= room else CqeFormat.NO_INLINE


@device_function
def stage_payload(message: Message, nbytes: int) -> int:
    """Clear `nbytes` of the buffer for payload in a CQE. Return its address."""
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
def fill_cqe(worker: WorkerState, cqe: int, completion: Completion, head: int) -> None:
    """Write a CQE except its last word. `head` is the address of its first 32 bytes, or 0 if they are zeros."""
    if head == 0:
        st128(cqe, 0, 0)
        st128(cqe + 16, 0, 0)
    else:
        st128(cqe, ld64(head), ld64(head + 8))
        st128(cqe + 16, ld64(head + 16), ld64(head + 24))
    st128(cqe + 32, pack64(be32(completion.user_index), be32(completion.imm)), pack64(0, be32(completion.nbytes)))
    # An error CQE has its syndromes where other CQEs have the end of the timestamp.
    errors = pack64(0, be32(completion.vendor << 8 | completion.syndrome))
    st64(cqe + CQE64.timestamp, errors if completion.syndrome else be64(worker.now))
    st_relaxed32(cqe + CQE64.sop_drop_qpn, be32(completion.wqe_opcode << 24 | completion.qpn))


@device_function
def last_word(counter: int, kind: int, form: int, owner: int) -> int:
    """Return the word that makes a CQE valid, as it lies in memory."""
    return be32((counter & 0xFFFF) << 16 | kind << OPCODE_SHIFT | form << FORMAT_SHIFT | owner)


@device_function
def write_cqe(worker: WorkerState, cq: CqRow, completion: Completion) -> int:
    """Write a CQE, its last word last. Return 0, or Reason.CQ_OVERRUN if the CQ is full and may not be overrun."""
    if not cq.overrun:
        consumed = be32(ld_acquire32(cq.dbrec + CQ_DBREC.set_ci)) & CI_MASK
        if cq.error or (cq.pi - consumed) & CI_MASK >= 1 << cq.log:
            if cq.error == 0:
                raise_event(
                    worker, Channel(cq.error_channel), cq.error_cookie, EventType.CQ_ERROR, cq.cqn,
                    CqErrorSyndrome.OVERRUN,
                )
            cq.error = 1
            return refuse.full_cq(worker, cq.cqn, 1 << cq.log)
    if completion.syndrome and not cq.failed:
        cq.failed, cq.failed_from = 1, cq.pi
    slot = 0 if cq.collapsed else cq.pi & ((1 << cq.log) - 1)
    cqe = cq.addr + (slot << cq.shift)
    owner = (cq.pi >> cq.log) & 1
    if completion.opcode != CqeOpcode.REQ or completion.form != CqeFormat.NO_INLINE:
        # Invalidate the entry first. A reader that still reads the CQE of the previous lap must be able to tell that it
        # has read this CQE's length or payload instead. A card writes all 64 bytes at once.
        st_relaxed32(cqe + CQE64.wqe_counter, be32(_INVALID | owner ^ 1))
        fence_release_sys()
    head = completion.head
    if completion.form == CqeFormat.INLINE_64:
        copy(cqe - INLINE_64_BYTES, head, INLINE_64_BYTES)
        head = 0
    fill_cqe(worker, cqe, completion, head)
    CounterSet(worker.counters).cqes += 1  # before anyone sees it
    st_release32(cqe + CQE64.wqe_counter, last_word(completion.counter, completion.opcode, completion.form, owner))
    cq.pi += 1
    if cq.wakeup != 0:
        wake_later(worker, cq)
    if cq.channel != 0:
        notify(worker, cq, completion.solicited or completion.syndrome)  # an error counts as solicited (IBTA 11.4.2.2)
    return 0


@engine_function
def recover_cq(cq: CqRow) -> None:
    """Record that a queue of the CQ is reset or destroyed: later completions belong to operations after the failure."""
    if cq != 0 and cq.failed:
        cq.failed, cq.failed_to = 0, cq.pi


@engine_function
def resize_cq(worker: WorkerState, cq: CqRow, new: CqRow) -> int:
    """Move a CQ to the ring that the row at `new` names. Return 0, or 1 if the old or the new ring is too small.

    The last CQE in the old ring announces the move. The poller copies the CQEs before it (PRM, "Resize CQ").
    """
    consumed = be32(ld_acquire32(cq.dbrec + CQ_DBREC.set_ci)) & CI_MASK
    waiting = (cq.pi - consumed) & CI_MASK
    if cq.error or waiting >= 1 << cq.log or waiting >= 1 << new.log:
        return 1
    cqe = cq.addr + ((cq.pi & ((1 << cq.log) - 1)) << cq.shift)
    st_relaxed32(cqe + CQE64.sop_drop_qpn, 0)
    st_release32(cqe + CQE64.wqe_counter, be32(CqeOpcode.RESIZE_CQ << OPCODE_SHIFT | (cq.pi >> cq.log) & 1))
    if 0 < (cq.solicited_pi - consumed) & CI_MASK <= waiting:
        cq.solicited_pi += 1  # it moves by one entry, as all CQEs that are copied do
    cq.told_pi += 1
    cq.pi += 1
    cq.addr, cq.log, cq.near = new.addr, new.log, new.near
    return 0


# --- failures --------------------------------------------------------------------------------------------------------


@engine_function
def record_error(worker: WorkerState, side: int, qpn: int, index: int, opcode: int, reason: int, syndrome: int) -> None:
    """Write an error record for the service thread. If there is no room, count the loss instead."""
    lock(worker.errors)
    slot = ErrorRecord(next_free(RingState(worker.errors)))
    if slot == 0:
        unlock(worker.errors)
        CounterSet(worker.counters).lost_error_records += 1
        return
    slot.reason, slot.side, slot.qpn, slot.index, slot.opcode = reason, side, qpn, index, opcode
    slot.key, slot.addr, slot.nbytes = worker.why_key, worker.why_addr, worker.why_nbytes
    slot.extra0, slot.extra1, slot.syndrome = worker.why_extra0, worker.why_extra1, syndrome
    publish(worker.errors)
    unlock(worker.errors)
    worker.error_event = 1


@device_function
def count_error(worker: WorkerState, reason: int, syndrome: int, side: int) -> None:
    counters = CounterSet(worker.counters)
    if side != REQUESTER:
        counters.resp_cqe_error += 1
        if syndrome == Syndrome.WR_FLUSH:
            counters.resp_cqe_flush_error += 1
        if reason == Reason.RECV_TOO_SMALL:
            counters.resp_local_length_error += 1
        return
    counters.req_cqe_error += 1
    if syndrome == Syndrome.WR_FLUSH:
        counters.req_cqe_flush_error += 1
    if syndrome == Syndrome.REMOTE_ACCESS:
        counters.req_remote_access_errors += 1
    if syndrome == Syndrome.REMOTE_INVAL_REQ:
        counters.req_remote_invalid_request += 1
    if reason == Reason.RNR:
        counters.req_rnr_retries_exceeded += 1
    if reason == Reason.NO_RESPONSE:
        counters.req_transport_retries_exceeded += 1


@device_function
def _event_of(reason: int, side: int) -> int:
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
def fail_qp(worker: WorkerState, qp: QpRow, index: int, opcode: int, reason: int, side: int) -> None:
    """Move a QP or SQ to ERR. Its first failure also leaves an error record and, for some reasons, raises an event.

    The record is written before the state, the event or a CQE becomes visible.
    """
    first = qp.failed == 0
    if first:
        qp.failed = 1
        who = SEND_QUEUE if qp.kind == QueueKind.ETHERNET_SEND else side
        record_error(worker, who, qp.qpn, index, opcode, reason, ld8(worker.syndromes + reason))
        fence_release_sys()
    qp.state = QpState.ERR
    qp.retry_at = 0
    wake(qp)
    if first:
        if qp.kind != QueueKind.ETHERNET_SEND:
            signal_failure(qp)
        event = _event_of(reason, side)
        if event != _NO_EVENT:
            raise_qp_event(worker, qp, event)


@engine_function
def fail_send(worker: WorkerState, qp: QpRow, index: int, opcode: int, ce: int, reason: int) -> None:
    """Fail a send-queue WQE: move the QP to ERR and write an error CQE (IBTA 10.10.3)."""
    syndrome = ld8(worker.syndromes + reason)
    first = qp.told == 0
    qp.told = 1
    count_error(worker, reason, syndrome, REQUESTER)
    fail_qp(worker, qp, index, opcode, reason, REQUESTER)
    if ce == CompletionMode.ON_FIRST_ERROR and not first:
        return
    completion = Completion(CqeOpcode.REQ_ERR, qp.qpn, qp.user_index, index, opcode, syndrome=syndrome, vendor=reason)
    write_cqe(worker, CqRow(qp.send_cq), completion)


@engine_function
def fail_receive(worker: WorkerState, qp: QpRow, index: int, reason: int, syndrome: int) -> None:
    """Fail a receive WQE: move the QP to ERR and write an error CQE to the receive CQ."""
    count_error(worker, reason, syndrome, RESPONDER)
    fail_qp(worker, qp, index, 0, reason, RESPONDER)
    completion = Completion(CqeOpcode.RESP_ERR, qp.qpn, qp.user_index, index, syndrome=syndrome, vendor=reason)
    write_cqe(worker, CqRow(qp.recv_cq), completion)
