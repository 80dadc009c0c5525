"""The kernel of `gpunetio pingpong`: SENDs and receives in turn, as ibv_rc_pingpong posts and polls them.

`rq` is a table of int64 words that describes the receive side, in the order of RECEIVE_SIDE. The kernel writes the
words of OUT to `out`.
"""

from __future__ import annotations

from ... import device as dev
from ...device import device_function, kernel
from ...device.cq import timeout_of
from ...device.waiting import patience
from ...formats.cqe import CQE64, CQE_SHIFT, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ...formats.doorbell import PI_MASK
from ...jit.ops import fence_acquire_sys, ld_relaxed32, pack64, st128, st_relaxed32
from .parts import STOPPED

RECEIVE_SIDE = ("ring", "stride", "slots", "record", "cq_ring", "cq_entries", "cq_record")
OUT = ("start", "end", "status", "received", "sent", "bad_message", "bad_offset", "syndrome", "vendor")

_RING, _STRIDE, _SLOTS, _RECORD, _CQ_RING, _CQ_ENTRIES, _CQ_RECORD = range(0, 8 * len(RECEIVE_SIDE), 8)
_START, _END, _STATUS, _RECEIVED, _SENT, _BAD_MESSAGE, _BAD_OFFSET, _SYNDROME, _VENDOR = range(0, 8 * len(OUT), 8)
_WQE_COUNTER, _ERR_SYNDROME, _ERR_VENDOR = CQE64.wqe_counter, ERR_CQE64.syndrome, ERR_CQE64.vendor_err_synd
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT
_CI_MASK = 0xFF_FFFF
_LOOK_EVERY = 256  # polls between checks of the stop word


@device_function
def _post_receives(rq: int, first: int, end: int, laddr: int, lkey: int, nbytes: int) -> None:
    """Post receives first … end − 1, all into the same buffer."""
    ring, stride, slots = dev.ld64(rq + _RING), dev.ld64(rq + _STRIDE), dev.ld64(rq + _SLOTS)
    for index in range(first, end):
        st128(ring + (index & (slots - 1)) * stride, pack64(dev.be32(nbytes), dev.be32(lkey)), dev.be64(laddr))
    dev.fence_release_sys()
    st_relaxed32(dev.ld64(rq + _RECORD), dev.be32(end & PI_MASK))


@device_function
def _await_receive(qp: dev.VerbsQp, rq: int, index: int, ticket: int, stop: int, out: int) -> int:
    """Wait for completion `index` of the receives. Return OK or a negative status.

    An error of `ticket`, the last send, ends the wait early. A negative `ticket` means that there was no send.
    """
    entries = dev.ld64(rq + _CQ_ENTRIES)
    cqe = dev.ld64(rq + _CQ_RING) + ((index & (entries - 1)) << CQE_SHIFT)
    lap = (index & entries) != 0
    timeout_ns = timeout_of(qp)
    polls = 0
    start = 0
    while True:
        word = dev.be32(ld_relaxed32(cqe + _WQE_COUNTER))  # has op_own, and is written last
        opcode = (word & 0xFF) >> OPCODE_SHIFT
        if (word & OWNER_MASK) == lap and opcode != _INVALID:
            break
        start = patience(polls, start, timeout_ns)
        if start < 0:
            return dev.ETIMEDOUT
        polls += 1
        if polls & (_LOOK_EVERY - 1) == 0:
            if dev.ld_relaxed64(stop) != 0:
                return STOPPED
            if ticket >= 0 and dev.poll_one(qp, ticket, dev.EXCLUSIVE) == dev.EIO:
                return dev.EIO
    fence_acquire_sys()
    if opcode == CqeOpcode.RESP_ERR:
        if ticket >= 0 and dev.wait(qp, ticket, dev.EXCLUSIVE) == dev.EIO:
            return dev.EIO  # the cause of this error
        dev.st64(out + _SYNDROME, dev.ld8(cqe + _ERR_SYNDROME))
        dev.st64(out + _VENDOR, dev.ld8(cqe + _ERR_VENDOR))
        return dev.EIO
    st_relaxed32(dev.ld64(rq + _CQ_RECORD), dev.be32((index + 1) & _CI_MASK))
    return dev.OK


@device_function
def _validate(sent: int, received: int, nbytes: int, message: int, out: int) -> None:
    """Compare a message with what both ends send, note the first difference, and overwrite it for the next message."""
    for i in range(nbytes):
        value = dev.ld8(received + i)
        if value != dev.ld8(sent + i) and dev.ld64(out + _BAD_MESSAGE) == 0:
            dev.st64(out + _BAD_MESSAGE, message)
            dev.st64(out + _BAD_OFFSET, i)
        dev.st8(received + i, value ^ 0xFF)


@device_function
def _send(qp: dev.VerbsQp, laddr: int, lkey: int, nbytes: int) -> int:
    index = dev.reserve(qp, 1, dev.EXCLUSIVE)
    if index < 0:
        return index
    dev.prepare_send(qp, index, laddr, lkey, nbytes)
    return dev.post(qp, index, index, dev.EXCLUSIVE)


@device_function
def _play(
    client: int, qp: dev.VerbsQp, rq: int, sent: int, received: int, lkey: int, nbytes: int, depth: int,
    iterations: int, validate: int, stop: int, out: int,
) -> int:
    posted = depth
    waiting = depth
    ticket = -1
    for n in range(iterations):
        if client:
            ticket = _send(qp, sent, lkey, nbytes)
            if ticket < 0:
                return ticket
        status = _await_receive(qp, rq, n, ticket, stop, out)
        if status != dev.OK:
            return status
        waiting -= 1
        if waiting <= 1:
            _post_receives(rq, posted, posted + depth - waiting, received, lkey, nbytes)
            posted += depth - waiting
            waiting = depth
        dev.st64(out + _RECEIVED, n + 1)
        if validate:
            _validate(sent, received, nbytes, n + 1, out)
        if not client:
            if ticket >= 0:  # the previous send, which must complete before the next
                status = dev.wait(qp, ticket, dev.EXCLUSIVE)
                if status != dev.OK:
                    return status
            ticket = _send(qp, sent, lkey, nbytes)
            if ticket < 0:
                return ticket
        else:
            status = dev.wait(qp, ticket, dev.EXCLUSIVE)
            if status != dev.OK:
                return status
        dev.st64(out + _SENT, n + 1)
    return dev.OK if ticket < 0 else dev.wait(qp, ticket, dev.EXCLUSIVE)


@kernel
def post_receives(rq: int, depth: int, received: int, lkey: int, nbytes: int) -> None:
    """Post the receives that must be there before the first message."""
    _post_receives(rq, 0, depth, received, lkey, nbytes)


@kernel
def pingpong(
    client: int, qp: dev.VerbsQp, rq: int, sent: int, received: int, lkey: int, nbytes: int, depth: int,
    iterations: int, validate: int, stop: int, out: int,
) -> None:
    """Exchange `iterations` messages; the client sends first. With `validate`, each must equal the bytes at `sent`."""
    start = dev.clock_ns()
    status = _play(client, qp, rq, sent, received, lkey, nbytes, depth, iterations, validate, stop, out)
    dev.st64(out + _START, start)
    dev.st64(out + _END, dev.clock_ns())
    dev.st64(out + _STATUS, status)
