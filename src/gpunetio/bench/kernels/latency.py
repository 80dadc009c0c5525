"""write_lat, put_signal_lat, put_counter_lat: two threads send each other a message in turn.

An end is a block of one thread; both ends may be blocks of one launch. parts.py describes the arguments.
"""

from __future__ import annotations

from ... import device as dev
from ...device import device_function, kernel
from ...formats.device_structs import DEV_QP
from ...jit.ops import ld_fixed32
from .. import timestamps
from ..ends import AT, ROW
from .parts import LOOK_EVERY, STOPPED, record, wait_for

_BYTE, _SIGNAL, _COUNTER = range(3)  # what shows that a message has arrived


@device_function
def _put_bf(qp: dev.VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int) -> int:
    """Post a put whose WQE also goes into the BlueFlame register."""
    index = dev.reserve(qp, 1, dev.EXCLUSIVE)
    if index < 0:
        return index
    copy = dev.block_slot()
    dev.prepare_write(qp, index, raddr, rkey, laddr, lkey, nbytes)
    dev.prepare_write(qp, index, raddr, rkey, laddr, lkey, nbytes, at=copy)
    status = dev.mark_ready(qp, index, index, dev.EXCLUSIVE)
    if status == dev.OK:
        status = dev.submit_bf(qp, index + 1, copy, dev.EXCLUSIVE)
    return index if status == dev.OK else status


@device_function
def _post(
    kind: int, qp: dev.VerbsQp, companion: dev.VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int,
    flag: int, flag_rkey: int, old: int, old_lkey: int,
) -> int:
    if kind == _BYTE:
        if ld_fixed32(qp + DEV_QP.nic_handler) == dev.GPU_SM_BF:
            return _put_bf(qp, raddr, rkey, laddr, lkey, nbytes)
        return dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE)
    if kind == _SIGNAL:
        return dev.put_signal(
            qp, raddr, rkey, laddr, lkey, nbytes, flag, flag_rkey, old, old_lkey, 1, dev.EXCLUSIVE
        )
    return dev.put_counter(
        qp, raddr, rkey, laddr, lkey, nbytes, companion, flag, flag_rkey, old, old_lkey, 1, dev.EXCLUSIVE
    )


@device_function
def _bounce(
    kind: int, end: int, qp: dev.VerbsQp, ticket: int, size: int, total: int, slots: int, first: int, count: int,
    stop: int, part: int,
) -> int:
    """Exchange `count` messages in turn with the other end. Return a ticket to wait for, or a negative status.

    A message has arrived when its last byte is the message's mark, or when the flag has counted it. The mark is a
    counter or, where the data must not be changed, a byte from `marks`. `ticket` is that of an earlier WQE.
    """
    client, companion = dev.ld64(end + AT.client), dev.VerbsQp(dev.ld64(end + AT.companion))
    marks, times = dev.ld64(end + AT.marks), dev.ld64(end + AT.notes)
    inbox, flag = dev.ld64(end + AT.inbox), dev.ld64(end + AT.flags)
    # Loaded once: after an acquire fence, each of these loads would go to L2.
    raddr, rkey = dev.ld64(end + AT.raddr), dev.ld64(end + AT.rkey)
    laddr, lkey = dev.ld64(end + AT.laddr), dev.ld64(end + AT.lkey)
    far_flag, far_rkey = dev.ld64(end + AT.far_flags), dev.ld64(end + AT.far_rkey)
    old, old_lkey = dev.ld64(end + AT.old), dev.ld64(end + AT.words_lkey)
    for n in range(count):
        k = first + n
        at = k % slots * size
        nbytes = min(size, total - k * size)
        last = at + nbytes - 1
        mark = k + 1
        sign = flag
        if kind == _BYTE:
            mark = (k + 1) & 0xFF if marks == 0 else dev.ld8(marks + n)
            sign = inbox + last
        start = dev.clock_ns()
        if not client:
            status = wait_for(kind != _BYTE, qp, ticket, companion, sign, mark, stop)
            if status != dev.OK:
                return status
        elif kind == _BYTE and marks == 0:
            dev.st8(laddr + last, mark)
        begin = timestamps.now(part)
        ticket = _post(
            kind, qp, companion, raddr + at, rkey, laddr + at, lkey, nbytes, far_flag, far_rkey, old, old_lkey
        )
        if ticket < 0:
            return ticket
        timestamps.note(part, k, begin, ticket)
        if client:
            status = wait_for(kind != _BYTE, qp, ticket, companion, sign, mark, stop)
            if status != dev.OK:
                return status
            dev.st64(times + 8 * n, dev.clock_ns() - start)
            timestamps.complete(part, k)
        else:
            timestamps.look(part, qp, dev.EXCLUSIVE)
        if n & (LOOK_EVERY - 1) == LOOK_EVERY - 1 and dev.ld_relaxed64(stop) != 0:
            return STOPPED
    return ticket


@device_function
def _play(
    kind: int, ends: int, size: int, total: int, slots: int, first: int, count: int, trace: int, stop: int, out: int
) -> None:
    end = ends + ROW * dev.block_idx()
    qp = dev.VerbsQp(dev.ld64(end + AT.qp))
    companion = dev.VerbsQp(dev.ld64(end + AT.companion))
    part = timestamps.part_of(trace, dev.block_idx())
    ticket = dev.put(qp, 0, 0, 0, 0, 0, dev.EXCLUSIVE)  # wakes the NIC, which must be awake when the clock starts
    status = dev.wait(qp, ticket, dev.EXCLUSIVE)
    start = dev.clock_ns()
    if status == dev.OK:
        status = _bounce(kind, end, qp, ticket, size, total, slots, first, count, stop, part)
        if status >= 0:
            timestamps.finish(part, qp, dev.EXCLUSIVE)
            ticket = status
            status = dev.wait(qp, ticket, dev.EXCLUSIVE)
        if status == dev.OK and kind != _BYTE and count > 0:  # the answer to the last one is in flight
            status = wait_for(1, qp, ticket, companion, dev.ld64(end + AT.old), first + count - 1, stop)
    if status != dev.OK:
        dev.st_relaxed64(stop, 1)  # otherwise an end in the same launch would wait for ever
    record(out, dev.block_idx(), start, status)


@kernel
def write_lat(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Ping-pong of RDMA writes: each end polls the last byte of what it receives."""
    _play(_BYTE, ends, size, total, slots, first, count, trace, stop, out)


@kernel
def put_signal_lat(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Ping-pong of puts with signals: each end polls its flag."""
    _play(_SIGNAL, ends, size, total, slots, first, count, trace, stop, out)


@kernel
def put_counter_lat(
    ends: int, queues: int, scope: int, size: int, total: int, slots: int, first: int, count: int, trace: int,
    stop: int, out: int,
) -> None:
    """Ping-pong of puts that companions count: each end polls its flag."""
    _play(_COUNTER, ends, size, total, slots, first, count, trace, stop, out)
