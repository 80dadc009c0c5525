"""One turn of a worker: registers, wires, work queues, and at most one command. Runs on a CPU thread or on a GPU."""

from __future__ import annotations

from ...formats.doorbell import UAR_CQ_OFFSET, UAR_NO_DBR_OFFSET, UAR_REG_HALF, UAR_REG_OFFSET
from ...jit.compile import device_function, engine_function
from ...jit.ops import be64, clock_ns, exchange_gpu64, ld64, ld_acquire64, ld_relaxed64, st_release64
from ..memory.streams import at_work, serve_streams, start_streams
from ..queues.doorbells import announce, announced
from ..queues.events import hear_arm_registers, scan_arm_records, serve_arm_register
from ..state.counters import COUNTERS
from ..state.ethernet_queues import SQ_ROW
from ..state.near import is_in
from ..state.nic import nic_at
from ..state.qp import qp_row_at
from ..state.work_queue import entry, has_work, work_queue_at
from ..state.worker import WORKER, worker_at
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
    n.command_result = execute(n.command_op, nic, n.command_row)
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
