"""Completion of send WQEs that have succeeded: their CQEs, which contain small responses if the QP requests that."""

from __future__ import annotations

from ...formats.commands import ResponsesToCqe
from ...formats.cqe import INLINE_64_BYTES, CqeFormat, CqeOpcode
from ...formats.wqe import SEGMENT, CompletionMode
from ...jit.compile import device_function, engine_function
from ...jit.ops import fetch_add_acq_rel_gpu64, ld64
from ..memory.streams import copy_and_wait
from ..state.cq import EQ_ROW, CqRow
from ..state.message import MESSAGE, Message
from ..state.qp import QpRow
from ..state.worker import WorkerState
from .completion import REQUESTER, Completion, fail_qp, format_for, stage_payload, write_cqe
from .operations import returns_data, segments_of
from .wqes import gather, in_one_piece, read_control, wqe_slot


@device_function
def complete_send(worker: WorkerState, qp: QpRow, index: int, opcode: int, ce: int, nbytes: int) -> None:
    """Complete a send-queue WQE that has succeeded: write a CQE if the WQE asks for one."""
    if ce < CompletionMode.ALWAYS:
        return
    if ce == CompletionMode.CQE_AND_EQE:
        event_queue = worker.eqs + CqRow(qp.send_cq).eqn * EQ_ROW.size
        fetch_add_acq_rel_gpu64(event_queue + EQ_ROW.pi, 1)
    if qp.cs_req != ResponsesToCqe.NONE:
        reason = _write_with_response(worker, qp, index, opcode, nbytes)
    else:
        completion = Completion(CqeOpcode.REQ, qp.qpn, qp.user_index, index, opcode, nbytes)
        reason = write_cqe(worker, CqRow(qp.send_cq), completion)
    if reason != 0:
        fail_qp(worker, qp, index, opcode, reason, REQUESTER)


@engine_function
def _write_with_response(worker: WorkerState, qp: QpRow, index: int, opcode: int, nbytes: int) -> int:
    """Write the CQE of a WQE of a QP with small responses in CQEs (qpc.cs_req). Return what `write_cqe` returns.

    A card writes a response either to the CQE or to the memory that the WQE names. Here the response is already in
    memory, and the poller copies the same bytes to that memory once more.
    """
    form = format_for(qp.cs_req, nbytes) if returns_data(opcode) else CqeFormat.NO_INLINE
    head = _read_back(worker, qp, index, opcode, nbytes) if form != CqeFormat.NO_INLINE else 0
    if head == 0:
        form = CqeFormat.NO_INLINE
    completion = Completion(CqeOpcode.REQ, qp.qpn, qp.user_index, index, opcode, nbytes, form=form, head=head)
    return write_cqe(worker, CqRow(qp.send_cq), completion)


@engine_function
def _read_back(worker: WorkerState, qp: QpRow, index: int, opcode: int, nbytes: int) -> int:
    """Collect a response of `nbytes` from the memory that its WQE names. Return the address of the copy, or 0.

    It is 0 if that memory was deregistered since the response arrived, or if the WQE was changed.
    """
    message = Message(worker.message)
    wqe = wqe_slot(qp, index)
    wqe = in_one_piece(qp, message, wqe, index, read_control(wqe).blocks)
    control = read_control(wqe)
    data = wqe + segments_of(opcode, control.opmod) * SEGMENT
    if gather(worker, qp, message, data, wqe + control.ds * SEGMENT, 0) != 0 or message.nbytes != nbytes:
        return 0
    payload = stage_payload(message, INLINE_64_BYTES)
    segment = message + MESSAGE.segments
    end = segment + 16 * message.nsegments
    done = 0
    while segment != end:
        part = ld64(segment + 8)
        if copy_and_wait(worker, payload + done, ld64(segment), part) != 0:
            return 0
        done += part
        segment += 16
    return payload
