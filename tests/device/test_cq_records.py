"""The consumer record of a completion queue that threads share."""

import numpy as np

from gpunetio import MemType, device, kernel
from gpunetio.formats.cqe import CI_MASK
from gpunetio.formats.device_structs import DEV_CQ
from gpunetio.jit import ops

RECORD, WRONG = 2048, 3072  # offsets


@kernel
def raise_together(cq, record, rounds, wrong):
    """In each round, all threads raise the consumer index and tell the NIC. The record then has to be the highest."""
    thread = device.thread_idx()
    threads = device.block_dim()
    count = 0
    for i in range(rounds):
        device.block_sync()
        for _ in range((7 * i + 3 * thread) & 31):
            ops.pause()
        ops.fetch_max_gpu64(cq + DEV_CQ.cqe_ci, threads * i + thread + 1)
        device.update_cq_record(cq)
        device.block_sync()
        if thread == 0:
            if ops.be32(ops.ld_relaxed32(record)) != (threads * (i + 1)) & CI_MASK:
                count += 1
    if thread == 0:
        ops.st64(wrong, count)


def test_the_record_of_a_shared_queue_is_the_newest(gpu):
    """x86 lets a load pass an earlier store: the record of an older index came last, and stayed."""
    with gpu.alloc(4096, MemType.CPU_GPU) as memory:
        words, at = memory.array.view(np.int64), memory.device_address
        words[DEV_CQ.dbrec // 8] = at + RECORD
        assert raise_together[1, 2, gpu](memory, at + RECORD, 200_000, at + WRONG).wait(100)
        assert words[WRONG // 8] == 0
