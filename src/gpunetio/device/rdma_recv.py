"""Receives of the RDMA library: threads enqueue receives for all connections, and one of them commits.

Receives are posted in strong or weak batches, as sends are (rdma.py, rdma_batch.py). A message of any connection takes
the oldest receive. A thread that waits for messages gets the immediate data and the connection of each.
"""

from __future__ import annotations

from ..formats.cqe import CQE64, OPCODE_SHIFT, CqeOpcode
from ..formats.device_structs import VerbsQp, VerbsRq
from ..formats.rdma_device import DevRdma, DevRdmaQueue
from ..jit.compile import device_function
from ..jit.ops import (
    cas_gpu64, fence_acquire_gpu, fence_release_gpu, ld8, ld64, ld_fixed32, ld_fixed64, ld_relaxed_gpu64, st32, st64,
    st_relaxed_gpu64,
)
from .cq import has_failed, timeout_of
from .modes import DEFAULT, EXCLUSIVE, GPU, THREAD
from .rdma import address_in, local_key, qp_of, queue_of, told
from .rdma_batch import (
    TURN, begin_commit, check_weak, close_strong, close_weak, end_commit, free_index, next_strong, next_weak, slots_of,
    take_strong,
)
from .scope import from_leader, gather, group_with, rank_in, size_of
from .status import EBUSY, EINVAL, EIO, ENOBUFS, ETIMEDOUT, OK
from .twosided import fill_receive, has_room, message_cqe, publish, recv_imm, recv_poll, rq_of
from .waiting import patience

_POSTED = VerbsRq.ready
_LOOK_EVERY = 256  # polls between looks for a failed connection
_TAKEN, _LOOKING = DevRdmaQueue.taken, DevRdmaQueue.looking


@device_function
def rdma_get_recv(rdma: DevRdma) -> DevRdmaQueue:
    """Return the receive queue of an `Rdma`, for the functions below (`doca_gpu_dev_rdma_get_recv`)."""
    return queue_of(rdma, ld_fixed32(rdma + DevRdma.connections))


@device_function
def _take(recv: DevRdmaQueue, qp: VerbsQp, rq: VerbsRq, count: int) -> int:
    """Take the next slots of a strong batch. Return the index of the first, or a status."""
    polls = 0
    start = 0
    while start >= 0:
        posted = ld_relaxed_gpu64(rq + _POSTED)
        word = ld_relaxed_gpu64(recv + TURN)
        first = next_strong(recv, word, posted)
        if first >= 0 and not has_room(qp, rq, first, count, GPU):
            first = ENOBUFS
        if first < 0 and ld_relaxed_gpu64(recv + TURN) == word:
            return first
        if first >= 0 and take_strong(recv, word, count):
            return first
        start = patience(polls, start, timeout_of(qp))  # another thread was faster, or is committing
        polls += 1
    return ETIMEDOUT


@device_function
def _parts(recv: DevRdmaQueue) -> tuple[VerbsQp, VerbsRq]:
    """Return a queue pair that uses the receive queue, and the structure of that queue; both are 0 if there is none."""
    qp = VerbsQp(ld_fixed64(recv + DevRdmaQueue.qp))
    return qp, (rq_of(qp) if qp != 0 else VerbsRq(0))


@device_function
def _address(buf: int, offset: int, nbytes: int) -> int:
    """Return the address of a range of a buf, or EINVAL. Return 0 for 0 bytes without a buf."""
    if buf == 0 and nbytes == 0:
        return 0
    return address_in(buf, offset, nbytes)


@device_function
def _fill(rq: VerbsRq, index: int, buf: int, laddr: int, nbytes: int) -> None:
    lkey = 0
    if nbytes != 0:
        lkey = local_key(buf)
    fill_receive(rq, index, laddr, lkey, nbytes)


@device_function
def rdma_recv_strong(recv: DevRdmaQueue, buf: int = 0, nbytes: int = 0, offset: int = 0) -> int:
    """Enqueue a receive of up to `nbytes` into `buf` in the next slot (`doca_gpu_dev_rdma_recv_strong`).

    Without a buf, the receive is for a WRITE with immediate data. ENOBUFS: all receives are posted or enqueued; wait
    for a message. EBUSY: another block is filling a batch.
    """
    qp, rq = _parts(recv)
    laddr = _address(buf, offset, nbytes)
    if rq == 0 or laddr < 0:
        return EINVAL
    lanes = group_with(recv, 0, slots_of(recv), GPU, DEFAULT, THREAD)
    rank, size = rank_in(THREAD, lanes), size_of(THREAD, lanes)
    first = 0
    if rank == 0:
        first = _take(recv, qp, rq, size)
    first = from_leader(first, THREAD, lanes)
    if first < 0:
        return told(first)
    _fill(rq, first + rank, buf, laddr, nbytes)
    gather(THREAD, lanes)
    if rank == 0:
        close_strong(recv, first, size)
    return OK


@device_function
def rdma_recv_weak(recv: DevRdmaQueue, buf: int = 0, nbytes: int = 0, offset: int = 0, position: int = 0) -> int:
    """Enqueue a receive at a position of a weak batch (`doca_gpu_dev_rdma_recv_weak`).

    `position` counts from the one that `rdma_recv_get_info` returns.
    """
    qp, rq = _parts(recv)
    laddr = _address(buf, offset, nbytes)
    if rq == 0 or laddr < 0:
        return EINVAL
    index = next_weak(recv, position, ld_relaxed_gpu64(rq + _POSTED))
    if index < 0:
        return told(index)
    if not has_room(qp, rq, index, 1, GPU):
        return ENOBUFS
    _fill(rq, index, buf, laddr, nbytes)
    close_weak(recv, index)
    return OK


@device_function
def _commit(strong: int, recv: DevRdmaQueue, num: int) -> int:
    qp, rq = _parts(recv)
    if rq == 0:
        return EINVAL
    begun = begin_commit(strong, recv, qp)
    if begun != 1:
        return told(begun)
    first = ld_relaxed_gpu64(rq + _POSTED)
    if strong:
        num = free_index(recv, first) - first
    else:
        status = check_weak(recv, first, num)
        if status != OK:
            fence_release_gpu()
            end_commit(recv, first)
            return status
    publish(qp, rq, first, first + num, EXCLUSIVE)
    st_relaxed_gpu64(rq + VerbsRq.rsvd, first + num)
    fence_release_gpu()
    end_commit(recv, first + num)
    return OK


@device_function
def rdma_recv_commit_strong(recv: DevRdmaQueue) -> int:
    """Post the strong batch of this block (`doca_gpu_dev_rdma_recv_commit_strong`).

    OK and EBUSY are as in `rdma_commit_strong`.
    """
    return _commit(True, recv, 0)


@device_function
def rdma_recv_commit_weak(recv: DevRdmaQueue, num: int) -> int:
    """Post the receives at the next `num` positions (`doca_gpu_dev_rdma_recv_commit_weak`).

    The statuses are those of `rdma_commit_weak`.
    """
    return _commit(False, recv, num)


@device_function
def rdma_recv_get_info(recv: DevRdmaQueue) -> tuple[int, int]:
    """Return the next position of receives, and the mask of positions. The position is EINVAL if no receives exist."""
    _, rq = _parts(recv)
    if rq == 0:
        return EINVAL, 0
    return free_index(recv, ld_relaxed_gpu64(rq + _POSTED)), slots_of(recv) - 1


@device_function
def _take_message(
    recv: DevRdmaQueue, conn: int, qp: VerbsQp, queue: DevRdmaQueue, number: int, imms: int, conns: int
) -> int:
    """Take the next message of a connection: OK, EBUSY if there is none, or EIO."""
    arrival = ld64(queue + DevRdmaQueue.received)
    status = recv_poll(qp, arrival, GPU)
    if status != OK:
        return status
    opcode = ld8(message_cqe(qp, arrival) + CQE64.op_own) >> OPCODE_SHIFT
    if imms != 0:
        has_imm = opcode == CqeOpcode.RESP_WR_IMM or opcode == CqeOpcode.RESP_SEND_IMM
        st32(imms + 4 * number, recv_imm(qp, arrival) if has_imm else 0)
    if conns != 0:
        st32(conns + 4 * number, conn)
    st64(queue + DevRdmaQueue.received, arrival + 1)
    st64(recv + _TAKEN, ld64(recv + _TAKEN) + 1)
    return OK


@device_function
def _take_messages(recv: DevRdmaQueue, posted: int, count: int, imms: int, conns: int) -> int:
    """Take the messages that have arrived on any connection. Return `count` plus their number, or EIO."""
    rdma = ld_fixed64(recv + DevRdmaQueue.rdma)
    for conn in range(ld_fixed32(rdma + DevRdma.connections)):
        qp = qp_of(rdma, conn)
        status = OK if qp != 0 else EBUSY
        while status == OK and ld64(recv + _TAKEN) < posted:
            status = _take_message(recv, conn, qp, queue_of(rdma, conn), count, imms, conns)
            if status == OK:
                count += 1
        if status == EIO and count == 0:
            return EIO
    return count


@device_function
def _any_failed(recv: DevRdmaQueue) -> bool:
    """Return whether a thread has seen an error completion of any connection: a shared queue flushes no receives."""
    rdma = ld_fixed64(recv + DevRdmaQueue.rdma)
    for conn in range(ld_fixed32(rdma + DevRdma.connections)):
        qp = qp_of(rdma, conn)
        if qp != 0 and has_failed(qp):
            return True
    return False


@device_function
def _await_messages(recv: DevRdmaQueue, qp: VerbsQp, posted: int, imms: int, conns: int, blocking: int) -> int:
    count = 0
    polls = 0
    start = 0
    while True:
        found = _take_messages(recv, posted, count, imms, conns)
        if found < 0 or blocking == 0 or ld64(recv + _TAKEN) >= posted:
            return found
        if found == count:
            start = patience(polls, start, timeout_of(qp))
            if start < 0 or (polls & _LOOK_EVERY - 1 == 0 and polls > 0 and _any_failed(recv)):
                if count > 0:
                    return count
                return ETIMEDOUT if start < 0 else EIO
            polls += 1
        count = found


@device_function
def rdma_recv_wait_all(recv: DevRdmaQueue, imms: int = 0, conns: int = 0, blocking: int = 1) -> int:
    """Wait until all posted receives have their messages (`doca_gpu_dev_rdma_recv_wait_all`).

    Return how many new messages arrived, or a negative status: EIO if a connection has failed, ETIMEDOUT after the
    deadline. If messages arrived before the failure, return their number; the next call returns the status. Without
    `blocking`, take only the messages that are there.

    `imms`, `conns`: addresses of arrays of 32-bit words, one for each receive, or 0. They get the immediate data of
    each message, 0 if it has none, and the number of its connection. The messages of a connection are in order.
    """
    qp, rq = _parts(recv)
    if rq == 0:
        return EINVAL
    polls = 0
    start = 0
    while cas_gpu64(recv + _LOOKING, 0, 1) != 0:
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1
    fence_acquire_gpu()
    found = _await_messages(recv, qp, ld_relaxed_gpu64(rq + _POSTED), imms, conns, blocking)
    fence_release_gpu()
    st_relaxed_gpu64(recv + _LOOKING, 0)
    return found
