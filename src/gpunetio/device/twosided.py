"""Two-sided operations: SENDs, and the receives that they need at the other end.

Receives are posted to the queue's own receive queue or to a contiguous shared one. Tickets count receives, and messages
arrive in that order. A shared receive queue that serves several queues gives each message the next receive, so a ticket
does not say which queue its message belongs to. There, `recv_next` waits for a queue's next message, and `recv_slot`
returns the receive that it used.
"""

from __future__ import annotations

from ..formats.cqe import CQE64, FORMAT_MASK, FORMAT_SHIFT, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeFormat
from ..formats.device_structs import VerbsCq, VerbsQp, VerbsRq, VerbsSide
from ..formats.doorbell import PI_MASK
from ..formats.wqe import INVALID_LKEY, MAX_TRANSFER, SEGMENT
from ..jit.compile import device_function
from .cq import cqe_address, has_failed, load_index, poll_ring, raise_index, timeout_of, update_cq_record
from .modes import DEFAULT, EXCLUSIVE, GPU, THREAD
from .onesided import mcst, wait
from ..jit.ops import (
    be16, be32, cas_gpu64, fence_acquire_gpu, fence_acquire_sys, fence_gpu, fence_release_sys, ld8, ld16, ld32,
    ld_fixed32, ld_fixed64, ld_relaxed32, ld_relaxed64, ld_relaxed_gpu64, pack64, st64, st128, st_relaxed32,
    st_relaxed_gpu64,
)
from .qp import await_turn
from .scope import (
    ALONE, from_last, from_leader, gather, group_of, group_with, post_own, rank_in, reserve_own, size_of,
)
from .status import EBUSY, EINVAL, EIO, ENOBUFS, EOVERFLOW, ETIMEDOUT, OK
from .waiting import patience
from .wqe import CQ_UPDATE, SEND, SEND_IMM, data_segment, prepare_nop, prepare_send

_CQ = VerbsSide.cq_rq
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT


@device_function
def _send(
    qp: VerbsQp, laddr: int, lkey: int, nbytes: int, opcode: int, imm: int, sharing: int, code_opt: int, scope: int
) -> int:
    valid = 1 <= nbytes <= MAX_TRANSFER
    if scope == THREAD and not valid:
        return EINVAL
    lanes = group_of(qp, 0, sharing, code_opt, scope)
    first = reserve_own(qp, 1, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    if valid:
        prepare_send(qp, first, laddr, lkey, nbytes, CQ_UPDATE, opcode, imm)
    else:
        prepare_nop(qp, first)
    ticket = post_own(qp, first, 1, sharing, code_opt, scope, lanes)
    return ticket if valid else EINVAL


@device_function
def send(
    qp: VerbsQp, laddr: int, lkey: int, nbytes: int, sharing: int = GPU, code_opt: int = DEFAULT, scope: int = THREAD
) -> int:
    """Send `nbytes`, at least 1, from `laddr` to the peer's next receive (`doca_gpu_dev_verbs_send`)."""
    return _send(qp, laddr, lkey, nbytes, SEND, 0, sharing, code_opt, scope)


@device_function
def send_imm(
    qp: VerbsQp, laddr: int, lkey: int, nbytes: int, imm: int, sharing: int = GPU, code_opt: int = DEFAULT,
    scope: int = THREAD,
) -> int:
    """Send like `send`, with 32 bits of immediate data that `recv_imm` returns at the other end."""
    return _send(qp, laddr, lkey, nbytes, SEND_IMM, imm, sharing, code_opt, scope)


# --- receives ------------------------------------------------------------------------------------------------------


@device_function
def rq_of(qp: VerbsQp) -> VerbsRq:
    """Return the structure of the receive queue, or 0."""
    return VerbsRq(ld_fixed64(ld_fixed64(qp + VerbsQp.side) + VerbsSide.rq))


@device_function
def has_room(qp: VerbsQp, rq: VerbsRq, first: int, count: int, sharing: int) -> bool:
    """Return whether the slots of receives first … first + count − 1 are free."""
    slots = ld_fixed32(rq + VerbsRq.wqe_num)
    done = ld_fixed64(rq + VerbsRq.done)
    if done == 0:
        consumed = load_index(ld_fixed64(qp + VerbsQp.side) + _CQ + VerbsCq.cqe_ci, sharing)
        return first + count <= consumed + slots
    for i in range(first, first + count):
        if i >= slots and ld_relaxed64(done + 8 * (i & (slots - 1))) != i - slots + 1:
            return False
    return True


@device_function
def _reserve(qp: VerbsQp, rq: VerbsRq, count: int, sharing: int) -> int:
    while True:
        first = load_index(rq + VerbsRq.rsvd, sharing)
        if not has_room(qp, rq, first, count, sharing):
            return ENOBUFS
        if sharing == EXCLUSIVE:
            st64(rq + VerbsRq.rsvd, first + count)
            return first
        if cas_gpu64(rq + VerbsRq.rsvd, first, first + count) == first:
            return first


@device_function
def fill_receive(rq: VerbsRq, index: int, laddr: int, lkey: int, nbytes: int) -> None:
    size = ld_fixed32(rq + VerbsRq.wqe_size)
    slot = index & (ld_fixed32(rq + VerbsRq.wqe_num) - 1)
    wqe = ld_fixed64(rq + VerbsRq.wqe_daddr) + slot * size
    used = 0
    if nbytes > 0:
        data_segment(wqe, laddr, lkey, nbytes)
        used = SEGMENT
    if used < size:
        st128(wqe + used, pack64(0, be32(INVALID_LKEY)), 0)  # ends the list


@device_function
def publish(qp: VerbsQp, rq: VerbsRq, first: int, next_index: int, sharing: int) -> int:
    """Announce receives to the NIC, in the order of their reservation."""
    if sharing != EXCLUSIVE:
        status = await_turn(qp, rq + VerbsRq.ready, first, sharing)
        if status != OK:
            return status
        fence_acquire_gpu()
    fence_release_sys()
    st_relaxed32(ld_fixed64(rq + VerbsRq.dbrec), be32(next_index & PI_MASK))
    if sharing != EXCLUSIVE:
        fence_gpu()  # orders this record before that of the next thread
    st_relaxed_gpu64(rq + VerbsRq.ready, next_index)
    return OK


@device_function
def recv(qp: VerbsQp, laddr: int, lkey: int, nbytes: int, sharing: int = GPU, scope: int = THREAD) -> int:
    """Post a receive of up to `nbytes` to `laddr`. Return a ticket for `recv_wait` (`doca_gpu_dev_verbs_recv`).

    A WRITE with immediate data puts no data here, so 0 bytes are enough for it. ENOBUFS: all receives are posted.
    EINVAL: the queue has no receives, or an argument is invalid. In warp and block scope, a thread with an invalid
    argument posts a receive of 0 bytes.
    """
    rq = rq_of(qp)
    if rq == 0:
        return EINVAL
    valid = 0 <= nbytes <= MAX_TRANSFER
    if scope == THREAD and not valid:
        return EINVAL
    lanes = group_with(rq, 0, ld_fixed32(rq + VerbsRq.wqe_num), sharing, DEFAULT, scope)
    rank, size = rank_in(scope, lanes), size_of(scope, lanes)
    first = 0
    if rank == 0:
        first = _reserve(qp, rq, size, sharing)
    first = from_leader(first, scope, lanes)
    if first < 0:
        return first
    fill_receive(rq, first + rank, laddr, lkey, nbytes if valid else 0)
    gather(scope, lanes)
    status = OK
    if rank == 0:
        status = publish(qp, rq, first, first + size, sharing)
    status = from_leader(status, scope, lanes)
    if status != OK:
        return status
    return first + rank if valid else EINVAL


# --- arrivals ------------------------------------------------------------------------------------------------------


@device_function
def message_cqe(qp: VerbsQp, arrival: int) -> int:
    """Return the address of the completion of a message."""
    cq = ld_fixed64(qp + VerbsQp.side) + _CQ
    return cqe_address(cq, arrival + ld_fixed64(cq + VerbsCq.cqe_rsvd))


@device_function
def _slot(qp: VerbsQp, rq: VerbsRq, arrival: int) -> int:
    """Return the slot of a shared queue whose receive a message used. Some devices count receives, others slots."""
    return be16(ld16(message_cqe(qp, arrival) + CQE64.wqe_counter)) & (ld_fixed32(rq + VerbsRq.wqe_num) - 1)


@device_function
def _count_shared(qp: VerbsQp, rq: VerbsRq, cq: VerbsCq, arrival: int, sharing: int) -> int:
    """Count a message that has arrived in a shared queue, and free the slot of its receive.

    EBUSY if another thread is doing this: meanwhile the slot may be reserved again for a later receive.
    """
    counting = ld_fixed64(qp + VerbsQp.side) + VerbsSide.counting
    if sharing != EXCLUSIVE and cas_gpu64(counting, arrival, arrival + 1) != arrival:
        return EBUSY
    slot = _slot(qp, rq, arrival)
    # Not `ready`, which is raised after the record. No slot is reserved again before it is free.
    newest = ld_relaxed_gpu64(rq + VerbsRq.rsvd) - 1
    index = newest - ((newest - slot) & (ld_fixed32(rq + VerbsRq.wqe_num) - 1))
    st_relaxed_gpu64(ld_fixed64(rq + VerbsRq.done) + 8 * slot, index + 1)
    if sharing != EXCLUSIVE:
        fence_gpu()  # a thread that sees the message counted finds its slot
    raise_index(cq + VerbsCq.cqe_ci, arrival + 1, sharing)
    return OK


@device_function
def recv_slot(qp: VerbsQp, arrival: int) -> int:
    """Return the ticket of the receive that message number `arrival` of the queue used. First wait for the message.

    On a shared receive queue, this works until the slot has received another message and a thread has waited for it.
    """
    rq = rq_of(qp)
    done = ld_fixed64(rq + VerbsRq.done)
    return ld_relaxed64(done + 8 * _slot(qp, rq, arrival)) - 1 if done != 0 else arrival


@device_function
def recv_poll(qp: VerbsQp, ticket: int, sharing: int = GPU) -> int:
    """Check once whether a receive, or message number `ticket`, and all before it are complete: OK, EBUSY or EIO.

    Messages that have arrived are counted, so a shared receive queue has room again. After EIO,
    `gpu.ExportedQp.last_error` has the syndrome. EINVAL: the queue has no receives.
    """
    if ticket < 0:
        return ticket
    side, rq = ld_fixed64(qp + VerbsQp.side), rq_of(qp)
    if rq == 0:
        return EINVAL
    cq = side + _CQ
    shared = ld_fixed64(rq + VerbsRq.done) != 0
    while True:
        ci = load_index(cq + VerbsCq.cqe_ci, sharing)
        # In parts if the ring is shorter than the wait; one by one if each message frees a slot of a shared queue.
        part = min(ticket, ci if shared else ci + ld_fixed32(cq + VerbsCq.cqe_num) - 1)
        status = poll_ring(side, cq, part, not shared, sharing)
        if status == OK and part >= ci:
            if shared:
                status = _count_shared(qp, rq, cq, part, sharing)
            if status == OK and ld_fixed64(side + VerbsSide.tells_cq):
                update_cq_record(cq, sharing)
        if status != OK or part == ticket:
            return status


@device_function
def _await(qp: VerbsQp, arrival: int, sharing: int) -> int:
    """Wait for the queue's message number `arrival` and all before it: OK or a negative status."""
    status = recv_poll(qp, arrival, sharing)
    polls = 0
    start = 0
    while status == EBUSY:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1
        failed = polls & 0xFF == 0 and has_failed(qp)
        status = recv_poll(qp, arrival, sharing)
        if failed and status == EBUSY:
            return EIO  # a shared queue keeps its receives, for other queue pairs
    return status


@device_function
def _await_group(qp: VerbsQp, ticket: int, sharing: int, scope: int) -> int:
    """Wait like `_await`. In warp and block scope, the last thread waits for all, as in `wait`."""
    if scope != THREAD:
        status = ticket
        if rank_in(scope, ALONE) == size_of(scope, ALONE) - 1 and ticket >= 0:
            status = _await(qp, ticket, sharing)
        if from_last(status, scope) == OK:
            return min(ticket, OK)
    if ticket < 0:
        return ticket
    return _await(qp, ticket, sharing)


@device_function
def _is_there(qp: VerbsQp, arrival: int) -> int:
    """Return whether the completion of a message that has arrived is still there, and not one of a later lap."""
    cq, rq = ld_fixed64(qp + VerbsQp.side) + _CQ, rq_of(qp)
    position = arrival + ld_fixed64(cq + VerbsCq.cqe_rsvd)
    word = be32(ld_relaxed32(cqe_address(cq, position) + CQE64.wqe_counter))
    there = (word & OWNER_MASK) == ((position & ld_fixed32(cq + VerbsCq.cqe_num)) != 0)
    there = there and (word & 0xFF) >> OPCODE_SHIFT != _INVALID  # being overwritten
    if ld_fixed64(rq + VerbsRq.done) == 0:
        there = there and word >> 16 == arrival & PI_MASK
    return there


@device_function
def recv_bytes(qp: VerbsQp, arrival: int) -> int:
    """Return the length of a message that has arrived, in bytes (`doca_gpu_dev_verbs_cqe_get_bytes`).

    This works until the ring of completions has wrapped around.
    """
    # Relaxed, not plain: compilers may move a plain load past the fence in `recv_wait`.
    return be32(ld_relaxed32(message_cqe(qp, arrival) + CQE64.byte_cnt))


@device_function
def recv_imm(qp: VerbsQp, arrival: int) -> int:
    """Return the 32 bits of immediate data of a message or a WRITE."""
    return be32(ld32(message_cqe(qp, arrival) + CQE64.imm_inval_pkey))


@device_function
def recv_inline(qp: VerbsQp, arrival: int) -> int:
    """Return the address of a message's bytes inside its completion, or 0 if they are in the receive's buffer
    (`doca_gpu_dev_verbs_cqe_is_inline`, `…cqe_get_inl_data`).

    For queue pairs created with `cqe_inline`: at most 32 bytes, until the ring of completions has wrapped around.
    """
    cqe = message_cqe(qp, arrival)
    return cqe if (ld8(cqe + CQE64.op_own) & FORMAT_MASK) >> FORMAT_SHIFT == CqeFormat.INLINE_32 else 0


@device_function
def recv_wait(qp: VerbsQp, ticket: int, sharing: int = GPU, scope: int = THREAD, daddr: int = 0, dlkey: int = 0) -> int:
    """Wait for a receive and all before it. Return the number of bytes received, or a negative status
    (`doca_gpu_dev_verbs_recv_wait`).

    In warp and block scope, pass the tickets that one `recv` in that scope returned.
    EOVERFLOW: the ring of completions has wrapped around since the message arrived. The data are there, but their
    length is lost. This happens if threads that share a queue overtake each other; a longer completion queue gives
    them time.
    `daddr`, `dlkey`: then also wait for a `mcst` of that byte. GPUs before Hopper need this for data in their memory.
    """
    status = _await_group(qp, ticket, sharing, scope)
    if daddr != 0 and (status == OK or scope != THREAD):
        read = wait(qp, mcst(qp, daddr, dlkey, sharing, DEFAULT, scope), sharing, scope)
        status = read if status == OK else status
    if status != OK:
        return status
    nbytes = recv_bytes(qp, ticket)
    fence_acquire_sys()  # load the length before checking that it is still ours
    return nbytes if _is_there(qp, ticket) else EOVERFLOW


@device_function
def recv_wait_all(qp: VerbsQp, sharing: int = GPU) -> int:
    """Wait for all receives posted: OK or a negative status (`doca_gpu_dev_verbs_recv_wait` without a ticket).

    EINVAL: the queue has no receives, or shares them with other queues.
    """
    rq = rq_of(qp)
    if rq == 0 or ld_fixed64(rq + VerbsRq.done) != 0:
        return EINVAL
    posted = load_index(rq + VerbsRq.rsvd, sharing)
    return OK if posted == 0 else _await(qp, posted - 1, sharing)


@device_function
def recv_next(qp: VerbsQp, sharing: int = GPU) -> int:
    """Wait for the queue's next message. Return its number, for `recv_bytes` and its relatives, or a negative status.

    Each thread that calls this gets a different message. All wait for the same one, and the first takes it, so a wait
    that ends without a message leaves no gap.
    """
    arrivals = ld_fixed64(qp + VerbsQp.side) + VerbsSide.arrivals
    while True:
        arrival = load_index(arrivals, sharing)
        status = _await(qp, arrival, sharing)
        if status != OK:
            return status
        if sharing == EXCLUSIVE:
            st64(arrivals, arrival + 1)
            return arrival
        if cas_gpu64(arrivals, arrival, arrival + 1) == arrival:
            return arrival
