"""Requests without packets (control/regions/reach.py) to another process that are no run (gpu/runs.py), by one thread.

These are masked atomics, requests of several segments, and those that wrap around in their ring. NOPs, WAITs and DUMPs
are executed on the way. All others, and what fails a check, go as packets, by which the peer hears of them.
"""

from __future__ import annotations

from ...formats.commands import QpState, ServiceType
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import fence_sys
from ..memory.keys import find_in
from ..memory.streams import DEVICE_SHIFT, on_gpu
from ..queues.doorbells import poll_doorbell
from ..queues.local import execute_local
from ..queues.operations import is_atomic, is_local, is_masked, receive_cqe, returns_data, right_of
from ..queues.sent import complete_send
from ..queues.wqes import NOT_YET, build, check_wqe, in_one_piece, read_control, wqe_slot
from ..state.counters import counters_at
from ..state.message import message_at
from ..state.nic import nic_at
from ..state.objects import MKEY_ROW
from ..state.qp import EXTENDED_ATOMICS, qp_row_at
from ..state.work_queue import work_queue_at
from ..state.worker import worker_at
from .execution import execute_atomic, move_segments
from .send_queue import end_turn

_MOST = 32  # WQEs of a queue pair in a turn
_DONE, _WAITS, _PACKETS = 1, 0, -1  # what became of a WQE


@device_function
def _far(nic, row, message, right):
    """Return the address of the range that a message names in the peer's memory, or -1 if any check fails."""
    q = qp_row_at(row)
    m = message_at(message)
    if m.nbytes > q.peer_max or q.peer_rights & right != right:
        return -1
    key = m.rkey | q.peer_tag
    far = q.peer_keys + ((key >> 8) & nic_at(nic).mkey_mask) * MKEY_ROW.size
    return find_in(far, key, q.peer_pdn, m.raddr, m.nbytes, right & ~EXTENDED_ATOMICS)


@device_function
def _execute_far(nic, row, message, wqe, opcode, ds, index):
    """Execute a request in the peer's memory: return _DONE, or _PACKETS, and then nothing has happened."""
    right = right_of(opcode)
    if right == 0 or receive_cqe(opcode) != 0 or build(nic, row, message, wqe, opcode, ds, index) != 0:
        return _PACKETS
    m = message_at(message)
    if m.nbytes == 0 or m.device != 0:
        return _PACKETS
    address = _far(nic, row, message, right | (EXTENDED_ATOMICS if is_masked(opcode) else 0))
    if address >> DEVICE_SHIFT != 0:  # -1, too
        return _PACKETS
    if is_atomic(opcode):
        if (m.raddr | address) & (m.nbytes - 1):
            return _PACKETS
        execute_atomic(nic, message, opcode, address)
    else:
        move_segments(nic, message, address, returns_data(opcode))
    return _DONE


@engine_function
def _execute_next(nic, row):
    """Execute the next WQE: return _DONE, _WAITS or _PACKETS."""
    if on_gpu():
        fence_sys()  # between the bytes of this request and those before it
    q = qp_row_at(row)
    index = q.sq_ci
    reason = check_wqe(nic, row, index)
    if reason != 0:
        return _WAITS if reason == NOT_YET else _PACKETS
    wqe = wqe_slot(row, index)
    control = read_control(wqe)
    opcode, ds, blocks, ce = control.opcode, control.ds, control.blocks, control.ce
    nbytes = 0
    if is_local(opcode):
        done = execute_local(nic, row, wqe, opcode, ds, index) if opcode != WqeOpcode.MMO else _PACKETS
        if done <= 0:
            return _WAITS if done == 0 else _PACKETS
    else:
        message = worker_at(nic).message
        if _execute_far(nic, row, message, in_one_piece(row, message, wqe, index, blocks), opcode, ds, index) < 0:
            return _PACKETS
        nbytes = message_at(message).nbytes
    counters = counters_at(worker_at(nic).counters)
    counters.rdma_tx_bytes += nbytes
    counters.sq_wqes += 1
    q.retries, q.rnr_retries = 0, 0
    complete_send(nic, row, index, opcode, ce, nbytes)
    q.sq_ci = index + blocks
    q.sq_next, q.sq_sent = q.sq_ci, q.sq_ci
    return _DONE


@engine_function
def serve(nic, queue):
    """Execute WQEs of a queue pair with a wire, on borrowed rows.

    Return twice how many, and 1 if the next one takes packets.
    """
    row = work_queue_at(queue).row
    q = qp_row_at(row)
    other = (q.state ^ QpState.RTS) | (q.service ^ ServiceType.RC) | q.drain | q.retry_at | q.copied | q.stream
    if other != 0 or q.peer_keys == 0 or q.sq_next != q.sq_ci:
        return 1
    poll_doorbell(nic, row)
    done = 0
    outcome = _DONE
    while outcome == _DONE and done < _MOST and q.sq_ci != q.sq_pi and q.state == QpState.RTS:
        outcome = _execute_next(nic, row)
        if outcome == _DONE:
            done += 1
    end_turn(nic, queue)
    return done << 1 | (1 if outcome == _PACKETS else 0)
