"""Commands: what the control path asks the engine to do between two WQEs, on the row that the command names."""

from __future__ import annotations

from enum import IntEnum

from ...formats.commands import QpState
from ...formats.doorbell import PI_MASK
from ...formats.packet import PSN_BITS
from ...jit.by_kind import by_kind
from ...jit.compile import DeviceFunction, device_function, engine_function
from ...jit.ops import copy, ld64, st64
from ..memory.staging import free_slots
from ..queues.completion import recover_cq, resize_cq
from ..queues.doorbells import clear_line, go_on
from ..queues.events import raise_event, scan_arm_records
from ..state.cq import event_at
from ..state.nic import nic_at
from ..state.qp import QP_ROW, QP_SETUP_BYTES, qp_row_at
from ..state.work_queue import add, remove, wake
from ..state.worker import worker_at
from ..transport.eth_receive import modify_receive_queue
from ..transport.eth_send import clear_send_queue, modify_send_queue
from ..transport.execution import resize_shared, return_shared
from ..transport.pending import forget_pending
from ..transport.wire_kinds import arrivals, recall_sent
from . import work_queues


class EngineCommand(IntEnum):
    """A command for the engine. `EXECUTE` has a function for each."""

    WRITE_ROW = 1  # copy a prepared row into place
    ADD_QP = 2  # the same for a QP, and start serving it
    MODIFY_QP = 3  # the same for a served QP, if it is still in the state that the interpreter saw
    RESET_QP = 4  # modify a QP to RST: forget all queue positions
    REMOVE_QP = 5  # stop serving a QP
    RAISE_EVENT = 6  # raise the prepared EVENT on the channel `row`
    RESIZE_CQ = 7  # switch to the ring of a prepared row
    RESIZE_SRQ = 8  # the same for an SRQ
    MOVE_QP = 9  # have the prepared WORKER serve a QP of another worker, while both are held
    MODIFY_RQ = 10  # copy the set-up of an RQ, if it is still in the state that the interpreter saw
    ADD_SQ = 11  # write the row of an SQ, and start serving it
    MODIFY_SQ = 12  # change the state of an SQ, if it is still in the one that the interpreter saw
    REMOVE_SQ = 13  # stop serving an SQ
    READ_ROW = 14  # copy from where `row` is to where the command has been prepared


class Result(IntEnum):
    """How a command ended (`command_result`)."""

    DONE = 0
    WRONG_STATE = 1
    TOO_FULL = 2


# --- queue pairs -----------------------------------------------------------------------------------------------------


@device_function
def _clear_positions(nic, row):
    for offset in range(QP_SETUP_BYTES, QP_ROW.size, 8):
        st64(row + offset, 0)
    q = qp_row_at(row)
    if q.doorbell != 0:
        clear_line(nic, q.doorbell)


@device_function
def _set_up(row, source):
    """Copy what a command has prepared for a QP. The QP may have moved since, so who serves it stays."""
    q = qp_row_at(row)
    worker, queue = q.worker, q.work_queue
    copy(row, source, QP_SETUP_BYTES)
    q.worker, q.work_queue = worker, queue


@engine_function
def _forget(nic, row):
    """Forget what a QP that is reset or destroyed has begun."""
    q = qp_row_at(row)
    forget_pending(nic, row)
    recall_sent(row)
    return_shared(row)
    free_slots(nic, row)
    recover_cq(q.send_cq)
    recover_cq(q.recv_cq)


@engine_function
def _modify(nic, row, source, expected_state):
    """Copy what a command has prepared for a QP that is served, and begin the state that it says."""
    q = qp_row_at(row)
    if q.state != expected_state and q.state != qp_row_at(source).state:
        return Result.WRONG_STATE  # the engine has moved the QP to ERR meanwhile
    before, draining, wanted = q.state, q.drain, qp_row_at(source).drain
    _set_up(row, source)
    if wanted and not draining:
        q.late, q.sq_pi, q.sq_drained = (q.sq_pi & PI_MASK) + 1, q.sq_sent, 0
    if draining and not wanted:
        go_on(nic, row)
    if before != QpState.RTR and q.state == QpState.RTR:
        q.expect_psn = q.rq_psn
        q.rx_from = arrivals(row)
    if before == QpState.RTR and q.state == QpState.RTS:
        q.una_psn = q.sq_psn
        q.tx_psn = q.sq_psn
        q.end_psn = q.sq_psn
        lives = nic_at(nic).lives  # of all workers; commands come one at a time
        st64(lives, ld64(lives) + 1)
        q.life = ld64(lives) << PSN_BITS | q.sq_psn
    return Result.DONE


@engine_function
def _add_qp(nic, row):
    copy(row, worker_at(nic).command_src, QP_SETUP_BYTES)
    _clear_positions(nic, row)
    add(nic, row)
    return Result.DONE


@engine_function
def _modify_qp(nic, row):
    n = worker_at(nic)
    result = _modify(nic, row, n.command_src, n.command_state)
    wake(row)
    if qp_row_at(row).state == QpState.ERR:
        work_queues.serve(qp_row_at(row).kind, nic, qp_row_at(row).work_queue)
    return result


@engine_function
def _reset_qp(nic, row):
    _forget(nic, row)
    _set_up(row, worker_at(nic).command_src)
    _clear_positions(nic, row)
    wake(row)
    return Result.DONE


@engine_function
def _remove_qp(nic, row):
    _forget(nic, row)
    remove(nic, row)
    _clear_positions(nic, row)
    for offset in range(0, QP_SETUP_BYTES, 8):
        st64(row + offset, 0)
    return Result.DONE


@engine_function
def _move_qp(nic, row):
    remove(qp_row_at(row).worker, row)
    add(ld64(worker_at(nic).command_src), row)
    return Result.DONE


# --- Ethernet queues -------------------------------------------------------------------------------------------------


@engine_function
def _modify_rq(nic, row):
    n = worker_at(nic)
    done = modify_receive_queue(nic, row, n.command_src, n.command_state)
    return Result.DONE if done else Result.WRONG_STATE


@engine_function
def _add_sq(nic, row):
    _write_row(nic, row)
    add(nic, row)
    return Result.DONE


@engine_function
def _modify_sq(nic, row):
    n = worker_at(nic)
    done = modify_send_queue(nic, row, n.command_src, n.command_state)
    return Result.DONE if done else Result.WRONG_STATE


@engine_function
def _remove_sq(nic, row):
    remove(nic, row)
    clear_send_queue(row)
    return _write_row(nic, row)


# --- any row ---------------------------------------------------------------------------------------------------------


@engine_function
def _write_row(nic, row):
    copy(row, worker_at(nic).command_src, worker_at(nic).command_bytes)
    return Result.DONE


@engine_function
def _read_row(nic, row):
    copy(worker_at(nic).command_src, row, worker_at(nic).command_bytes)
    return Result.DONE


@engine_function
def _raise_event(nic, row):
    event = event_at(worker_at(nic).command_src)
    raise_event(nic, row, event.cookie, event.type, event.number, event.syndrome)
    return Result.DONE


@engine_function
def _resize_cq(nic, row):
    scan_arm_records(nic)  # requests from before count completions in the old ring
    return Result.TOO_FULL if resize_cq(nic, row, worker_at(nic).command_src) != 0 else Result.DONE


@engine_function
def _resize_srq(nic, row):
    resize_shared(row, worker_at(nic).command_src)
    return Result.DONE


EXECUTE: dict[int, DeviceFunction] = {
    EngineCommand.WRITE_ROW: _write_row, EngineCommand.READ_ROW: _read_row,
    EngineCommand.ADD_QP: _add_qp, EngineCommand.MODIFY_QP: _modify_qp, EngineCommand.RESET_QP: _reset_qp,
    EngineCommand.REMOVE_QP: _remove_qp, EngineCommand.MOVE_QP: _move_qp,
    EngineCommand.RAISE_EVENT: _raise_event,
    EngineCommand.RESIZE_CQ: _resize_cq, EngineCommand.RESIZE_SRQ: _resize_srq,
    EngineCommand.MODIFY_RQ: _modify_rq,
    EngineCommand.ADD_SQ: _add_sq, EngineCommand.MODIFY_SQ: _modify_sq, EngineCommand.REMOVE_SQ: _remove_sq,
}  # fmt: skip


@by_kind(EXECUTE)
def execute(op, nic, row):
    """Execute a command on a row. Return its `Result`."""
