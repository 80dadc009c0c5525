"""Requests without packets (control/regions/reach.py) to another process, executed by one thread.

Warp batches (gpu/warp_batches.py) do not contain these requests: masked atomics, requests of several segments, and
those that wrap around in their ring. NOPs, WAITs and DUMPs are executed on the way.
All others, and what fails a check, go as packets, by which the peer hears of them.
"""

from __future__ import annotations

from ...formats.commands import QpState, ServiceType
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import fence_sys
from ..memory.keys import key_row
from ..memory.streams import DEVICE_SHIFT, on_gpu
from ..queues.doorbells import poll_doorbell
from ..queues.local import execute_local
from ..queues.operations import is_atomic, is_local, is_masked, receive_cqe, returns_data, right_of
from ..queues.send_completion import complete_send
from ..queues.wqes import NOT_YET, build_message, check_wqe, in_one_piece, read_control, wqe_slot
from ..state.counters import CounterSet
from ..state.message import Message
from ..state.qp import EXTENDED_ATOMICS, QpRow
from ..state.work_queue import WorkQueue
from ..state.worker import WorkerState
from .execution import execute_atomic, move_segments
from .peer_memory import peer_range
from .send_queue import end_turn

_MOST = 32  # WQEs of a queue pair in a turn
_DONE, _WAITS, _PACKETS = 1, 0, -1  # what became of a WQE


@device_function
def _far(worker: WorkerState, qp: QpRow, message: Message, right: int) -> int:
    """Return the address of the range that a message names in the peer's memory, or -1 if any check fails."""
    key = message.rkey | qp.peer_tag
    far = key_row(qp.peer_keys, worker.mkey_mask, key)
    return peer_range(far, key, qp.peer_pdn, qp.peer_rights, qp.peer_max, message.raddr, message.nbytes, right)


@device_function
def _execute_far(worker: WorkerState, qp: QpRow, message: Message, wqe: int, opcode: int, ds: int, index: int) -> int:
    """Execute a request in the peer's memory: return _DONE, or _PACKETS, and then nothing has happened."""
    right = right_of(opcode)
    if right == 0 or receive_cqe(opcode) != 0 or build_message(worker, qp, message, wqe, opcode, ds, index) != 0:
        return _PACKETS
    if message.nbytes == 0 or message.device != 0:
        return _PACKETS
    address = _far(worker, qp, message, right | (EXTENDED_ATOMICS if is_masked(opcode) else 0))
    if address >> DEVICE_SHIFT != 0:  # -1, too
        return _PACKETS
    if is_atomic(opcode):
        if (message.raddr | address) & (message.nbytes - 1):
            return _PACKETS
        execute_atomic(worker, message, opcode, address)
    else:
        move_segments(worker, message, address, returns_data(opcode))
    return _DONE


@engine_function
def _execute_next(worker: WorkerState, qp: QpRow) -> int:
    """Execute the next WQE: return _DONE, _WAITS or _PACKETS."""
    if on_gpu():
        fence_sys()  # between the bytes of this request and those before it
    index = qp.sq_ci
    reason = check_wqe(worker, qp, index)
    if reason != 0:
        return _WAITS if reason == NOT_YET else _PACKETS
    wqe = wqe_slot(qp, index)
    control = read_control(wqe)
    opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
    nbytes = 0
    if is_local(opcode):
        done = execute_local(worker, qp, wqe, opcode, ds, index) if opcode != WqeOpcode.MMO else _PACKETS
        if done <= 0:
            return _WAITS if done == 0 else _PACKETS
    else:
        message = Message(worker.message)
        if _execute_far(worker, qp, message, in_one_piece(qp, message, wqe, index, blocks), opcode, ds, index) < 0:
            return _PACKETS
        nbytes = message.nbytes
    counters = CounterSet(worker.counters)
    counters.rdma_tx_bytes += nbytes
    counters.sq_wqes += 1
    qp.retries, qp.rnr_retries = 0, 0
    complete_send(worker, qp, index, opcode, ce, nbytes)
    qp.sq_ci = index + blocks
    qp.sq_next, qp.sq_sent = qp.sq_ci, qp.sq_ci
    return _DONE


@engine_function
def serve(worker: WorkerState, queue: WorkQueue) -> int:
    """Execute WQEs of a queue pair with a wire, on cached rows.

    Return twice how many, and 1 if the next one takes packets.
    """
    qp = QpRow(queue.row)
    other = (qp.state ^ QpState.RTS) | (qp.service ^ ServiceType.RC) | qp.drain | qp.retry_at | qp.copied | qp.stream
    if other != 0 or qp.peer_keys == 0 or qp.sq_next != qp.sq_ci:
        return 1
    poll_doorbell(worker, qp)
    done = 0
    outcome = _DONE
    while outcome == _DONE and done < _MOST and qp.sq_ci != qp.sq_pi and qp.state == QpState.RTS:
        outcome = _execute_next(worker, qp)
        if outcome == _DONE:
            done += 1
    end_turn(worker, queue)
    return done << 1 | (1 if outcome == _PACKETS else 0)
