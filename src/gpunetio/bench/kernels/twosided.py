"""twosided_bw: SENDs of the client go to receives of the server, which tells the client how many it has posted.

The server posts half a queue of receives at a time, and the second half before it waits for the first. A SEND carries
the number of its message as immediate data, so that the server knows which message each receive got.
"""

from __future__ import annotations

from ... import device as dev
from ...device import device_function, kernel
from ...device.scope import ALONE, from_leader, rank_in, size_of
from .. import timestamps
from ..ends import AT, ROW
from .parts import NOT_INLINE, RECORD, STATUS, STOPPED, WRONG_LENGTH, record, wait_for, wake


@device_function
def _share(queue: int, queues: int, count: int) -> int:
    """Return how many messages of a launch go over a queue: queue, queue + queues, …"""
    return max(0, (count - queue + queues - 1) // queues)


@device_function
def _send_share(
    end: int, qp: dev.VerbsQp, queue: int, queues: int, scope: int, size: int, total: int, slots: int, first: int,
    count: int, stop: int, part: int,
) -> int:
    """Post this thread's messages, each when it has a receive. Return the last ticket, or a negative status."""
    laddr, lkey, credits = dev.ld64(end + AT.laddr), dev.ld64(end + AT.lkey), dev.ld64(end + AT.flags)
    thread, threads = dev.thread_idx(), dev.block_dim()
    together, rank = size_of(scope, ALONE), rank_in(scope, ALONE)
    share = _share(queue, queues, count)
    last = 0
    for base in range(0, share, threads):
        mine = base + thread < share
        if scope == dev.THREAD and not mine:
            break
        status = dev.OK
        if rank == 0:
            needed = min(share, base + thread + together)
            status = wait_for(1, qp, last, 0, credits, needed, stop)
            if status == dev.OK and dev.ld_relaxed64(stop) != 0:
                status = STOPPED
        status = from_leader(status, scope, ALONE)
        if status != dev.OK:
            return status
        number = queue + queues * (base + thread)
        k = first + number
        nbytes = min(size, total - k * size) if mine else 0
        begin = timestamps.now(part)
        ticket = dev.send_imm(qp, laddr + k % slots * size, lkey, nbytes, number, dev.GPU, dev.DEFAULT, scope)
        if mine:
            if ticket >= 0:
                last = ticket
                timestamps.note(part, k, begin, ticket)
                timestamps.look(part, qp, dev.GPU)
            status = ticket
        if from_leader(min(status, dev.OK), scope, ALONE) != dev.OK:  # reserving and posting fail for all or for none
            return status
    return last


@device_function
def _post_receives(
    end: int, qp: dev.VerbsQp, queue: int, queues: int, size: int, slots: int, first: int, start: int, stop_at: int,
    part: int,
) -> int:
    """Post this thread's receives among `start` to `stop_at` - 1, and note their tickets. Return OK or a status."""
    laddr, lkey, notes = dev.ld64(end + AT.laddr), dev.ld64(end + AT.lkey), dev.ld64(end + AT.notes)
    for i in range(start + dev.thread_idx(), stop_at, dev.block_dim()):
        number = queue + queues * i
        begin = timestamps.now(part)
        ticket = dev.recv(qp, laddr + (first + number) % slots * size, lkey, size)
        if ticket < 0:
            return ticket
        timestamps.note(part, first + number, begin, ticket)
        dev.st64(notes + 8 * number, ticket)
    return dev.OK


@device_function
def _take_receives(
    end: int, qp: dev.VerbsQp, queue: int, queues: int, size: int, total: int, slots: int, first: int, start: int,
    stop_at: int, part: int,
) -> int:
    """Wait for this thread's receives among `start` to `stop_at` - 1, and note which messages they got.

    Data that came in a completion are copied to the place of other messages' data.
    """
    notes, inline = dev.ld64(end + AT.notes), dev.ld64(end + AT.inline)
    for i in range(start + dev.thread_idx(), stop_at, dev.block_dim()):
        number = queue + queues * i
        ticket = dev.ld64(notes + 8 * number)
        nbytes = dev.recv_wait(qp, ticket)
        if nbytes < 0:
            return nbytes
        message = dev.recv_imm(qp, ticket)
        timestamps.complete(part, first + message)
        if nbytes != min(size, total - (first + message) * size):
            return WRONG_LENGTH
        if inline:
            data = dev.recv_inline(qp, ticket)
            if data == 0:
                return NOT_INLINE
            dev.copy(dev.ld64(end + AT.laddr) + (first + number) % slots * size, data, nbytes)
        dev.st64(notes + 8 * number, message)
    return dev.OK


@device_function
def _agreed(verdict: int, status: int) -> int:
    """Return OK if all threads of the block have the `status` OK, else the status of one that has not.

    All threads get the same result.
    """
    if status != dev.OK:
        dev.st_relaxed64(verdict, status)
    dev.block_sync()
    status = dev.ld_relaxed64(verdict)
    dev.block_sync()  # all threads have read it before the next one is stored
    return status


@device_function
def _serve(
    end: int, qp: dev.VerbsQp, queue: int, queues: int, size: int, total: int, slots: int, first: int, count: int,
    part: int, verdict: int,
) -> int:
    """Receive a queue's messages. Return OK, or the negative status of one of the threads."""
    credits, credits_rkey = dev.ld64(end + AT.far_flags) + 8 * queue, dev.ld64(end + AT.far_rkey)
    half = dev.ld64(end + AT.receives) // 2
    tells = dev.thread_idx() == dev.block_dim() - 1
    share = _share(queue, queues, count)
    posted = 0
    done = 0
    status = dev.OK
    while done < share and status == dev.OK:
        while posted < min(share, done + 2 * half) and status == dev.OK:
            more = min(share, posted + half)
            status = _post_receives(end, qp, queue, queues, size, slots, first, posted, more, part)
            status = _agreed(verdict, status)
            posted = more
            if tells and status == dev.OK:  # if it fails, the completion queue reports the error
                dev.p(qp, credits, credits_rkey, posted, 8, dev.EXCLUSIVE)
        if status == dev.OK:
            more = min(share, done + half)
            status = _take_receives(end, qp, queue, queues, size, total, slots, first, done, more, part)
            status = _agreed(verdict, status)
            done = more
    return status


@kernel
def twosided_bw(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Send and receive: at each end, a block owns a queue. Both ends may be in one launch."""
    thread, threads, block = dev.thread_idx(), dev.block_dim(), dev.block_idx()
    end = ends + ROW * block
    qp, queue = dev.VerbsQp(dev.ld64(end + AT.qp)), block % queues
    part = timestamps.part_of(trace, block * threads + thread)
    verdict = out + (block * threads + threads - 1) * RECORD + STATUS
    client = dev.ld64(end + AT.client)
    status = dev.OK
    if client:
        status = wake(qp, scope)
    start = dev.clock_ns()
    if client and status == dev.OK:
        status = _send_share(end, qp, queue, queues, scope, size, total, slots, first, count, stop, part)
        if status >= 0:
            timestamps.finish(part, qp, dev.GPU)
            status = dev.wait(qp, status, dev.GPU)
    elif not client:
        status = _serve(end, qp, queue, queues, size, total, slots, first, count, part, verdict)
        if status == dev.OK and thread == threads - 1:
            status = dev.wait_all(qp, dev.EXCLUSIVE)
    if status != dev.OK:
        dev.st_relaxed64(stop, 1)  # otherwise an end in the same launch would wait for ever
    record(out, block * threads + thread, start, status)
