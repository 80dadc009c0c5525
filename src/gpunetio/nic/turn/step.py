"""One turn of a worker: registers, wires, work queues, and at most one command. Runs on a CPU thread or on a GPU."""

from __future__ import annotations

from ...formats.doorbell import UAR_CQ_OFFSET, UAR_NO_DBR_OFFSET, UAR_REG_HALF, UAR_REG_OFFSET
from ...jit.compile import device_function, engine_function
from ...jit.ops import be64, clock_ns, exchange_gpu64, ld64, ld_acquire64, ld_relaxed64, st_release64
from ..memory.streams import copies_in_flight, poll_streams, record_streams
from ..queues.doorbells import announce, announced
from ..queues.events import poll_arm_registers, scan_arm_records, serve_arm_register
from ..state.counters import COUNTERS
from ..state.ethernet_queues import SQ_ROW
from ..state.qp import QpRow
from ..state.slice_shared import has_bit
from ..state.work_queue import entry, has_work
from ..state.worker import WORKER, WorkerState
from ..transport.delivery import qp_row
from ..transport.pending import send_pending
from ..transport.wire_kinds import flush_wires, serve_wires
from . import work_queues
from .commands import execute

SCANNED = 256  # doorbell records at a time: each is on a cache line of its own, mostly on a page of its own

# A turn starts at a random QP, because the first QP gets the last receive of an SRQ. A fixed order, or one that
# advances by one, falls in step with the timers of the QPs that wait. A linear congruential generator (Knuth).
_LCG, _POSITIVE = 6364136223846793005, (1 << 63) - 1


# --- commands --------------------------------------------------------------------------------------------------------


@engine_function
def serve_command(worker: WorkerState) -> int:
    """Execute a posted command. Return 1, or 0 if there is none or it has to wait.

    The command and the worker wait until no copy of a DMA stream is in flight: it may use what the command removes.
    """
    posted = ld_acquire64(worker + WORKER.command_seq)
    if posted == worker.command_done:
        return 0
    if worker.stream_count != 0 and copies_in_flight(worker):
        worker.holding = 1
        return 0
    worker.holding = 0
    worker.command_result = execute(worker.command_op, worker, worker.command_row)
    st_release64(worker + WORKER.command_done, posted)
    return 1


# --- registers rung by hand ----------------------------------------------------------------------------------------


@device_function
def row_of_ring(worker: WorkerState, raw: int) -> QpRow:
    """Return the row of the QP or SQ that a ring names, or 0 if there is none."""
    number = (be64(raw) >> 8) & 0xFFFFFF
    qp = qp_row(worker, number)
    if qp.qpn != number:
        qp = QpRow(worker.sqs + (number & worker.sq_mask) * SQ_ROW.size)
    return qp if number != 0 and qp.qpn == number else QpRow(0)


@device_function
def _serve_register(worker: WorkerState, register: int) -> int:
    """Consume a ring in a register of a UAR, and announce its index to the QP or SQ that it names. Return 1 if rung.

    If another worker serves the QP, it finds the index in the QP's doorbell line.
    """
    if ld_relaxed64(register) == 0:
        return 0
    raw = exchange_gpu64(register, 0)
    qp = row_of_ring(worker, raw)
    if qp == 0:
        return 1
    line = qp.doorbell
    if qp.worker == worker:
        announce(worker, qp, announced(be64(raw)))
    elif line != 0:  # the QP still exists
        st_release64(line, raw)
    return 1


@engine_function
def serve_registers(worker: WorkerState) -> int:
    """Serve the registers of every UAR page. Return how many had been rung. Only the first worker has pages."""
    poll_arm_registers(worker)
    done = 0
    for i in range(ld_relaxed64(worker + WORKER.uar_count)):
        page = ld_relaxed64(worker.uars + 8 * i)
        done += _serve_register(worker, page + UAR_REG_OFFSET) + _serve_register(worker, page + UAR_NO_DBR_OFFSET)
        done += _serve_register(worker, page + UAR_REG_OFFSET + UAR_REG_HALF)
        done += serve_arm_register(worker, page)
    return done


@device_function
def is_register_rung(worker: WorkerState) -> int:
    """Return a value other than 0 if a queue was rung in a register of a UAR."""
    rung = 0
    for i in range(ld_relaxed64(worker + WORKER.uar_count)):
        page = ld_relaxed64(worker.uars + 8 * i)
        rung |= ld_relaxed64(page + UAR_REG_OFFSET) | ld_relaxed64(page + UAR_NO_DBR_OFFSET)
        rung |= ld_relaxed64(page + UAR_REG_OFFSET + UAR_REG_HALF)
    return rung


@device_function
def is_arm_register_rung(worker: WorkerState) -> int:
    """Return a value other than 0 if a CQ was armed in a register."""
    rung = ld_relaxed64(worker + WORKER.arms_rung) ^ ld_relaxed64(worker + WORKER.arms_seen)
    for i in range(ld_relaxed64(worker + WORKER.uar_count)):
        rung |= ld_relaxed64(ld_relaxed64(worker.uars + 8 * i) + UAR_CQ_OFFSET)
    return rung


# --- the turn ------------------------------------------------------------------------------------------------------


@engine_function
def scan_queues(worker: WorkerState) -> None:
    """Scan doorbell records for missed rings: all of them, or the next SCANNED if there are more."""
    for _ in range(min(worker.active_count, SCANNED)):
        worker.scan_at = worker.scan_at + 1 if worker.scan_at + 1 < worker.active_count else 0
        queue = entry(worker, worker.scan_at)
        work_queues.scan(queue.kind, worker, queue.row)


@engine_function
def scan_records(worker: WorkerState) -> None:
    """Scan the records of work queues, and those by which CQs are armed."""
    if worker.paused == 0:
        scan_queues(worker)
        scan_arm_records(worker)


@device_function
def _paused(worker: WorkerState) -> int:
    """Return whether the NIC is paused, as `SoftNic.pause` requested."""
    if worker.pause_at >= 0 and ld64(worker.counters + COUNTERS.sq_wqes) >= worker.pause_at and not _in_flight(worker):
        worker.paused = 1
        worker.pause_at = -1
    return worker.paused


@engine_function
def _in_flight(worker: WorkerState) -> bool:
    """Return whether a started WQE waits for its peer."""
    for i in range(worker.active_count):
        queue = entry(worker, i)
        if work_queues.in_flight(queue.kind, queue.row):
            return True
    return False


@device_function
def serve_queues(worker: WorkerState, which: int) -> int:
    """Serve the work queues that have work. Return how much was done.

    `which` is the address of bits (state/slice_shared.py) that select work queues; 0 selects all.
    """
    done = 0
    at = (worker.served_first >> 33) % max(worker.active_count, 1)
    for _ in range(worker.active_count):
        queue = entry(worker, at)
        if (which == 0 or has_bit(which, at) != 0) and has_work(queue):
            done += work_queues.serve(queue.kind, worker, queue)
        at = at + 1 if at + 1 < worker.active_count else 0
    return done


@device_function
def select_first(worker: WorkerState) -> None:
    """Select the work queue with which the next turn begins."""
    worker.served_first = worker.served_first * _LCG + 1 & _POSITIVE


@device_function
def serve_host(worker: WorkerState) -> int:
    """Serve requests of the host: execute a command, and serve registers. Return how much was done.

    If everything else has to wait, return -1 minus that.
    """
    done = serve_command(worker)
    if worker.holding != 0 or ld_acquire64(worker + WORKER.hold) != 0 or _paused(worker):
        return -1 - done
    return done + serve_registers(worker)


@device_function
def serve_peers(worker: WorkerState) -> int:
    """Serve the wires and the work queues. Return how much was done."""
    done = 0
    if worker.wire_count != 0:
        done += serve_wires(worker)  # before the timers: an acknowledgement may have arrived
    done += serve_queues(worker, 0)
    if done > 0:
        select_first(worker)
    if worker.wire_count != 0:
        send_pending(worker)
        flush_wires(worker)
    return done


@device_function
def read_clock(worker: WorkerState) -> None:
    """Set the time of the turn."""
    if worker.virtual_time == 0:
        worker.now = clock_ns()


@engine_function
def step(worker: WorkerState) -> int:
    """Make one turn. Return how much was done."""
    read_clock(worker)
    done = 0
    if worker.stream_count != 0:
        done = poll_streams(worker)
    asked = serve_host(worker)
    if asked < 0:
        return done - 1 - asked
    done += asked + serve_peers(worker)
    if worker.stream_count != 0:
        record_streams(worker)
    return done
