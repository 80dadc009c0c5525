"""Sends of the RDMA library: threads enqueue WRITEs, READs and SENDs on a connection, and one of them commits.

Enqueuing fills a slot of the connection's send queue without telling the NIC. A commit makes the last operation of its
batch signalled, and rings the doorbell once. So each commit has one completion, which `rdma_wait_all` counts.
rdma_batch.py explains strong and weak batches.

Memory is given as bufs (buf.py) with an offset and a length of 1 byte to 1 GiB. `imm` is sent as immediate data if
`flags` is RDMA_IMM. Functions return OK or a status. EINVAL means that there is no such connection, or that the range
is not inside its buf; then nothing is enqueued.
"""

from __future__ import annotations

from ..formats.core_device import DevBuf
from ..formats.device_structs import VerbsQp
from ..formats.rdma_device import COMMITS_BITS, DevRdma, DevRdmaQueue
from ..formats.wqe import MAX_INLINE, MAX_TRANSFER
from ..jit.compile import device_function
from ..jit.ops import (
    exchange64, fence_release_gpu, fetch_add_gpu64, fetch_max_gpu64, ld_fixed16, ld_fixed32, ld_fixed64,
    ld_relaxed_gpu64, prefetch_to_write, st_relaxed_gpu64,
)
from .buf import buf_at
from .cq import CI, poll_at, timeout_of
from .modes import DEFAULT, GPU, SYNC_SYS, THREAD
from .qp import RSVD, make_room
from .rdma_batch import (
    OTHER_BLOCK, TURN, begin_commit, check_weak, close_strong, close_weak, end_commit, free_index, next_strong,
    next_weak, slots_of, take_strong,
)
from .scope import ALONE, from_leader, gather, group_with, rank_in, size_of
from .status import EBUSY, EINVAL, ENOBUFS, ETIMEDOUT, OK
from .submit import PI, announce_alone
from .waiting import patience
from .wqe import (
    RDMA_WRITE, RDMA_WRITE_IMM, SEND, SEND_IMM, prepare_read, prepare_send, prepare_write, prepare_write_inline,
    prepare_write_value, signal_wqe, wqe_address,
)

RDMA_IMM = 1
_UNSIGNALLED = 0
_POSTED, _TAKEN = DevRdmaQueue.posted, DevRdmaQueue.taken
_COMMITS = (1 << COMMITS_BITS) - 1
_LONGEST_VALUE = 8


@device_function
def queue_of(rdma: DevRdma, conn: int) -> DevRdmaQueue:
    """Return the send queue of a connection."""
    return DevRdmaQueue(rdma + DevRdma.size + DevRdmaQueue.size * conn)


@device_function
def qp_of(rdma: DevRdma, conn: int) -> VerbsQp:
    """Return the queue pair of a connection, or 0 if there is no connection with this number."""
    if conn < 0 or conn >= ld_fixed32(rdma + DevRdma.connections):
        return VerbsQp(0)
    return VerbsQp(ld_fixed64(queue_of(rdma, conn) + DevRdmaQueue.qp))


@device_function
def local_key(buf: int) -> int:
    """Return the key with which the local NIC accesses a buf."""
    return ld_fixed32(buf + DevBuf.lkey)


@device_function
def _remote_key(buf: int) -> int:
    return ld_fixed32(buf + DevBuf.rkey)


@device_function
def address_in(buf: int, offset: int, nbytes: int) -> int:
    """Return the address of a range of a buf, or EINVAL if it is not inside, or if `buf` is a status of `buf_get`."""
    if buf <= 0 or nbytes < 1 or nbytes > MAX_TRANSFER:
        return EINVAL
    return buf_at(buf, offset, nbytes)


# --- slots -----------------------------------------------------------------------------------------------------------


@device_function
def _room(qp: VerbsQp, index: int, completed: int) -> int:
    """Wait until the slot of `index` is free: OK, or a status. ENOBUFS: this batch already uses the slot."""
    slots = ld_fixed16(qp + VerbsQp.sq_wqe_num)
    previous = index - slots
    if previous < completed:
        return OK
    if previous >= ld_relaxed_gpu64(qp + PI):
        return ENOBUFS
    return make_room(qp, previous, slots, GPU)


@device_function
def _take(queue: DevRdmaQueue, qp: VerbsQp, count: int) -> int:
    """Take the next slots of a strong batch. Return the index of the first, or a status."""
    polls = 0
    start = 0
    while start >= 0:
        completed = ld_relaxed_gpu64(qp + CI)
        word = ld_relaxed_gpu64(queue + TURN)
        first = next_strong(queue, word, completed)
        status = first
        if first >= 0:
            status = _room(qp, first + count - 1, completed)
        if status != OK and ld_relaxed_gpu64(queue + TURN) == word:
            return status
        if status == OK and take_strong(queue, word, count):
            return first
        start = patience(polls, start, timeout_of(qp))  # another thread was faster, or is committing
        polls += 1
    return ETIMEDOUT


@device_function
def _begin(strong: int, rdma: DevRdma, conn: int, position: int, valid: int) -> tuple[int, int]:
    """Return the index of a slot to fill, or a status, and the lanes that take slots together.

    EINVAL if an argument is not `valid`, or there is no such connection.
    """
    qp = qp_of(rdma, conn)
    if qp == 0 or not valid:
        return EINVAL, ALONE
    queue = queue_of(rdma, conn)
    if strong:
        lanes = group_with(queue, 0, slots_of(queue), GPU, DEFAULT, THREAD)
        rank = rank_in(THREAD, lanes)
        first = 0
        if rank == 0:
            first = _take(queue, qp, size_of(THREAD, lanes))
        first = from_leader(first, THREAD, lanes)
        return (first + rank if first >= 0 else first), lanes
    completed = ld_relaxed_gpu64(qp + CI)
    index = next_weak(queue, position, completed)
    status = index
    if index >= 0:
        status = _room(qp, index, completed)
    return (index if status == OK else status), ALONE


@device_function
def told(status: int) -> int:
    """Return the status for the caller of the library: EBUSY for OTHER_BLOCK, others unchanged."""
    return EBUSY if status == OTHER_BLOCK else status


@device_function
def _end(strong: int, rdma: DevRdma, conn: int, index: int, lanes: int) -> int:
    """Mark the slot as filled and return OK. If `index` is a status of `_begin`, return that status."""
    if index < 0:
        return told(index)
    queue = queue_of(rdma, conn)
    if strong:
        gather(THREAD, lanes)
        if rank_in(THREAD, lanes) == 0:
            close_strong(queue, index, size_of(THREAD, lanes))
    else:
        close_weak(queue, index)
    return OK


# --- operations ------------------------------------------------------------------------------------------------------


@device_function
def _write(
    strong: int, rdma: DevRdma, conn: int, rbuf: int, roff: int, lbuf: int, loff: int, nbytes: int, imm: int,
    flags: int, position: int,
) -> int:
    qp, raddr, laddr = qp_of(rdma, conn), address_in(rbuf, roff, nbytes), address_in(lbuf, loff, nbytes)
    index, lanes = _begin(strong, rdma, conn, position, raddr >= 0 and laddr >= 0)
    if index >= 0:
        opcode = RDMA_WRITE_IMM if flags & RDMA_IMM else RDMA_WRITE
        prepare_write(qp, index, raddr, _remote_key(rbuf), laddr, local_key(lbuf), nbytes, _UNSIGNALLED, opcode, imm)
    return _end(strong, rdma, conn, index, lanes)


@device_function
def rdma_write_strong(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, lbuf: int, loff: int, nbytes: int, imm: int = 0, flags: int = 0
) -> int:
    """Enqueue a WRITE of `nbytes` from `lbuf` to `rbuf` in the next slot (`doca_gpu_dev_rdma_write_strong`).

    EBUSY: another block is filling a batch. ENOBUFS: the batch is as long as the queue; commit it.
    """
    return _write(True, rdma, conn, rbuf, roff, lbuf, loff, nbytes, imm, flags, 0)


@device_function
def rdma_write_weak(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, lbuf: int, loff: int, nbytes: int, imm: int = 0, flags: int = 0,
    position: int = 0,
) -> int:
    """Enqueue a WRITE at a position of a weak batch (`doca_gpu_dev_rdma_write_weak`).

    `position` counts from the one that `rdma_get_info` returns, and may wrap around at its mask. EBUSY: a strong batch
    has not been committed.
    """
    return _write(False, rdma, conn, rbuf, roff, lbuf, loff, nbytes, imm, flags, position)


@device_function
def _write_inline(
    strong: int, rdma: DevRdma, conn: int, rbuf: int, roff: int, pointer: int, nbytes: int, imm: int, flags: int,
    position: int,
) -> int:
    qp, raddr = qp_of(rdma, conn), address_in(rbuf, roff, nbytes)
    index, lanes = _begin(strong, rdma, conn, position, raddr >= 0 and nbytes <= MAX_INLINE)
    if index >= 0:
        opcode = RDMA_WRITE_IMM if flags & RDMA_IMM else RDMA_WRITE
        prepare_write_inline(qp, index, raddr, _remote_key(rbuf), pointer, nbytes, _UNSIGNALLED, 0, opcode, imm)
    return _end(strong, rdma, conn, index, lanes)


@device_function
def rdma_write_inline_strong(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, pointer: int, nbytes: int, imm: int = 0, flags: int = 0
) -> int:
    """Enqueue a WRITE of 1 to 28 bytes, which are copied from `pointer` immediately
    (`doca_gpu_dev_rdma_write_inline_strong`)."""
    return _write_inline(True, rdma, conn, rbuf, roff, pointer, nbytes, imm, flags, 0)


@device_function
def rdma_write_inline_weak(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, pointer: int, nbytes: int, imm: int = 0, flags: int = 0,
    position: int = 0,
) -> int:
    """Enqueue an inline WRITE at a position of a weak batch (`doca_gpu_dev_rdma_write_inline_weak`)."""
    return _write_inline(False, rdma, conn, rbuf, roff, pointer, nbytes, imm, flags, position)


@device_function
def _write_value(
    strong: int, rdma: DevRdma, conn: int, rbuf: int, roff: int, value: int, nbytes: int, imm: int, flags: int,
    position: int,
) -> int:
    qp, raddr = qp_of(rdma, conn), address_in(rbuf, roff, nbytes)
    index, lanes = _begin(strong, rdma, conn, position, raddr >= 0 and nbytes <= _LONGEST_VALUE)
    if index >= 0:
        opcode = RDMA_WRITE_IMM if flags & RDMA_IMM else RDMA_WRITE
        prepare_write_value(qp, index, raddr, _remote_key(rbuf), value, nbytes, _UNSIGNALLED, 0, opcode, imm)
    return _end(strong, rdma, conn, index, lanes)


@device_function
def rdma_write_value_strong(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, value: int, nbytes: int = 8, imm: int = 0, flags: int = 0
) -> int:
    """Enqueue a WRITE of the low `nbytes`, 1 to 8, of `value`. The C function takes a pointer to it."""
    return _write_value(True, rdma, conn, rbuf, roff, value, nbytes, imm, flags, 0)


@device_function
def rdma_write_value_weak(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, value: int, nbytes: int = 8, imm: int = 0, flags: int = 0,
    position: int = 0,
) -> int:
    """Enqueue a WRITE of a value at a position of a weak batch."""
    return _write_value(False, rdma, conn, rbuf, roff, value, nbytes, imm, flags, position)


@device_function
def _read(
    strong: int, rdma: DevRdma, conn: int, rbuf: int, roff: int, lbuf: int, loff: int, nbytes: int, position: int
) -> int:
    qp, raddr, laddr = qp_of(rdma, conn), address_in(rbuf, roff, nbytes), address_in(lbuf, loff, nbytes)
    index, lanes = _begin(strong, rdma, conn, position, raddr >= 0 and laddr >= 0)
    if index >= 0:
        prepare_read(qp, index, raddr, _remote_key(rbuf), laddr, local_key(lbuf), nbytes, _UNSIGNALLED)
    return _end(strong, rdma, conn, index, lanes)


@device_function
def rdma_read_strong(rdma: DevRdma, conn: int, rbuf: int, roff: int, lbuf: int, loff: int, nbytes: int) -> int:
    """Enqueue a READ of `nbytes` from `rbuf` into `lbuf` in the next slot (`doca_gpu_dev_rdma_read_strong`)."""
    return _read(True, rdma, conn, rbuf, roff, lbuf, loff, nbytes, 0)


@device_function
def rdma_read_weak(
    rdma: DevRdma, conn: int, rbuf: int, roff: int, lbuf: int, loff: int, nbytes: int, position: int = 0
) -> int:
    """Enqueue a READ at a position of a weak batch (`doca_gpu_dev_rdma_read_weak`)."""
    return _read(False, rdma, conn, rbuf, roff, lbuf, loff, nbytes, position)


@device_function
def _send(
    strong: int, rdma: DevRdma, conn: int, lbuf: int, loff: int, nbytes: int, imm: int, flags: int, position: int
) -> int:
    qp, laddr = qp_of(rdma, conn), address_in(lbuf, loff, nbytes)
    index, lanes = _begin(strong, rdma, conn, position, laddr >= 0)
    if index >= 0:
        opcode = SEND_IMM if flags & RDMA_IMM else SEND
        prepare_send(qp, index, laddr, local_key(lbuf), nbytes, _UNSIGNALLED, opcode, imm)
    return _end(strong, rdma, conn, index, lanes)


@device_function
def rdma_send_strong(rdma: DevRdma, conn: int, lbuf: int, loff: int, nbytes: int, imm: int = 0, flags: int = 0) -> int:
    """Enqueue a SEND of `nbytes` from `lbuf` to the peer's next receive (`doca_gpu_dev_rdma_send_strong`)."""
    return _send(True, rdma, conn, lbuf, loff, nbytes, imm, flags, 0)


@device_function
def rdma_send_weak(
    rdma: DevRdma, conn: int, lbuf: int, loff: int, nbytes: int, imm: int = 0, flags: int = 0, position: int = 0
) -> int:
    """Enqueue a SEND at a position of a weak batch (`doca_gpu_dev_rdma_send_weak`)."""
    return _send(False, rdma, conn, lbuf, loff, nbytes, imm, flags, position)


# --- commits ---------------------------------------------------------------------------------------------------------


@device_function
def _commit(strong: int, rdma: DevRdma, conn: int, num: int) -> int:
    qp = qp_of(rdma, conn)
    if qp == 0:
        return EINVAL
    queue = queue_of(rdma, conn)
    begun = begin_commit(strong, queue, qp)
    if begun != 1:
        return told(begun)
    posted = ld_relaxed_gpu64(queue + _POSTED)
    first = posted >> COMMITS_BITS
    if strong:
        num = free_index(queue, first) - first
    else:
        status = check_weak(queue, first, num)
        if status != OK:
            fence_release_gpu()
            end_commit(queue, first)
            return status
    signal_wqe(qp, first + num - 1)
    # One word, stored before the doorbell: a thread that counts this commit then knows which index to wait for. An
    # atomic add after the doorbell would wait until the doorbell has left the core.
    st_relaxed_gpu64(queue + _POSTED, first + num << COMMITS_BITS | posted + 1 & _COMMITS)
    st_relaxed_gpu64(qp + RSVD, first + num)
    announce_alone(qp, first + num, SYNC_SYS, DEFAULT)
    prefetch_to_write(wqe_address(qp, first + num))
    end_commit(queue, first + num)
    return OK


@device_function
def rdma_commit_strong(rdma: DevRdma, conn: int) -> int:
    """Let the NIC execute the strong batch of this block (`doca_gpu_dev_rdma_commit_strong`).

    First wait for threads that are still enqueuing. If nothing was enqueued, return OK without a commit. EBUSY: the
    batch belongs to another block.
    """
    return _commit(True, rdma, conn, 0)


@device_function
def rdma_commit_weak(rdma: DevRdma, conn: int, num: int) -> int:
    """Let the NIC execute the next `num` positions (`doca_gpu_dev_rdma_commit_weak`).

    The caller must first wait for the threads that enqueued them, within a block with `block_sync`. EINVAL: a position
    was left out or used twice, or `num` is not 1 up to the slots of the queue. Then nothing is committed, and all
    enqueued operations are dropped. EBUSY: a strong batch has not been committed.
    """
    return _commit(False, rdma, conn, num)


@device_function
def rdma_get_info(rdma: DevRdma, conn: int) -> tuple[int, int]:
    """Return the next position, and their mask: the slots of the queue less 1 (`doca_gpu_dev_rdma_get_info`).

    The position is EINVAL if there is no such connection.
    """
    qp = qp_of(rdma, conn)
    if qp == 0:
        return EINVAL, 0
    queue = queue_of(rdma, conn)
    return free_index(queue, ld_relaxed_gpu64(qp + CI)), slots_of(queue) - 1


@device_function
def rdma_wait_all(rdma: DevRdma) -> int:
    """Wait until all commits of all connections are complete (`doca_gpu_dev_rdma_wait_all`).

    Return how many commits have completed that no call has counted before, or a negative status: EIO if a connection
    has failed (its `last_error()` says why), ETIMEDOUT after the deadline. After a negative status, a later call counts
    the commits that had completed.
    """
    uncounted = rdma + DevRdma.uncounted
    left = ld_relaxed_gpu64(uncounted)  # used only at the end, so nothing waits for the load
    count = 0
    for conn in range(ld_fixed32(rdma + DevRdma.connections)):
        qp = qp_of(rdma, conn)
        if qp != 0:
            queue = queue_of(rdma, conn)
            posted = ld_relaxed_gpu64(queue + _POSTED)
            if posted != 0:
                status = poll_at(qp, (posted >> COMMITS_BITS) - 1, GPU)
                if status != OK:
                    fetch_add_gpu64(uncounted, count)
                    return status
            taken = fetch_max_gpu64(queue + _TAKEN, posted)
            if taken < posted:
                count += posted - taken & _COMMITS
    return count if left == 0 else count + exchange64(uncounted, 0)
