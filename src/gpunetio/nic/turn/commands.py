"""Engine commands: changes to a row that the control path posts, and that the engine executes between two WQEs."""

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
from ..queues.doorbells import clear_line, leave_sqd
from ..queues.events import raise_event, scan_arm_records
from ..state.cq import Channel, CqRow, Event
from ..state.qp import QP_ROW, QP_SETUP_BYTES, QpRow
from ..state.srq import SrqRow
from ..state.work_queue import add, remove, wake
from ..state.worker import WorkerState
from ..transport.eth_receive import modify_receive_queue
from ..transport.eth_send import clear_send_queue, modify_send_queue
from ..transport.execution import resize_shared, return_shared
from ..transport.pending import forget_pending
from ..transport.wire_kinds import arrivals, recall_sent
from . import work_queues


class EngineCommand(IntEnum):
    """A command for the engine. `EXECUTE` maps each to its function."""

    WRITE_ROW = 1  # copy a prepared row into place
    ADD_QP = 2  # the same for a QP, and start serving it
    MODIFY_QP = 3  # copy the set-up of a served QP, if it is still in the state that the interpreter saw
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
    READ_ROW = 14  # copy `row` to the command's buffer


class Result(IntEnum):
    """The result of a command (`command_result`)."""

    DONE = 0
    WRONG_STATE = 1
    TOO_FULL = 2


# --- queue pairs -----------------------------------------------------------------------------------------------------


@device_function
def _clear_positions(worker: WorkerState, qp: QpRow) -> None:
    for offset in range(QP_SETUP_BYTES, QP_ROW.size, 8):
        st64(qp + offset, 0)
    if qp.doorbell != 0:
        clear_line(worker, qp.doorbell)


@device_function
def _set_up(qp: QpRow, source: int) -> None:
    """Copy a prepared QP row. The QP may have moved to another worker since, so `worker` and `work_queue` stay."""
    worker, queue = qp.worker, qp.work_queue
    copy(qp, source, QP_SETUP_BYTES)
    qp.worker, qp.work_queue = worker, queue


@engine_function
def _forget(worker: WorkerState, qp: QpRow) -> None:
    """Cancel everything that a QP which is reset or destroyed has in progress."""
    forget_pending(worker, qp)
    recall_sent(qp)
    return_shared(qp)
    free_slots(worker, qp)
    recover_cq(CqRow(qp.send_cq))
    recover_cq(CqRow(qp.recv_cq))


@engine_function
def _modify(worker: WorkerState, qp: QpRow, source: QpRow, expected_state: int) -> int:
    """Copy a prepared row to a QP that is served, and enter its new state."""
    if qp.state != expected_state and qp.state != source.state:
        return Result.WRONG_STATE  # the engine has moved the QP to ERR meanwhile
    before, draining, wanted = qp.state, qp.drain, source.drain
    _set_up(qp, source)
    if wanted and not draining:
        qp.late, qp.sq_pi, qp.sq_drained = (qp.sq_pi & PI_MASK) + 1, qp.sq_sent, 0
    if draining and not wanted:
        leave_sqd(worker, qp)
    if before != QpState.RTR and qp.state == QpState.RTR:
        qp.expect_psn = qp.rq_psn
        qp.rx_from = arrivals(qp)
    if before == QpState.RTR and qp.state == QpState.RTS:
        qp.una_psn = qp.sq_psn
        qp.tx_psn = qp.sq_psn
        qp.end_psn = qp.sq_psn
        lives = worker.lives  # of all workers; commands come one at a time
        st64(lives, ld64(lives) + 1)
        qp.life = ld64(lives) << PSN_BITS | qp.sq_psn
    return Result.DONE


@engine_function
def _add_qp(worker: WorkerState, qp: QpRow) -> int:
    copy(qp, worker.command_src, QP_SETUP_BYTES)
    _clear_positions(worker, qp)
    add(worker, qp)
    return Result.DONE


@engine_function
def _modify_qp(worker: WorkerState, qp: QpRow) -> int:
    result = _modify(worker, qp, QpRow(worker.command_src), worker.command_state)
    wake(qp)
    if qp.state == QpState.ERR:
        work_queues.serve(qp.kind, worker, qp.work_queue)
    return result


@engine_function
def _reset_qp(worker: WorkerState, qp: QpRow) -> int:
    _forget(worker, qp)
    _set_up(qp, worker.command_src)
    _clear_positions(worker, qp)
    wake(qp)
    return Result.DONE


@engine_function
def _remove_qp(worker: WorkerState, qp: QpRow) -> int:
    _forget(worker, qp)
    remove(worker, qp)
    _clear_positions(worker, qp)
    for offset in range(0, QP_SETUP_BYTES, 8):
        st64(qp + offset, 0)
    return Result.DONE


@engine_function
def _move_qp(worker: WorkerState, qp: QpRow) -> int:
    remove(WorkerState(qp.worker), qp)
    add(WorkerState(ld64(worker.command_src)), qp)
    return Result.DONE


# --- Ethernet queues -------------------------------------------------------------------------------------------------


@engine_function
def _modify_rq(worker: WorkerState, row: int) -> int:
    done = modify_receive_queue(worker, row, worker.command_src, worker.command_state)
    return Result.DONE if done else Result.WRONG_STATE


@engine_function
def _add_sq(worker: WorkerState, qp: QpRow) -> int:
    _write_row(worker, qp)
    add(worker, qp)
    return Result.DONE


@engine_function
def _modify_sq(worker: WorkerState, row: int) -> int:
    done = modify_send_queue(worker, row, worker.command_src, worker.command_state)
    return Result.DONE if done else Result.WRONG_STATE


@engine_function
def _remove_sq(worker: WorkerState, qp: QpRow) -> int:
    remove(worker, qp)
    clear_send_queue(qp)
    return _write_row(worker, qp)


# --- any row ---------------------------------------------------------------------------------------------------------


@engine_function
def _write_row(worker: WorkerState, row: int) -> int:
    copy(row, worker.command_src, worker.command_bytes)
    return Result.DONE


@engine_function
def _read_row(worker: WorkerState, row: int) -> int:
    copy(worker.command_src, row, worker.command_bytes)
    return Result.DONE


@engine_function
def _raise_event(worker: WorkerState, channel: Channel) -> int:
    event = Event(worker.command_src)
    raise_event(worker, channel, event.cookie, event.type, event.number, event.syndrome)
    return Result.DONE


@engine_function
def _resize_cq(worker: WorkerState, cq: CqRow) -> int:
    scan_arm_records(worker)  # requests from before count completions in the old ring
    return Result.TOO_FULL if resize_cq(worker, cq, CqRow(worker.command_src)) != 0 else Result.DONE


@engine_function
def _resize_srq(worker: WorkerState, srq: SrqRow) -> int:
    resize_shared(srq, SrqRow(worker.command_src))
    return Result.DONE


EXECUTE: dict[int, DeviceFunction] = {
    EngineCommand.WRITE_ROW: _write_row, EngineCommand.READ_ROW: _read_row,
    EngineCommand.ADD_QP: _add_qp, EngineCommand.MODIFY_QP: _modify_qp, EngineCommand.RESET_QP: _reset_qp,
    EngineCommand.REMOVE_QP: _remove_qp, EngineCommand.MOVE_QP: _move_qp,
    EngineCommand.RAISE_EVENT: _raise_event,
    EngineCommand.RESIZE_CQ: _resize_cq, EngineCommand.RESIZE_SRQ: _resize_srq,
    EngineCommand.MODIFY_RQ: _modify_rq,
    EngineCommand.ADD_SQ: _add_sq, EngineCommand.MODIFY_SQ: _modify_sq, EngineCommand.REMOVE_SQ: _remove_sq,
}


@by_kind(EXECUTE)
def execute(op: int, worker: WorkerState, row: int) -> int:
    """Execute a command on a row. Return its `Result`."""
    ...
