"""Send queue: reserve slots, fill them (wqe.py), mark them ready, submit (submit.py).

    cqe_ci  ≤  sq_wqe_pi  ≤  sq_ready_index  ≤  sq_rsvd_index

These are absolute 64-bit indices. Their low bits are the position in the ring, and the NIC sees only 16 bits of them.
Slots become ready in the order of their reservation, so a doorbell never announces a slot that is not filled.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp, VerbsSide
from ..jit.compile import device_function
from .cq import CI, has_failed, load_index, poll_at, poll_one, timeout_of
from .modes import CTA, DEFAULT, EXCLUSIVE, GPU, SKIP_AVAILABILITY_CHECK
from ..jit.ops import (
    cas_gpu64, fence_acquire_cta, fence_acquire_gpu, fence_cta, fence_sys, fetch_add_cta64, fetch_add_gpu64, ld64,
    ld_fixed16, ld_fixed64, st64, st_relaxed_gpu64,
)
from .status import EINVAL, EIO, ENOTRECOVERABLE, ETIMEDOUT, OK
from .waiting import patience

RSVD, READY = VerbsQp.sq_rsvd_index, VerbsQp.sq_ready_index


@device_function
def _broken(qp: VerbsQp) -> int:
    return ld_fixed64(qp + VerbsQp.side) + VerbsSide.broken


@device_function
def take(address: int, count: int, sharing: int) -> int:
    """Add `count` to an index, and return the old index (`doca_gpu_dev_verbs_atomic_add`)."""
    if sharing == EXCLUSIVE:
        first = ld64(address)
        st64(address, first + count)
        return first
    if sharing == CTA:
        return fetch_add_cta64(address, count)
    return fetch_add_gpu64(address, count)


@device_function
def give_back(qp: VerbsQp, first: int, count: int, sharing: int) -> None:
    """Undo a reservation. If other threads have reserved later slots, the hole stays: mark the queue broken."""
    if sharing == EXCLUSIVE:
        st64(qp + RSVD, first)
    elif cas_gpu64(qp + RSVD, first + count, first) != first + count:
        st64(_broken(qp), 1)


@device_function
def make_room(qp: VerbsQp, previous: int, depth: int, sharing: int) -> int:
    """Wait until WQE `previous`, whose slot is wanted, is complete.

    First check the WQE half a ring further on. If that WQE is complete, the next half ring needs no check.
    """
    if poll_one(qp, previous + (depth >> 1), sharing) == OK:
        return OK
    return poll_at(qp, previous, sharing)


@device_function
def reserve(qp: VerbsQp, count: int, sharing: int = GPU, code_opt: int = DEFAULT) -> int:
    """Reserve `count` slots. Return the index of the first, or a negative status
    (`doca_gpu_dev_verbs_reserve_wq_slots`).

    Unless SKIP_AVAILABILITY_CHECK is set, wait until the previous WQEs of the slots are complete. So every WQE must be
    signalled.
    """
    depth = ld_fixed16(qp + VerbsQp.sq_wqe_num)
    if count < 1 or count > depth:
        return EINVAL
    completed = load_index(qp + CI, sharing)  # this load is in flight while the slots are taken
    first = take(qp + RSVD, count, sharing)
    if code_opt & SKIP_AVAILABILITY_CHECK:
        return first
    previous = first + count - 1 - depth
    if previous >= completed:
        status = make_room(qp, previous, depth, sharing)
        if status != OK:
            give_back(qp, first, count, sharing)
            return status
    return first


@device_function
def await_turn(qp: VerbsQp, ready: int, first: int, sharing: int) -> int:
    """Wait until the index at `ready` reaches `first`. Return OK, or a negative status: then the queue is broken."""
    polls = 0
    start = 0
    while load_index(ready, sharing) != first:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            st64(_broken(qp), 1)
            return ETIMEDOUT
        if polls & 0xFF == 0xFF and load_index(_broken(qp), sharing) != 0:
            return EIO if has_failed(qp) else ENOTRECOVERABLE
        polls += 1
    return OK


@device_function
def hand_on(qp: VerbsQp, ready: int, seen: int, first: int, next_index: int, sharing: int) -> int:
    """Wait until the index at `ready` is `first`, then set it to `next_index`. `seen` is its value before a fence."""
    if seen != first:
        status = await_turn(qp, ready, first, sharing)
        if status != OK:
            return status
        if sharing == CTA:
            fence_acquire_cta()
        else:
            fence_acquire_gpu()
    st_relaxed_gpu64(ready, next_index)
    return OK


@device_function
def mark_ready(qp: VerbsQp, first: int, last: int, sharing: int = GPU) -> int:
    """Declare slots `first` to `last` filled, in the order of reservation (`doca_gpu_dev_verbs_mark_wqes_ready`)."""
    if sharing == EXCLUSIVE:
        st64(qp + READY, last + 1)
        return OK
    # Usually it is our turn already. The load runs while the fence waits for the stores to the slots.
    ready = load_index(qp + READY, sharing)
    if sharing == CTA:
        fence_cta()
    else:
        fence_sys()
    return hand_on(qp, qp + READY, ready, first, last + 1, sharing)
