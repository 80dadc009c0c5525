"""put_bw, get_bw, write_bw. parts.py describes the arguments."""

from __future__ import annotations

from ... import device as dev
from ...device import device_function, kernel
from ...device.scope import ALONE, from_leader
from ...formats.device_structs import DEV_QP
from .. import timestamps
from ..ends import AT, ROW
from .parts import LOOK_EVERY, RECORD, STATUS, STOPPED, place, record, wait_together, wake

_SQ_PI = DEV_QP.sq_wqe_pi


@device_function
def _post_share(
    reading: int, end: int, qp: dev.VerbsQp, scope: int, number: int, threads: int, size: int, total: int, slots: int,
    first: int, count: int, stop: int, part: int,
) -> int:
    """Post the messages number, number + threads, … of a launch. Return the last ticket, or a negative status.

    The threads of a warp or block post together. Those with no message left post a NOP.
    """
    raddr, rkey = dev.ld64(end + AT.raddr), dev.ld64(end + AT.rkey)
    laddr, lkey = dev.ld64(end + AT.laddr), dev.ld64(end + AT.lkey)
    ticket = 0
    posted = 0
    for base in range(0, count, threads):
        mine = base + number < count
        if scope == dev.THREAD and not mine:
            break
        k = first + base + number
        at = k % slots * size
        nbytes = min(size, total - k * size) if mine else 0
        begin = timestamps.now(part)
        if reading:
            ticket = dev.get(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.GPU, dev.DEFAULT, scope)
        else:
            ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.GPU, dev.DEFAULT, scope)
        if ticket < 0:
            return ticket
        if part != 0 and mine:
            timestamps.note(part, k, begin, ticket)
            timestamps.look(part, qp, dev.GPU)
        posted += 1  # noqa: SIM113 - compiled code has no enumerate
        if posted & (LOOK_EVERY - 1) == 0 and from_leader(dev.ld_relaxed64(stop), scope, ALONE) != 0:
            return STOPPED
    return ticket


@device_function
def _one_sided(
    reading: int, ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int,
    trace: int, stop: int, out: int,
) -> None:
    thread, threads = dev.global_id(), dev.block_dim() * dev.grid_dim()
    queue, number = place(queues, scope)
    end = ends + ROW * queue
    qp = dev.VerbsQp(dev.ld64(end + AT.qp))
    part = timestamps.part_of(trace, thread)
    status = wake(qp, scope)
    start = dev.clock_ns()
    if status == dev.OK and (scope != dev.THREAD or number < count):
        status = _post_share(
            reading, end, qp, scope, number, threads, size, total, slots, first, count, stop, part
        )
        if status >= 0:
            timestamps.finish(part, qp, dev.GPU)
            status = wait_together(qp, status, scope, dev.ld64(end + AT.dump), dev.ld64(end + AT.lkey))
    record(out, thread, start, status)


@kernel
def put_bw(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Post puts from all threads of the grid on shared queues, and wait for the last tickets."""
    _one_sided(0, ends, queues, scope, size, total, slots, first, count, trace, stop, out)


@kernel
def get_bw(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Post gets from all threads of the grid on shared queues, and wait for the last tickets."""
    _one_sided(1, ends, queues, scope, size, total, slots, first, count, trace, stop, out)


@device_function
def _submit_round(qp: dev.VerbsQp, end: int, room: int, stop: int, part: int, message: int, begin: int) -> int:
    """Announce everything below `end`, then wait until at most `room` of it is incomplete."""
    status = dev.submit(qp, end, dev.EXCLUSIVE)
    timestamps.note(part, message, begin, end - 1)
    timestamps.look(part, qp, dev.EXCLUSIVE)
    if status == dev.OK and end > room:
        status = dev.poll_at(qp, end - room - 1, dev.EXCLUSIVE)
    if status == dev.OK and dev.ld_relaxed64(stop) != 0:
        return STOPPED
    return status


@kernel
def write_bw(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Post writes without reservation: a block fills its queue at computed indices, and its last thread submits.

    A round is half of the queue, so that the NIC works on one half while threads fill the other.
    """
    thread, threads, block = dev.thread_idx(), dev.block_dim(), dev.block_idx()
    end = ends + ROW * block
    qp = dev.VerbsQp(dev.ld64(end + AT.qp))
    raddr, rkey = dev.ld64(end + AT.raddr), dev.ld64(end + AT.rkey)
    laddr, lkey = dev.ld64(end + AT.laddr), dev.ld64(end + AT.lkey)
    last = block * threads + threads - 1
    verdict = out + last * RECORD + STATUS
    part = timestamps.part_of(trace, block)  # only the last thread uses it
    if thread == threads - 1:
        dev.prepare_nop(qp, dev.ld64(qp + _SQ_PI))  # see wake
        dev.st64(verdict, _submit_round(qp, dev.ld64(qp + _SQ_PI) + 1, 0, stop, 0, 0, 0))
    dev.block_sync()
    start = dev.clock_ns()
    base = dev.ld64(qp + _SQ_PI)
    half = qp.sq_wqe_num // 2  # not >>, which makes an unsigned field unsigned 64 bits
    mine = (count - block + queues - 1) // queues  # first + block, and every queues-th message after it
    dev.block_sync()  # all have read the producer index before it moves
    done = 0
    status = dev.ld_relaxed64(verdict)
    while done < mine and status == dev.OK:
        batch = min(half, mine - done)
        begin = timestamps.now(part)
        for i in range(done + thread, done + batch, threads):
            k = first + block + i * queues
            at = k % slots * size
            dev.prepare_write(qp, base + i, raddr + at, rkey, laddr + at, lkey, min(size, total - k * size))
        message = first + block + done * queues
        done += batch
        dev.block_sync()
        if thread == threads - 1:
            room = half if done < mine else 0
            dev.st64(verdict, _submit_round(qp, base + done, room, stop, part, message, begin))
            timestamps.look(part, qp, dev.EXCLUSIVE)
        dev.block_sync()
        status = dev.ld_relaxed64(verdict)
    record(out, block * threads + thread, start, status)
