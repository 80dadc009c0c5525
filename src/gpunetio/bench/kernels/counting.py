"""put_signal_bw, put_counter_bw: each thread has a flag at the far end, which counts its messages that have arrived.

The flag's previous value comes back to a word of the thread at this end, which shows when all messages have arrived.
"""

from __future__ import annotations

from ... import device as dev
from ...device import device_function, kernel
from ...device.scope import ALONE, from_leader
from .. import timestamps
from ..ends import AT, ROW
from .parts import LOOK_EVERY, MOST_THREADS, STOPPED, place, record, wait_for, wait_together, wake

_SPARE = 8 * MOST_THREADS  # the flag for posts that carry no message


@device_function
def _post_share(
    counter: int, end: int, qp: dev.VerbsQp, scope: int, number: int, threads: int, size: int, total: int, slots: int,
    first: int, count: int, stop: int, part: int,
) -> int:
    """Post the messages number, number + threads, … of a launch. Return the last ticket, or a negative status.

    The threads of a warp or block post together. Those with no message left post one that is not counted.
    """
    raddr, rkey = dev.ld64(end + AT.raddr), dev.ld64(end + AT.rkey)
    laddr, lkey = dev.ld64(end + AT.laddr), dev.ld64(end + AT.lkey)
    flags, flags_rkey = dev.ld64(end + AT.far_flags), dev.ld64(end + AT.far_rkey)
    old, old_lkey = dev.ld64(end + AT.old), dev.ld64(end + AT.words_lkey)
    companion = dev.VerbsQp(dev.ld64(end + AT.companion))
    ticket = 0
    posted = 0
    for base in range(0, count, threads):
        mine = base + number < count
        if scope == dev.THREAD and not mine:
            break
        k = first + base + number
        at = k % slots * size
        nbytes = min(size, total - k * size) if mine else 0
        word = 8 * number if mine else _SPARE
        one = 1 if mine else 0
        begin = timestamps.now(part)
        if counter:
            ticket = dev.put_counter(
                qp, raddr + at, rkey, laddr + at, lkey, nbytes, companion, flags + word, flags_rkey, old + word,
                old_lkey, one, dev.GPU, dev.DEFAULT, scope,
            )
        else:
            ticket = dev.put_signal(
                qp, raddr + at, rkey, laddr + at, lkey, nbytes, flags + word, flags_rkey, old + word, old_lkey, one,
                dev.GPU, dev.DEFAULT, scope,
            )
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
def _counted(
    counter: int, ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int,
    trace: int, stop: int, out: int,
) -> None:
    thread, threads = dev.global_id(), dev.block_dim() * dev.grid_dim()
    queue, number = place(queues, scope)
    end = ends + ROW * queue
    qp = dev.VerbsQp(dev.ld64(end + AT.qp))
    old = dev.ld64(end + AT.old) + 8 * number
    part = timestamps.part_of(trace, thread)
    status = wake(qp, scope)
    start = dev.clock_ns()
    if status == dev.OK and (scope != dev.THREAD or number < count):
        mine = max(0, (count - number + threads - 1) // threads)
        last = dev.ld_relaxed64(old) + mine
        ticket = _post_share(counter, end, qp, scope, number, threads, size, total, slots, first, count, stop, part)
        status = ticket
        if ticket >= 0:
            timestamps.finish(part, qp, dev.GPU)
            status = wait_together(qp, ticket, scope)
            if status == dev.OK:
                status = wait_for(1, qp, ticket, dev.ld64(end + AT.companion), old, last, stop)
    record(out, thread, start, status)


@kernel
def put_signal_bw(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Post puts, each followed by a signal, from all threads of the grid on shared queues."""
    _counted(0, ends, queues, scope, size, total, slots, first, count, trace, stop, out)


@kernel
def put_counter_bw(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Post puts, which the queues' companions count when complete, from all threads of the grid on shared queues."""
    _counted(1, ends, queues, scope, size, total, slots, first, count, trace, stop, out)
