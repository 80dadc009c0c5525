"""DMA: the NIC copies memory of this machine, on the host or on a GPU, for kernels.

`dma_memcpy` fills a slot of the queue without telling the NIC. Any number of threads may enqueue copies at the same
time. `dma_commit` makes the last copy signalled, and rings the doorbell once for all of them. A thread must first
synchronize with the threads whose copies it commits, for example with `block_sync`. `dma_wait` waits for a ticket and
all before it.
"""

from __future__ import annotations

from ..formats.core_device import DevBuf
from ..formats.device_structs import VerbsQp
from ..formats.dma_device import DevDma
from ..jit.compile import device_function
from ..jit.ops import cas_gpu64, fence_acquire_gpu, ld_fixed16, ld_fixed32, ld_fixed64, ld_relaxed_gpu64
from .buf import buf_at
from .cq import CI, poll_at
from .modes import GPU
from .qp import READY, RSVD, give_back, make_room, mark_ready
from .status import EINVAL, ENOBUFS, OK
from .submit import PI, submit
from .wqe import prepare_memcpy, signal_wqe

_UNSIGNALLED = 0


@device_function
def _local_at(buf: int, offset: int, nbytes: int) -> int:
    """Return the address of a range of a buf.

    EINVAL if the range is not inside, the memory is a peer's, or `buf` is a status of `buf_get`.
    """
    if buf <= 0 or ld_fixed32(buf + DevBuf.lkey) == 0:
        return EINVAL
    return buf_at(buf, offset, nbytes)


@device_function
def _take_slot(qp: VerbsQp) -> int:
    """Take the next slot. Return its index, or a status. ENOBUFS: copies that were not committed fill the queue."""
    slots = ld_fixed16(qp + VerbsQp.sq_wqe_num)
    index = ld_relaxed_gpu64(qp + RSVD)
    while True:
        if index - slots >= ld_relaxed_gpu64(qp + PI):
            return ENOBUFS
        found = cas_gpu64(qp + RSVD, index, index + 1)
        if found == index:
            break
        index = found
    if index - slots >= ld_relaxed_gpu64(qp + CI):
        status = make_room(qp, index - slots, slots, GPU)
        if status != OK:
            give_back(qp, index, 1, GPU)
            return status
    return index


@device_function
def dma_memcpy(dma: DevDma, src_buf: int, src_offset: int, dst_buf: int, dst_offset: int, nbytes: int) -> int:
    """Enqueue a copy of 1 byte or more from one buf to another (`doca_gpu_dev_dma_memcpy`).

    Return a ticket, or a status. EINVAL: the bytes are not inside their buf, or more than the device copies at a time
    (`Dma.max_buf_size`). ENOBUFS: the queue is full of copies that were not committed. EIO: an earlier copy failed.
    Where source and target overlap, the contents of the target are undefined.
    """
    if nbytes < 1 or nbytes > ld_fixed64(dma + DevDma.max_nbytes):
        return EINVAL
    source, target = _local_at(src_buf, src_offset, nbytes), _local_at(dst_buf, dst_offset, nbytes)
    if source < 0 or target < 0:
        return EINVAL
    qp = ld_fixed64(dma + DevDma.qp)
    index = _take_slot(qp)
    if index < 0:
        return index
    prepare_memcpy(
        qp, index, target, ld_fixed32(dst_buf + DevBuf.lkey), source, ld_fixed32(src_buf + DevBuf.lkey), nbytes,
        ld_fixed64(dma + DevDma.opaque_addr), ld_fixed32(dma + DevDma.opaque_lkey), _UNSIGNALLED,
    )
    status = mark_ready(qp, index, index, GPU)
    return index if status == OK else status


@device_function
def dma_commit(dma: DevDma) -> int:
    """Let the NIC execute all copies that were enqueued (`doca_gpu_dev_dma_commit`).

    Return the ticket of the last one, or a status. EINVAL: no copy was ever enqueued.
    """
    qp = ld_fixed64(dma + DevDma.qp)
    ready = ld_relaxed_gpu64(qp + READY)
    if ready == 0:
        return EINVAL
    if ready > ld_relaxed_gpu64(qp + PI):
        fence_acquire_gpu()
        signal_wqe(qp, ready - 1)
        status = submit(qp, ready)
        if status != OK:
            return status
    return ready - 1


@device_function
def dma_wait(dma: DevDma, ticket: int) -> int:
    """Wait until the copy of a ticket and all before it are committed and complete: OK, EIO or ETIMEDOUT.

    A negative ticket, which is a status, is returned unchanged. The deadline is that of the context.
    """
    if ticket < 0:
        return ticket
    return poll_at(ld_fixed64(dma + DevDma.qp), ticket)


@device_function
def dma_wait_all(dma: DevDma) -> int:
    """Wait until all copies committed so far are complete: OK, EIO or ETIMEDOUT."""
    qp = ld_fixed64(dma + DevDma.qp)
    committed = ld_relaxed_gpu64(qp + PI)
    return OK if committed == 0 else poll_at(qp, committed - 1)
