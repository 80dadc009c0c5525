"""Staging of bytes in device memory for a wire: they are fetched ahead, in large pieces, into slots of pinned memory.

Packets are filled from a slot as from any host memory. A QP waits until its slot is filled, and while it sends from one
slot, the next is fetched. A retransmission fetches the bytes again unless they are still in a slot. If a QP does not
use its slot for a while, because its window is full or its peer is silent, another QP may take it.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import copy, ld64
from ..state.dma_stream import SLOT, dma_stream_at, slot_at
from ..state.message import MESSAGE
from ..state.qp import qp_row_at
from ..state.worker import worker_at
from .streams import copy_failed, ended, device_of, move_device, on_gpu

SLOTS = 32
SLOT_BYTES = 256 << 10
ABANDONED = -1  # the tag of a slot whose bytes nobody needs, while it is being filled
IDLE_NS = 1_000_000  # a slot unused for so long may be taken by another QP


@device_function
def request_tag(first):
    """Return the tag of a request whose first packet has this 64-bit PSN."""
    return first << 1


@device_function
def _is_request(tag):
    return tag & 1 == 0


@device_function
def response_tag(serial):
    """Return the tag of the response to a READ."""
    return serial << 1 | 1


@engine_function
def _slot_of(nic, row, tag, offset):
    """Return the slot with byte `offset` of a message, or 0."""
    for i in range(SLOTS):
        slot = worker_at(nic).slots + i * SLOT.size
        s = slot_at(slot)
        if s.row == row and s.tag == tag and s.begin <= offset < s.end:
            return slot
    return 0


@engine_function
def _claim(nic, patient):
    """Return a slot for a new piece, or 0. With `patient`, take only a slot without an owner."""
    best = 0
    for i in range(SLOTS):
        slot = worker_at(nic).slots + i * SLOT.size
        s = slot_at(slot)
        if s.row == 0:
            return slot
        state = 1 if s.filled != 0 else ended(s.stream, s.fence, s.failures)
        if s.tag == ABANDONED and state != 0:
            return slot
        if s.filled == 0 and state > 0:  # its owner has not used it yet
            s.filled, s.used_at = 1, worker_at(nic).now
        if state != 0 and (best == 0 or s.used_at < slot_at(best).used_at):
            best = slot
    if patient or best == 0 or worker_at(nic).now - slot_at(best).used_at < IDLE_NS:
        return 0
    return best


@engine_function
def _fetch(nic, row, slot, tag, message, begin, end):
    """Start to fetch bytes [begin, end) of a message's segments into a slot: return 0, or a reason."""
    if on_gpu():
        return 0
    n = worker_at(nic)
    s = slot_at(slot)
    s.row, s.tag, s.begin, s.end, s.filled, s.used_at = row, tag, begin, end, 0, n.now
    n.touched = 0
    target = s.address
    segment = message + MESSAGE.segments
    offset = begin
    while offset >= ld64(segment + 8):
        offset -= ld64(segment + 8)
        segment += 16
    left = end - begin
    while left > 0:
        source = ld64(segment) + offset
        part = min(left, ld64(segment + 8) - offset)
        if device_of(source) == 0:
            copy(target, source, part)
        else:
            reason = move_device(nic, target, source, part, 1)
            if reason != 0:
                s.row = 0
                return reason
        target += part
        left -= part
        offset = 0
        segment += 16
    s.stream, s.failures = n.touched, n.failures
    if n.touched == 0:  # this whole piece is in host memory
        s.filled = 1
    else:
        s.fence = dma_stream_at(n.touched).issued
    return 0


@engine_function
def staged(nic, row, tag, message, offset, total):
    """Return the slot with bytes from `offset` on of a message of `total` bytes.

    Return 0 if the slot is not filled yet, or minus a reason.
    """
    if on_gpu():
        return 0
    slot = _slot_of(nic, row, tag, offset)
    if slot == 0:
        slot = _claim(nic, False)
        if slot == 0:
            return 0
        reason = _fetch(nic, row, slot, tag, message, offset, min(offset + SLOT_BYTES, total))
        if reason != 0:
            return -reason
    s = slot_at(slot)
    if s.end < total and _slot_of(nic, row, tag, s.end) == 0:
        ahead = _claim(nic, True)
        if ahead != 0:  # a failure here occurs again when the piece is due
            _fetch(nic, row, ahead, tag, message, s.end, min(s.end + SLOT_BYTES, total))
    if s.filled == 0:
        state = ended(s.stream, s.fence, s.failures)
        if state == 0:
            return 0
        if state < 0:
            s.row = 0
            return -copy_failed(nic, s.stream, 0, s.end - s.begin)
        s.filled = 1
    s.used_at = worker_at(nic).now
    return slot


@device_function
def leave(slot, sent):
    """Free a slot if the message has been sent up to the slot's end."""
    if sent >= slot_at(slot).end:
        slot_at(slot).row = 0


@device_function
def _give_up(slot):
    """Give up a slot whose bytes nobody needs any more."""
    s = slot_at(slot)
    if s.filled != 0:
        s.row = 0
    else:
        s.tag = ABANDONED


@engine_function
def drop(nic, row, tag):
    """Give up the slots of a message that is no longer sent."""
    if on_gpu():
        return
    for i in range(SLOTS):
        slot = worker_at(nic).slots + i * SLOT.size
        if slot_at(slot).row == row and slot_at(slot).tag == tag:
            _give_up(slot)


@engine_function
def drop_acknowledged(nic, row):
    """Give up the slots below `tx_psn`: what the QP was to retransmit has arrived after all."""
    if on_gpu():
        return
    q = qp_row_at(row)
    for i in range(SLOTS):
        slot = worker_at(nic).slots + i * SLOT.size
        s = slot_at(slot)
        if s.row == row and _is_request(s.tag) and (s.tag >> 1) + (s.end + q.mtu - 1) // q.mtu <= q.tx_psn:
            _give_up(slot)


@engine_function
def free_slots(nic, row):
    """Free the slots of a QP that sends no more: return whether no copy into them is still running."""
    n = worker_at(nic)
    if n.stream_count == 0:
        return True
    still = True
    for i in range(SLOTS):
        s = slot_at(n.slots + i * SLOT.size)
        if s.row != row:
            continue
        if s.filled != 0 or ended(s.stream, s.fence, s.failures) != 0:
            s.row = 0
        else:
            still = False
    return still
