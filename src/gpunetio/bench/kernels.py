"""The kernels of the benchmarks.

Message k carries the bytes [k·size, (k+1)·size) of `total`, and lies in slot k % slots of the buffers at both ends.
Each thread leaves one RECORD in `out`: when it began, when all that it sent was complete, and OK or a negative status.
A word at `stop` that is not 0 ends a kernel early.
"""

from __future__ import annotations

from .. import device as dev
from ..device import device_function, kernel
from ..device.cq import timeout_of
from ..device.views import qp_at
from ..device.waiting import patience
from ..formats.device_structs import DEV_QP

RECORD_WORDS = 3
STOPPED = -125  # ECANCELED: the stop word was set

_RECORD, _START, _END, _STATUS = 8 * RECORD_WORDS, 0, 8, 16
_SQ_PI = DEV_QP.sq_wqe_pi
_LOOK_EVERY = 64  # messages between looks at the stop word, which is in host memory: far away from a GPU
_LOOK_EVERY_POLLS = 256


@device_function
def _record(out, thread, start, status):
    dev.st64(out + thread * _RECORD + _START, start)
    dev.st64(out + thread * _RECORD + _END, dev.clock_ns())
    dev.st64(out + thread * _RECORD + _STATUS, status)


@device_function
def _wake(qp, sharing):
    """A ticket for a NOP: the NIC may sleep when a kernel begins, and is to be awake when the clock starts."""
    return dev.put(qp, 0, 0, 0, 0, 0, sharing)


@device_function
def _post_share(reading, qp, raddr, rkey, laddr, lkey, size, total, slots, first, end, step, stop):
    """Post the messages first, first + step, … below `end`: the last ticket, or a negative status."""
    ticket = 0
    posted = 0
    for k in range(first, end, step):
        at = k % slots * size
        nbytes = min(size, total - k * size)
        if reading:
            ticket = dev.get(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.GPU)
        else:
            ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.GPU)
        if ticket < 0:
            return ticket
        posted += 1  # noqa: SIM113 - enumerate is slower in nopython code
        if posted & (_LOOK_EVERY - 1) == 0 and dev.ld_relaxed64(stop) != 0:
            return STOPPED
    return ticket


@device_function
def _shared_queues(reading, qps, nqps, raddr, rkey, laddr, lkey, size, total, slots, first, count, stop, out):
    thread = dev.global_id()
    threads = dev.block_dim() * dev.grid_dim()
    qp = dev.ld64(qps + 8 * (thread % nqps))
    status = dev.wait(qp, _wake(qp, dev.GPU), dev.GPU)
    start = dev.clock_ns()
    if status == dev.OK and thread < count:
        ticket = _post_share(
            reading, qp, raddr, rkey, laddr, lkey, size, total, slots, first + thread, first + count, threads, stop
        )
        status = dev.wait(qp, ticket, dev.GPU)
    _record(out, thread, start, status)


@kernel
def put_bw(qps, nqps, raddr, rkey, laddr, lkey, size, total, slots, first, count, stop, out):
    """Puts by all threads of the grid on shared queues; each thread waits for its last ticket."""
    _shared_queues(0, qps, nqps, raddr, rkey, laddr, lkey, size, total, slots, first, count, stop, out)


@kernel
def get_bw(qps, nqps, raddr, rkey, laddr, lkey, size, total, slots, first, count, stop, out):
    """Gets by all threads of the grid on shared queues; each thread waits for its last ticket."""
    _shared_queues(1, qps, nqps, raddr, rkey, laddr, lkey, size, total, slots, first, count, stop, out)


@device_function
def _submit_round(qp, end, room, stop):
    """Announce everything below `end`, then wait until at most `room` of it is incomplete."""
    status = dev.submit(qp, end, dev.EXCLUSIVE)
    if status == dev.OK and end > room:
        status = dev.poll_at(qp, end - room - 1, dev.EXCLUSIVE)
    if status == dev.OK and dev.ld_relaxed64(stop) != 0:
        return STOPPED
    return status


@kernel
def write_bw(qps, nqps, raddr, rkey, laddr, lkey, size, total, slots, first, count, stop, out):
    """Writes without reservation: a block owns a queue, its threads fill WQEs at computed indices, the last submits.

    A round is half of the queue, so that the NIC works on one half while the other is filled.
    """
    thread, threads, block = dev.thread_idx(), dev.block_dim(), dev.block_idx()
    qp = dev.ld64(qps + 8 * block)
    verdict = out + (block * threads + threads - 1) * _RECORD + _STATUS
    if thread == threads - 1:
        dev.prepare_nop(qp, dev.ld64(qp + _SQ_PI))  # see _wake
        dev.st64(verdict, _submit_round(qp, dev.ld64(qp + _SQ_PI) + 1, 0, stop))
    dev.block_sync()
    start = dev.clock_ns()
    base = dev.ld64(qp + _SQ_PI)
    half = qp_at(qp).sq_wqe_num // 2  # not >>, which makes an unsigned field unsigned 64 bits
    mine = (count - block + nqps - 1) // nqps  # first + block, and every nqps-th message after it
    dev.block_sync()  # all have read the producer index before it moves
    done = 0
    status = dev.ld_relaxed64(verdict)
    while done < mine and status == dev.OK:
        batch = min(half, mine - done)
        for i in range(done + thread, done + batch, threads):
            k = first + block + i * nqps
            at = k % slots * size
            dev.prepare_write(qp, base + i, raddr + at, rkey, laddr + at, lkey, min(size, total - k * size))
        done += batch
        dev.block_sync()
        if thread == threads - 1:
            dev.st64(verdict, _submit_round(qp, base + done, half if done < mine else 0, stop))
        dev.block_sync()
        status = dev.ld_relaxed64(verdict)
    _record(out, block * threads + thread, start, status)


@device_function
def _wait_byte(qp, ticket, address, value, stop):
    """Wait until the byte at `address` is `value`: OK or a negative status.

    The deadline is that of waits on `qp`. An error of `ticket`, the last of this end, ends the wait early.
    """
    timeout_ns = timeout_of(qp)
    polls = 0
    start = 0
    while dev.ld_relaxed8(address) != value:
        start = patience(polls, start, timeout_ns)
        if start < 0:
            return dev.ETIMEDOUT
        polls += 1
        if polls & (_LOOK_EVERY_POLLS - 1) == 0:
            stopped = dev.ld_relaxed64(stop)
            if dev.poll_one(qp, ticket, dev.EXCLUSIVE) == dev.EIO:  # perhaps why the other end has stopped this one
                return dev.EIO
            if stopped != 0:
                return STOPPED
    return dev.OK


@device_function
def _bounce(
    client, qp, ticket, from_addr, lkey, to_addr, rkey, in_addr, size, total, slots, first, count, marks, times, stop
):
    """Send and await `count` messages in turn with the other end: a ticket to wait for, or a negative status.

    A message has arrived when its last byte is the message's mark: a counter, or the byte from `marks`, where the
    data are not to be touched. `ticket` is that of a WQE before.
    """
    for n in range(count):
        k = first + n
        at = k % slots * size
        nbytes = min(size, total - k * size)
        mark = (k + 1) & 0xFF if marks == 0 else dev.ld8(marks + n)
        last = at + nbytes - 1
        start = dev.clock_ns()
        if client:
            if marks == 0:
                dev.st8(from_addr + last, mark)
        else:
            status = _wait_byte(qp, ticket, in_addr + last, mark, stop)
            if status != dev.OK:
                return status
        ticket = dev.put(qp, to_addr + at, rkey, from_addr + at, lkey, nbytes, dev.EXCLUSIVE)
        if ticket < 0:
            return ticket
        if client:
            status = _wait_byte(qp, ticket, in_addr + last, mark, stop)
            if status != dev.OK:
                return status
            dev.st64(times + 8 * n, dev.clock_ns() - start)
    return ticket


@kernel
def write_lat(
    client_qp, server_qp, out_addr, out_lkey, in_addr, in_rkey, far_addr, far_lkey, far_rkey,
    size, total, slots, first, count, marks, times, stop, out,
):  # fmt: skip
    """Ping-pong between two blocks of one thread: the client writes to `far_addr`, the server writes it back."""
    client = dev.block_idx() == 0
    qp = client_qp if client else server_qp
    ticket = _wake(qp, dev.EXCLUSIVE)
    status = dev.wait(qp, ticket, dev.EXCLUSIVE)
    start = dev.clock_ns()
    if status == dev.OK:
        if client:
            ticket = _bounce(
                1, qp, ticket, out_addr, out_lkey, far_addr, far_rkey, in_addr, size, total, slots, first, count, marks,
                times, stop,
            )  # fmt: skip
        else:
            ticket = _bounce(
                0, qp, ticket, far_addr, far_lkey, in_addr, in_rkey, far_addr, size, total, slots, first, count, marks,
                times, stop,
            )  # fmt: skip
        status = dev.wait(qp, ticket, dev.EXCLUSIVE)
    if status != dev.OK:
        dev.st_relaxed64(stop, 1)  # the other end would wait in vain
    _record(out, dev.block_idx(), start, status)


@kernel
def write_lat_end(
    client, qp, from_addr, lkey, to_addr, rkey, in_addr, size, total, slots, first, count, marks, times, stop, out
):
    """One end of the same between two processes: what arrives at `in_addr` goes from `from_addr` to `to_addr`."""
    ticket = _wake(qp, dev.EXCLUSIVE)
    status = dev.wait(qp, ticket, dev.EXCLUSIVE)
    start = dev.clock_ns()
    if status == dev.OK:
        if client:
            ticket = _bounce(
                1, qp, ticket, from_addr, lkey, to_addr, rkey, in_addr, size, total, slots, first, count, marks, times,
                stop,
            )  # fmt: skip
        else:
            ticket = _bounce(
                0, qp, ticket, from_addr, lkey, to_addr, rkey, in_addr, size, total, slots, first, count, marks, times,
                stop,
            )  # fmt: skip
        status = dev.wait(qp, ticket, dev.EXCLUSIVE)
    _record(out, 0, start, status)
