"""Staging of payload in device memory for a wire: prefetch it, in large pieces, into slots of pinned memory.

Packets are filled from a slot as from any host memory. A QP waits until its slot is filled, and while it sends from one
slot, the next is fetched. A retransmission fetches the bytes again unless they are still in a slot. If a QP does not
use its slot for a while, because its window is full or its peer is silent, another QP may claim it.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import copy, ld64
from ..state.dma_stream import SLOT, DmaStream, Slot
from ..state.message import MESSAGE, Message
from ..state.qp import QpRow
from ..state.worker import WorkerState
from .streams import copy_failed, copy_status, device_of, on_gpu, start_device_copy

SLOTS = 32
SLOT_BYTES = 256 << 10
ABANDONED = -1  # the tag of a slot whose bytes are no longer needed, while it is being filled
IDLE_NS = 1_000_000  # another QP may claim a slot that was unused for this long


@device_function
def request_tag(first: int) -> int:
    """Return the tag of a request whose first packet has this 64-bit PSN."""
    return first << 1


@device_function
def _is_request(tag: int) -> bool:
    return tag & 1 == 0


@device_function
def response_tag(serial: int) -> int:
    """Return the tag of the response to a READ."""
    return serial << 1 | 1


@engine_function
def _slot_of(worker: WorkerState, qp: QpRow, tag: int, offset: int) -> int:
    """Return the slot with byte `offset` of a message, or 0."""
    for i in range(SLOTS):
        slot = Slot(worker.slots + i * SLOT.size)
        if slot.row == qp and slot.tag == tag and slot.begin <= offset < slot.end:
            return slot
    return 0


@engine_function
def _claim(worker: WorkerState, patient: int) -> int:
    """Return a slot for a new piece, or 0. With `patient`, return only a slot without an owner."""
    best = 0
    for i in range(SLOTS):
        slot = worker.slots + i * SLOT.size
        s = Slot(slot)
        if s.row == 0:
            return slot
        state = 1 if s.filled != 0 else copy_status(DmaStream(s.stream), s.fence, s.failures)
        if s.tag == ABANDONED and state != 0:
            return slot
        if s.filled == 0 and state > 0:  # its owner has not used it yet
            s.filled, s.used_at = 1, worker.now
        if state != 0 and (best == 0 or s.used_at < Slot(best).used_at):
            best = slot
    if patient or best == 0 or worker.now - Slot(best).used_at < IDLE_NS:
        return 0
    return best


@engine_function
def _fetch(worker: WorkerState, qp: QpRow, slot: Slot, tag: int, message: Message, begin: int, end: int) -> int:
    """Start to fetch bytes [begin, end) of a message's segments into a slot: return 0, or a reason."""
    if on_gpu():
        return 0
    slot.row, slot.tag, slot.begin, slot.end, slot.filled, slot.used_at = qp, tag, begin, end, 0, worker.now
    worker.touched = 0
    target = slot.address
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
            reason = start_device_copy(worker, target, source, part, 1)
            if reason != 0:
                slot.row = 0
                return reason
        target += part
        left -= part
        offset = 0
        segment += 16
    slot.stream, slot.failures = worker.touched, worker.failures
    if worker.touched == 0:  # this whole piece is in host memory
        slot.filled = 1
    else:
        slot.fence = DmaStream(worker.touched).issued
    return 0


@engine_function
def staged_slot(worker: WorkerState, qp: QpRow, tag: int, message: Message, offset: int, total: int) -> int:
    """Return the slot with bytes from `offset` on of a message of `total` bytes.

    Return 0 if the slot is not filled yet, or minus a reason.
    """
    if on_gpu():
        return 0
    slot = _slot_of(worker, qp, tag, offset)
    if slot == 0:
        slot = _claim(worker, False)
        if slot == 0:
            return 0
        reason = _fetch(worker, qp, Slot(slot), tag, message, offset, min(offset + SLOT_BYTES, total))
        if reason != 0:
            return -reason
    s = Slot(slot)
    if s.end < total and _slot_of(worker, qp, tag, s.end) == 0:
        ahead = Slot(_claim(worker, True))
        if ahead != 0:  # a failure here occurs again when the piece is due
            _fetch(worker, qp, ahead, tag, message, s.end, min(s.end + SLOT_BYTES, total))
    if s.filled == 0:
        state = copy_status(DmaStream(s.stream), s.fence, s.failures)
        if state == 0:
            return 0
        if state < 0:
            s.row = 0
            return -copy_failed(worker, DmaStream(s.stream), 0, s.end - s.begin)
        s.filled = 1
    s.used_at = worker.now
    return slot


@device_function
def free_if_sent(slot: Slot, sent: int) -> None:
    """Free a slot if the message has been sent up to the slot's end."""
    if sent >= slot.end:
        slot.row = 0


@device_function
def _abandon(slot: Slot) -> None:
    """Free a slot whose bytes are no longer needed, once it is filled."""
    if slot.filled != 0:
        slot.row = 0
    else:
        slot.tag = ABANDONED


@engine_function
def abandon_slots(worker: WorkerState, qp: QpRow, tag: int) -> None:
    """Abandon the slots of a message that is no longer sent."""
    if on_gpu():
        return
    for i in range(SLOTS):
        slot = Slot(worker.slots + i * SLOT.size)
        if slot.row == qp and slot.tag == tag:
            _abandon(slot)


@engine_function
def abandon_acknowledged(worker: WorkerState, qp: QpRow) -> None:
    """Abandon the slots below `tx_psn`: their packets need no retransmission, because they were acknowledged."""
    if on_gpu():
        return
    for i in range(SLOTS):
        slot = Slot(worker.slots + i * SLOT.size)
        is_mine = slot.row == qp and _is_request(slot.tag)
        if is_mine and (slot.tag >> 1) + (slot.end + qp.mtu - 1) // qp.mtu <= qp.tx_psn:
            _abandon(slot)


@engine_function
def free_slots(worker: WorkerState, qp: QpRow) -> int:
    """Free the slots of a QP that no longer sends. Return whether no copy into them is in flight."""
    if worker.stream_count == 0:
        return True
    still = True
    for i in range(SLOTS):
        slot = Slot(worker.slots + i * SLOT.size)
        if slot.row != qp:
            continue
        if slot.filled != 0 or copy_status(DmaStream(slot.stream), slot.fence, slot.failures) != 0:
            slot.row = 0
        else:
            still = False
    return still
