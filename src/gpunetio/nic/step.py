"""One turn of a worker: registers, wires, work queues, and at most one command. Runs on a CPU thread or on a GPU."""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import be64, clock_ns, copy, exchange_gpu64, ld64, ld_acquire64, ld_relaxed64, st64, st_release64
from ..formats.commands import QpState
from ..formats.doorbell import PI_MASK, UAR_CQ_OFFSET, UAR_NO_DBR_OFFSET, UAR_REG_HALF, UAR_REG_OFFSET
from ..formats.packet import PSN_BITS
from . import work_queues
from .queues.completion import recover_cq, resize_cq
from .queues.doorbells import announce, announced, clear_line, go_on
from .queues.events import hear_arm_registers, raise_event, scan_arm_records, serve_arm_register
from .dma.streams import at_work, serve_streams, start_streams
from .transport.execution import resize_shared, return_shared
from .dma.staging import free_slots
from .state.counters import COUNTERS
from .state.cq import event_at
from .state.ethernet import SQ_ROW
from .state.near import is_in
from .state.nic import nic_at
from .state.worker import WORKER, worker_at
from .state.qp import QP_ROW, QP_SETUP_BYTES, qp_row_at
from .state.work_queue import add, entry, has_work, remove, wake, work_queue_at
from .transport.delivery import qp_row
from .transport.eth_receive import modify_receive_queue
from .transport.eth_send import clear_send_queue, modify_send_queue
from .transport.pending import forget_pending, send_pending
from .transport.wire_kinds import arrivals, flush_wires, recall_sent, serve_wires

# What the command interpreter may ask the engine to do between two WQEs.
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

SCANNED = 256  # doorbell records at a time: each is on a cache line of its own, mostly on a page of its own

# A turn starts at a random QP, because the first QP gets the last receive of an SRQ. A fixed order, or one that
# advances by one, falls in step with the timers of the QPs that wait. A linear congruential generator (Knuth).
_LCG, _POSITIVE = 6364136223846793005, (1 << 63) - 1

# command_result
DONE, WRONG_STATE, TOO_FULL = 0, 1, 2



# --- commands ------------------------------------------------------------------------------------------------------


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
def _modify(nic, row, source, expected_state):
    q = qp_row_at(row)
    if q.state != expected_state and q.state != qp_row_at(source).state:
        return WRONG_STATE  # the engine has moved the QP to ERR meanwhile
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
    return DONE


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
def _remove(nic, row):
    remove(nic, row)
    _clear_positions(nic, row)
    for offset in range(0, QP_SETUP_BYTES, 8):
        st64(row + offset, 0)


@engine_function
def _apply(nic):
    """Execute the posted command."""
    n = worker_at(nic)
    op = n.command_op
    row = n.command_row
    n.command_result = DONE
    if op == WRITE_ROW:
        copy(row, n.command_src, n.command_bytes)
    elif op == READ_ROW:
        copy(n.command_src, row, n.command_bytes)
    elif op == ADD_QP:
        copy(row, n.command_src, QP_SETUP_BYTES)
        _clear_positions(nic, row)
        add(nic, row)
    elif op == MODIFY_QP:
        n.command_result = _modify(nic, row, n.command_src, n.command_state)
        wake(row)
        if qp_row_at(row).state == QpState.ERR:
            work_queues.serve(qp_row_at(row).kind, nic, qp_row_at(row).work_queue)
    elif op == RESET_QP:
        _forget(nic, row)
        _set_up(row, n.command_src)
        _clear_positions(nic, row)
        wake(row)
    elif op == REMOVE_QP:
        _forget(nic, row)
        _remove(nic, row)
    elif op == RAISE_EVENT:
        event = event_at(n.command_src)
        raise_event(nic, row, event.cookie, event.type, event.number, event.syndrome)
    elif op == RESIZE_CQ:
        scan_arm_records(nic)  # requests from before count completions in the old ring
        n.command_result = TOO_FULL if resize_cq(nic, row, n.command_src) != 0 else DONE
    elif op == RESIZE_SRQ:
        resize_shared(row, n.command_src)
    elif op == MOVE_QP:
        remove(qp_row_at(row).worker, row)
        add(ld64(n.command_src), row)
    elif op == MODIFY_RQ:
        done = modify_receive_queue(nic, row, n.command_src, n.command_state)
        n.command_result = DONE if done else WRONG_STATE
    elif op == ADD_SQ:
        copy(row, n.command_src, n.command_bytes)
        add(nic, row)
    elif op == MODIFY_SQ:
        done = modify_send_queue(nic, row, n.command_src, n.command_state)
        n.command_result = DONE if done else WRONG_STATE
    elif op == REMOVE_SQ:
        remove(nic, row)
        clear_send_queue(row)
        copy(row, n.command_src, n.command_bytes)


@engine_function
def serve_command(nic):
    """Execute a posted command: return 1, or 0 if there is none or it has to wait.

    The command, and the worker, waits until no DMA stream is at work. Then no copy uses what the command takes.
    """
    n = worker_at(nic)
    posted = ld_acquire64(nic + WORKER.command_seq)
    if posted == n.command_done:
        return 0
    if n.stream_count != 0 and at_work(nic):
        n.holding = 1
        return 0
    n.holding = 0
    _apply(nic)
    st_release64(nic + WORKER.command_done, posted)
    return 1


# --- registers rung by hand ----------------------------------------------------------------------------------------


@device_function
def named_by(nic, raw):
    """Return the address of the row of the QP or SQ that a ring names, or 0 if there is none."""
    number = (be64(raw) >> 8) & 0xFFFFFF
    row = qp_row(nic, number)
    if qp_row_at(row).qpn != number:
        row = nic_at(nic).sqs + (number & nic_at(nic).sq_mask) * SQ_ROW.size
    return row if number != 0 and qp_row_at(row).qpn == number else 0


@device_function
def _serve_register(nic, register):
    """Consume a UAR's own register, and announce its index to the QP or SQ that it names: return 1 if it was rung.

    If another worker serves the QP, it finds the index in the QP's doorbell line.
    """
    if ld_relaxed64(register) == 0:
        return 0
    raw = exchange_gpu64(register, 0)
    row = named_by(nic, raw)
    if row == 0:
        return 1
    q = qp_row_at(row)
    line = q.doorbell
    if q.worker == nic:
        announce(nic, row, announced(be64(raw)))
    elif line != 0:  # the QP still exists
        st_release64(line, raw)
    return 1


@engine_function
def serve_registers(nic):
    """Serve the registers of every UAR page: return how many had been rung. Only the first worker has pages."""
    n = worker_at(nic)
    hear_arm_registers(nic)
    done = 0
    for i in range(ld_relaxed64(nic + WORKER.uar_count)):
        page = ld_relaxed64(n.uars + 8 * i)
        done += _serve_register(nic, page + UAR_REG_OFFSET) + _serve_register(nic, page + UAR_NO_DBR_OFFSET)
        done += _serve_register(nic, page + UAR_REG_OFFSET + UAR_REG_HALF)
        done += serve_arm_register(nic, page)
    return done


@device_function
def is_register_rung(nic):
    """Return what is not 0 if a queue was rung in a UAR's own register."""
    rung = 0
    for i in range(ld_relaxed64(nic + WORKER.uar_count)):
        page = ld_relaxed64(worker_at(nic).uars + 8 * i)
        rung |= ld_relaxed64(page + UAR_REG_OFFSET) | ld_relaxed64(page + UAR_NO_DBR_OFFSET)
        rung |= ld_relaxed64(page + UAR_REG_OFFSET + UAR_REG_HALF)
    return rung


@device_function
def is_arm_register_rung(nic):
    """Return what is not 0 if a CQ was armed in a register."""
    rung = ld_relaxed64(nic + WORKER.arms_rung) ^ ld_relaxed64(nic + WORKER.arms_seen)
    for i in range(ld_relaxed64(nic + WORKER.uar_count)):
        rung |= ld_relaxed64(ld_relaxed64(worker_at(nic).uars + 8 * i) + UAR_CQ_OFFSET)
    return rung


# --- the turn ------------------------------------------------------------------------------------------------------


@engine_function
def scan_queues(nic):
    """Scan doorbell records for missed rings: all of them, or the next SCANNED if there are more."""
    n = worker_at(nic)
    for _ in range(min(n.active_count, SCANNED)):
        n.scan_at = n.scan_at + 1 if n.scan_at + 1 < n.active_count else 0
        w = work_queue_at(entry(nic, n.scan_at))
        work_queues.scan(w.kind, nic, w.row)


@engine_function
def scan_records(nic):
    """Scan the records of work queues, and those by which CQs are armed."""
    if worker_at(nic).paused == 0:
        scan_queues(nic)
        scan_arm_records(nic)


@device_function
def _paused(nic):
    """Return whether the NIC is paused, as `SoftNic.pause` requested."""
    n = worker_at(nic)
    if n.pause_at >= 0 and ld64(n.counters + COUNTERS.sq_wqes) >= n.pause_at and not _in_flight(nic):
        n.paused = 1
        n.pause_at = -1
    return n.paused


@engine_function
def _in_flight(nic):
    """Return whether a started WQE waits for its peer."""
    n = worker_at(nic)
    for i in range(n.active_count):
        w = work_queue_at(entry(nic, i))
        if work_queues.in_flight(w.kind, w.row):
            return True
    return False


@device_function
def serve_queues(nic, which):
    """Serve the work queues that have work: return how much was done.

    `which` is the address of bits (state/near.py) of those that are meant; 0: all.
    """
    n = worker_at(nic)
    done = 0
    at = (n.served_first >> 33) % max(n.active_count, 1)
    for _ in range(n.active_count):
        queue = entry(nic, at)
        if (which == 0 or is_in(which, at) != 0) and has_work(queue):
            done += work_queues.serve(work_queue_at(queue).kind, nic, queue)
        at = at + 1 if at + 1 < n.active_count else 0
    return done


@device_function
def select_first(nic):
    """Select the work queue with which the next turn begins."""
    n = worker_at(nic)
    n.served_first = n.served_first * _LCG + 1 & _POSITIVE


@device_function
def serve_host(nic):
    """Do what the host asks for: execute a command, and serve registers. Return how much.

    If all else has to wait, return -1 minus that.
    """
    n = worker_at(nic)
    done = serve_command(nic)
    if n.holding != 0 or ld_acquire64(nic + WORKER.hold) != 0 or _paused(nic):
        return -1 - done
    return done + serve_registers(nic)


@device_function
def serve_peers(nic):
    """Serve the wires and the work queues: return how much was done."""
    n = worker_at(nic)
    done = 0
    if n.wire_count != 0:
        done += serve_wires(nic)  # before the timers: an acknowledgement may have arrived
    done += serve_queues(nic, 0)
    if done > 0:
        select_first(nic)
    if n.wire_count != 0:
        send_pending(nic)
        flush_wires(nic)
    return done


@device_function
def read_clock(nic):
    """Set the time of the turn."""
    n = worker_at(nic)
    if n.virtual_time == 0:
        n.now = clock_ns()


@engine_function
def step(nic):
    """Make one turn: return how much was done."""
    n = worker_at(nic)
    read_clock(nic)
    done = 0
    if n.stream_count != 0:
        done = serve_streams(nic)
    asked = serve_host(nic)
    if asked < 0:
        return done - 1 - asked
    done += asked + serve_peers(nic)
    if n.stream_count != 0:
        start_streams(nic)
    return done
