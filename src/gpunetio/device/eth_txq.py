"""Ethernet send queues: threads that share a queue post packets, and waits for a time.

The queue's structure begins with that of a queue pair, so slots are reserved, marked ready and submitted in the same
way (qp.py, submit.py, scope.py). But not every WQE generates a completion. A completion names the last WQE that is
done, and completions of WQEs with `notify` are counted. A thread that polls takes CQEs on behalf of all threads.
"""

from __future__ import annotations

from ..formats.cqe import CQE64, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ..formats.device_structs import VerbsCq, VerbsQp, VerbsSide
from ..formats.doorbell import PI_MASK
from ..formats.eth_device import EthTxq
from ..formats.packet import ETHERNET
from ..formats.wqe import CTRL_SEG
from ..jit.compile import device_function
from ..jit.ops import (
    be32, cas_gpu64, fence_acquire_gpu, fence_acquire_sys, fetch_add_gpu64, ld8, ld64, ld_fixed16, ld_fixed32,
    ld_fixed64, ld_relaxed32, raise_gpu64, st64,
)
from .cq import CI, cq_of, cqe_address, load_index, timeout_of
from .eth_wqe import (
    LONGEST, MAX_BLOCKS, fill_nop, is_valid, txq_headers_blocks, txq_prepare_headers, txq_prepare_send,
    txq_prepare_wait,
)
from .modes import DEFAULT, EXCLUSIVE, GPU, SKIP_AVAILABILITY_CHECK, THREAD
from .qp import RSVD, give_back, take
from .scope import from_leader, gather, group_of, group_with, post_own, rank_in, size_of
from .status import EBUSY, EINVAL, EIO, ETIMEDOUT, OK
from .submit import post
from .waiting import patience
from .wqe import wqe_address

_COMPLETED, _NOTIFIED, _TAKEN = EthTxq.completed, EthTxq.notified, EthTxq.taken
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT


# --- completions ---------------------------------------------------------------------------------------------------


@device_function
def _note(txq: EthTxq, index: int, cqe: int) -> None:
    """Record the first error completion for the host."""
    side = ld_fixed64(txq + VerbsQp.side)
    if ld64(side + VerbsSide.err_syndrome) == 0:
        st64(side + VerbsSide.err_index, index)
        st64(side + VerbsSide.err_vendor, ld8(cqe + ERR_CQE64.vendor_err_synd))
        st64(side + VerbsSide.err_syndrome, ld8(cqe + ERR_CQE64.syndrome))


@device_function
def _was_notified(txq: EthTxq, index: int) -> int:
    """Return 1 if a completed WQE was posted with `notify`, 0 if it was signalled only to free slots.

    The slot is not reused before the completion is taken, so the WQE can still be read.
    """
    mask = ld_fixed32(txq + EthTxq.signal_mask)
    if (index & mask) + MAX_BLOCKS <= mask:
        return 1  # signalled for no other reason
    return ld_relaxed32(wqe_address(txq, index) + CTRL_SEG.imm) & 1


@device_function
def _take_completion(txq: EthTxq, sharing: int) -> int:
    """Take the next CQE: OK if this thread or another has, EBUSY if there is none, EIO if it reports an error."""
    number = load_index(txq + CI, sharing)
    completed = load_index(txq + _COMPLETED, sharing)
    cq = cq_of(txq)
    position = number + ld_fixed64(cq + VerbsCq.cqe_rsvd)
    cqe = cqe_address(cq, position)
    word = be32(ld_relaxed32(cqe + CQE64.wqe_counter))
    opcode = (word & 0xFF) >> OPCODE_SHIFT
    new = (word & OWNER_MASK) == ((position & ld_fixed32(cq + VerbsCq.cqe_num)) != 0)
    if not new or opcode == _INVALID:
        return EBUSY
    fence_acquire_sys()
    index = completed + ((word >> 16) - completed & PI_MASK)
    if opcode == CqeOpcode.REQ_ERR:
        _note(txq, index, cqe)
        return EIO
    notified = _was_notified(txq, index)
    if sharing == EXCLUSIVE:
        st64(txq + CI, number + 1)
        st64(txq + _NOTIFIED, ld64(txq + _NOTIFIED) + notified)
        st64(txq + _COMPLETED, index + 1)
    elif cas_gpu64(txq + CI, number, number + 1) == number:  # otherwise these values may be of another lap
        if notified:
            fetch_add_gpu64(txq + _NOTIFIED, 1)
        raise_gpu64(txq + _COMPLETED, index + 1)
    return OK


@device_function
def _await(txq: EthTxq, index: int, sharing: int, blocking: int = 1) -> int:
    """Wait until all WQEs up to `index` are complete: OK, EIO or ETIMEDOUT. If not `blocking`, return EBUSY instead."""
    polls = 0
    start = 0
    while load_index(txq + _COMPLETED, sharing) <= index:
        status = _take_completion(txq, sharing)
        if status == EIO:
            return EIO
        if status == EBUSY:
            if blocking == 0:
                return EBUSY
            start = patience(polls, start, timeout_of(txq))
            if start < 0:
                return ETIMEDOUT
            polls += 1
    if sharing != EXCLUSIVE:
        fence_acquire_gpu()
    return OK


@device_function
def txq_wait(txq: EthTxq, ticket: int, sharing: int = GPU, blocking: int = 1) -> int:
    """Wait until the packet of a ticket and all before it have been sent: OK, or a negative status
    (`doca_gpu_dev_eth_txq_poll_completion_at`).

    A negative ticket is returned unchanged. This packet or a later one must have been posted with `notify`, or a
    quarter of a ring of packets must follow it; otherwise the wait ends with ETIMEDOUT. With `blocking` 0, check only
    once: EBUSY means that the packet has not been sent yet.
    """
    return ticket if ticket < 0 else _await(txq, ticket, sharing, blocking)


@device_function
def txq_poll(txq: EthTxq, count: int = 1, sharing: int = GPU, blocking: int = 1) -> int:
    """Take completions of packets sent with `notify`, up to `count`. Return how many, or a negative status
    (`doca_gpu_dev_eth_txq_poll_completion`).

    With `blocking`, wait until there are `count`; the result is then `count`, EIO or ETIMEDOUT. Threads that share the
    queue take different completions.
    """
    if count < 0:
        return EINVAL
    polls = 0
    start = 0
    while True:
        taken = load_index(txq + _TAKEN, sharing)
        there = load_index(txq + _NOTIFIED, sharing) - taken
        status = OK
        if there < count:
            status = _take_completion(txq, sharing)
        if there >= count or (status != OK and blocking == 0 and there > 0):
            most = min(there, count)
            if sharing == EXCLUSIVE:
                st64(txq + _TAKEN, taken + most)
                return most
            if cas_gpu64(txq + _TAKEN, taken, taken + most) == taken:
                fence_acquire_gpu()
                return most
        elif status == EIO:
            return EIO
        elif status == EBUSY:
            if blocking == 0:
                return 0
            start = patience(polls, start, timeout_of(txq))
            if start < 0:
                return ETIMEDOUT
            polls += 1


# --- slots -----------------------------------------------------------------------------------------------------------


@device_function
def txq_reserve(txq: EthTxq, count: int, sharing: int = GPU, code_opt: int = DEFAULT) -> int:
    """Reserve `count` basic blocks, at most half of the ring. Return the index of the first, or a negative status
    (`doca_gpu_dev_eth_txq_reserve_wq_slots`).

    Unless SKIP_AVAILABILITY_CHECK is set, wait until the blocks are free.
    """
    depth = ld_fixed16(txq + VerbsQp.sq_wqe_num)
    if count < 1 or count > depth >> 1:
        return EINVAL  # more blocks could wait for WQEs that generate no completion
    completed = load_index(txq + _COMPLETED, sharing)
    first = take(txq + RSVD, count, sharing)
    previous = first + count - 1 - depth
    if previous >= completed and code_opt & SKIP_AVAILABILITY_CHECK == 0:
        status = _await(txq, previous, sharing)
        if status != OK:
            give_back(txq, first, count, sharing)
            return status
    return first


# --- packets ---------------------------------------------------------------------------------------------------------


@device_function
def _reserve_group(txq: EthTxq, before: int, sharing: int, code_opt: int, scope: int, lanes: int) -> int:
    """Reserve `before` slots for the group, then one for each thread. Return the first slot, or a status."""
    first = 0
    if rank_in(scope, lanes) == 0:
        first = txq_reserve(txq, before + size_of(scope, lanes), sharing, code_opt)
    return from_leader(first, scope, lanes)


@device_function
def _fill(txq: EthTxq, index: int, laddr: int, lkey: int, nbytes: int, notify: int, valid: int) -> None:
    if valid:
        txq_prepare_send(txq, index, laddr, lkey, nbytes, notify)
    else:
        fill_nop(txq, index)


@device_function
def txq_send(
    txq: EthTxq, laddr: int, lkey: int, nbytes: int, notify: int = 0, sharing: int = GPU, code_opt: int = DEFAULT,
    scope: int = THREAD,
) -> int:
    """Send a packet of `nbytes`, 14 to 65535, at `laddr`. Return a ticket, or a negative status
    (`doca_gpu_dev_eth_txq_send`).

    `notify`: the packet completes with a CQE that `txq_poll` counts. The bytes must not change until it has been sent.
    """
    valid = ETHERNET.size <= nbytes <= LONGEST
    if scope == THREAD and not valid:
        return EINVAL
    lanes = group_of(txq, 0, sharing, code_opt, scope)
    first = _reserve_group(txq, 0, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    own = first + rank_in(scope, lanes)
    _fill(txq, own, laddr, lkey, nbytes, notify, valid)
    ticket = post_own(txq, own, 1, sharing, code_opt, scope, lanes)
    return ticket if valid else EINVAL


@device_function
def txq_send_headers(
    txq: EthTxq, headers: int, header_bytes: int, laddr: int, lkey: int, nbytes: int, mss: int = 0, notify: int = 0,
    sharing: int = GPU, code_opt: int = DEFAULT,
) -> int:
    """Send a packet of two parts: headers, which are copied into the WQE, and a payload of 0 or more bytes at `laddr`.

    With `mss`, the device cuts the payload into TCP segments of up to `mss` bytes. It sends each with these headers,
    adapts lengths, sequence numbers and checksums, and sets FIN and PSH in the last one (`doca_eth_txq_task_lso_send`).
    Return a ticket, or a negative status. The headers may change as soon as this returns. The payload must not change
    until it has been sent.

    EINVAL unless there are 14 to 210 bytes of headers. Without `mss`, headers and payload have at most 65535 bytes.
    With `mss`, 1 to 16383, the payload has 1 byte to `caps.max_lso`, which is 0 on a device without LSO.
    """
    if not is_valid(txq, header_bytes, nbytes, mss):
        return EINVAL
    blocks = txq_headers_blocks(header_bytes, nbytes)
    first = txq_reserve(txq, blocks, sharing, code_opt)
    if first < 0:
        return first
    txq_prepare_headers(txq, first, headers, header_bytes, laddr, lkey, nbytes, mss, notify)
    return min(post(txq, first, first + blocks - 1, sharing, code_opt), first)


@device_function
def txq_wait_send(
    txq: EthTxq, timestamp: int, laddr: int, lkey: int, nbytes: int, notify: int = 0, sharing: int = GPU,
    code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Send like `txq_send`, but not before a time (`doca_gpu_dev_eth_txq_wait_send`).

    `timestamp` is in the format of the device. All threads of a warp or block pass the same one, and wait as one.
    Everything that is posted to the queue later waits as well. EINVAL: the queue cannot wait for a time.
    """
    valid = ETHERNET.size <= nbytes <= LONGEST and ld_fixed64(txq + EthTxq.wait_mask) != 0
    if scope == THREAD and not valid:
        return EINVAL
    other = 2 * timestamp + 1  # never 0: all lanes compare it
    lanes = group_with(txq, other, ld_fixed16(txq + VerbsQp.sq_wqe_num), sharing, code_opt, scope)
    first = _reserve_group(txq, 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    rank = rank_in(scope, lanes)
    if rank == 0:
        if ld_fixed64(txq + EthTxq.wait_mask) != 0:
            txq_prepare_wait(txq, first, timestamp)
        else:
            fill_nop(txq, first)
    own = first + 1 + rank
    _fill(txq, own, laddr, lkey, nbytes, notify, valid)
    gather(scope, lanes)
    status = OK
    if rank == 0:
        status = min(OK, post(txq, first, first + size_of(scope, lanes), sharing, code_opt))
    status = from_leader(status, scope, lanes)
    if status != OK:
        return status
    return own if valid else EINVAL
