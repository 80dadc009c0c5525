"""One-sided operations: each posts signalled WQEs and returns a ticket for `wait`.

A ticket is the index of the last WQE posted. A negative result is a status (device/status.py). `wait` returns a
negative ticket unchanged, so `wait(qp, put(…))` reports both kinds of errors. Addresses and keys are in host byte
order.

`scope` says which threads post together (device/scope.py). In warp and block scope, each thread transfers at most
1 GiB. A thread with an invalid argument gets EINVAL, and the operations of the other threads are posted.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp
from ..formats.wqe import MAX_TRANSFER, MAX_TRANSFER_SHIFT, CtrlFlags
from ..jit.compile import device_function
from .cq import load_index, poll_at, timeout_of
from .modes import DEFAULT, GPU, THREAD
from ..jit.ops import fence_acquire_sys, ld_fixed16, ld_relaxed64
from .qp import RSVD
from .scope import ALONE, from_last, group_of, group_with, post_own, rank_in, reserve_own, size_of
from .status import EINVAL, ETIMEDOUT, OK
from .waiting import patience
from .wqe import (
    ATOMIC_FA, prepare_atomic, prepare_dump, prepare_nop, prepare_read, prepare_write, prepare_write_value,
)


@device_function
def chunks(nbytes: int) -> int:
    """Return the number of WQEs for a transfer: one per GiB, or one NOP for 0 bytes."""
    return max(1, (nbytes + MAX_TRANSFER - 1) >> MAX_TRANSFER_SHIFT)


@device_function
def fill(reading: int, qp: VerbsQp, first: int, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int) -> None:
    """Fill the slots from `first` on with READs or WRITEs of the range, or with a NOP if it is empty."""
    if nbytes == 0:
        prepare_nop(qp, first)
    done = 0
    index = first
    while done < nbytes:
        part = min(nbytes - done, MAX_TRANSFER)
        if reading:
            prepare_read(qp, index, raddr + done, rkey, laddr + done, lkey, part)
        else:
            prepare_write(qp, index, raddr + done, rkey, laddr + done, lkey, part)
        done += part
        index += 1


@device_function
def fill_nops(qp: VerbsQp, first: int, count: int) -> None:
    """Fill reserved slots that have no valid operation, for example those of a thread with an invalid argument."""
    for i in range(count):
        prepare_nop(qp, first + i)


@device_function
def put(
    qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, sharing: int = GPU, code_opt: int = DEFAULT,
    scope: int = THREAD,
) -> int:
    """Write `nbytes` from `laddr` to `raddr`; 0 bytes post a NOP (`doca_gpu_dev_verbs_put`)."""
    valid = nbytes >= 0 and (scope == THREAD or nbytes <= MAX_TRANSFER)
    if scope == THREAD and not valid:
        return EINVAL
    count = chunks(nbytes) if scope == THREAD else 1
    lanes = group_of(qp, 0, sharing, code_opt, scope) if count == 1 else ALONE
    first = reserve_own(qp, count, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    fill(0, qp, first, raddr, rkey, laddr, lkey, nbytes if valid else 0)
    ticket = post_own(qp, first, count, sharing, code_opt, scope, lanes)
    return ticket if valid else EINVAL


@device_function
def mcst(qp: VerbsQp, daddr: int, dlkey: int, sharing: int = GPU, code_opt: int = DEFAULT, scope: int = THREAD) -> int:
    """Make the NIC read the byte at `daddr`, after all WQEs before it (`doca_gpu_dev_verbs_mcst`).

    Once that read is complete, the data of earlier READs are visible. GPUs before Hopper need this, because they may
    see a completion before its data (MCST).
    """
    lanes = group_of(qp, 0, sharing, code_opt, scope)
    first = reserve_own(qp, 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    prepare_dump(qp, first, daddr, dlkey)
    return post_own(qp, first, 1, sharing, code_opt, scope, lanes)


@device_function
def get(
    qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, sharing: int = GPU, code_opt: int = DEFAULT,
    scope: int = THREAD, daddr: int = 0, dlkey: int = 0, blocking: int = 0,
) -> int:
    """Read `nbytes` from `raddr` into `laddr`; 0 bytes post a NOP (`doca_gpu_dev_verbs_get`, as corrected in 2.0.2).

    `daddr`, `dlkey`: post a `mcst` of that byte after the READs. In a warp or block, all threads pass them, or none.
    `blocking`: wait for all of this.
    """
    valid = nbytes >= 0 and (scope == THREAD or nbytes <= MAX_TRANSFER)
    if scope == THREAD and not valid:
        return EINVAL
    reads = chunks(nbytes) if scope == THREAD else 1
    count = reads + 1 if daddr != 0 else reads
    slots = ld_fixed16(qp + VerbsQp.sq_wqe_num)
    lanes = group_with(qp, count, slots, sharing, code_opt, scope) if reads == 1 else ALONE
    first = reserve_own(qp, count, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    fill(1, qp, first, raddr, rkey, laddr, lkey, nbytes if valid else 0)
    if daddr != 0:
        prepare_dump(qp, first + reads, daddr, dlkey)
    ticket = post_own(qp, first, count, sharing, code_opt, scope, lanes)
    if blocking and ticket >= 0:
        status = wait(qp, ticket, sharing, scope)
        ticket = ticket if status == OK else status
    return ticket if valid else EINVAL


@device_function
def p(
    qp: VerbsQp, raddr: int, rkey: int, value: int, nbytes: int = 8, sharing: int = GPU, code_opt: int = DEFAULT,
    scope: int = THREAD,
) -> int:
    """Write the low `nbytes` (1 to 8) of `value` to `raddr`, inline (`doca_gpu_dev_verbs_p`)."""
    valid = 1 <= nbytes <= 8
    if scope == THREAD and not valid:
        return EINVAL
    lanes = group_of(qp, 0, sharing, code_opt, scope)
    first = reserve_own(qp, 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    if valid:
        prepare_write_value(qp, first, raddr, rkey, value, nbytes)
    else:
        prepare_nop(qp, first)
    ticket = post_own(qp, first, 1, sharing, code_opt, scope, lanes)
    return ticket if valid else EINVAL


@device_function
def signal(
    qp: VerbsQp, sig_raddr: int, sig_rkey: int, sig_laddr: int, sig_lkey: int, sig_value: int, sharing: int = GPU,
    code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Add `sig_value` to the 64-bit word at `sig_raddr`; the old value is written to `sig_laddr`
    (`doca_gpu_dev_verbs_signal`)."""
    lanes = group_of(qp, 0, sharing, code_opt, scope)
    first = reserve_own(qp, 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    prepare_atomic(qp, first, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, sig_value)
    return post_own(qp, first, 1, sharing, code_opt, scope, lanes)


@device_function
def put_signal(
    qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, sig_raddr: int, sig_rkey: int,
    sig_laddr: int, sig_lkey: int, sig_value: int, sharing: int = GPU, code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Post a `put`, then a `signal`: the target sees them in this order (`doca_gpu_dev_verbs_put_signal`)."""
    valid = nbytes >= 0 and (scope == THREAD or nbytes <= MAX_TRANSFER)
    if scope == THREAD and not valid:
        return EINVAL
    writes = chunks(nbytes) if scope == THREAD else 1
    lanes = group_of(qp, 0, sharing, code_opt, scope) if writes == 1 else ALONE
    first = reserve_own(qp, writes + 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    if valid:
        fill(0, qp, first, raddr, rkey, laddr, lkey, nbytes)
        prepare_atomic(qp, first + writes, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, sig_value)
    else:
        fill_nops(qp, first, writes + 1)
    ticket = post_own(qp, first, writes + 1, sharing, code_opt, scope, lanes)
    return ticket if valid else EINVAL


@device_function
def p_signal(
    qp: VerbsQp, raddr: int, rkey: int, value: int, nbytes: int, sig_raddr: int, sig_rkey: int, sig_laddr: int,
    sig_lkey: int, sig_value: int, sharing: int = GPU, code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Post a `p` of `value`, then a `signal`: the target sees them in this order (`doca_gpu_dev_verbs_p_signal`)."""
    valid = 1 <= nbytes <= 8
    if scope == THREAD and not valid:
        return EINVAL
    lanes = group_of(qp, 0, sharing, code_opt, scope)
    first = reserve_own(qp, 2, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    if valid:
        prepare_write_value(qp, first, raddr, rkey, value, nbytes)
        prepare_atomic(qp, first + 1, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, sig_value)
    else:
        fill_nops(qp, first, 2)
    ticket = post_own(qp, first, 2, sharing, code_opt, scope, lanes)
    return ticket if valid else EINVAL


@device_function
def fence(qp: VerbsQp, sharing: int = GPU, code_opt: int = DEFAULT, scope: int = THREAD) -> int:
    """Post a NOP that makes later WQEs wait until all READs and atomics before it are complete.

    The C function (`doca_gpu_dev_verbs_fence`) does nothing. WRITEs and SENDs need no fence: they arrive in order.
    """
    lanes = group_of(qp, 0, sharing, code_opt, scope)
    first = reserve_own(qp, 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    prepare_nop(qp, first, CtrlFlags.CQ_UPDATE_FENCE)
    return post_own(qp, first, 1, sharing, code_opt, scope, lanes)


@device_function
def wait(qp: VerbsQp, ticket: int, sharing: int = GPU, scope: int = THREAD) -> int:
    """Wait for a ticket and all before it: OK or a negative status (`doca_gpu_dev_verbs_wait`).

    In warp and block scope, pass the tickets that one call in that scope returned. The last thread waits for all of
    them, and each thread gets the status of its own ticket.
    """
    if scope != THREAD:
        status = ticket
        if rank_in(scope, ALONE) == size_of(scope, ALONE) - 1 and ticket >= 0:
            status = poll_at(qp, ticket, sharing)
        if from_last(status, scope) == OK:
            return min(ticket, OK)
    if ticket < 0:
        return ticket
    return poll_at(qp, ticket, sharing)


@device_function
def wait_all(qp: VerbsQp, sharing: int = GPU) -> int:
    """Wait for everything that any thread has reserved so far (`doca_gpu_dev_verbs_wait` without a ticket)."""
    reserved = load_index(qp + RSVD, sharing)
    return OK if reserved == 0 else poll_at(qp, reserved - 1, sharing)


@device_function
def get_wait(qp: VerbsQp, ticket: int, sharing: int = GPU, scope: int = THREAD, daddr: int = 0, dlkey: int = 0) -> int:
    """Wait for a `get`, whose data are then visible (`doca_gpu_dev_verbs_get_wait`).

    `daddr`, `dlkey`: first post a `mcst` of that byte, and wait for it as well. GPUs before Hopper need this.
    """
    if daddr != 0 and (ticket >= 0 or scope != THREAD):
        after = mcst(qp, daddr, dlkey, sharing, DEFAULT, scope)
        if ticket >= 0:
            ticket = after
    return wait(qp, ticket, sharing, scope)


@device_function
def wait_word(qp: VerbsQp, address: int, value: int) -> int:
    """Wait until the 64-bit word at `address`, which peers write or add to, is at least `value`: OK or ETIMEDOUT.

    Everything that was sent before its last change is then visible. The deadline is that of waits on `qp`.
    """
    polls = 0
    start = 0
    while ld_relaxed64(address) < value:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1
    fence_acquire_sys()
    return OK
