"""simple_send: the threads of a kernel send packets until Ctrl+C, each its own packet again and again.

    1. resources    device, GPU, a send queue whose NIC computes checksums, a packet for each thread
    2. data path    without --shared-qp, one block: each thread builds the WQE of its packet, the last thread submits
                    all of them and waits for the completion. Threads of the host, which take turns on few cores, build
                    several before they wait for each other. With it, two blocks share the queue: `txq_send` reserves,
                    builds and submits for a thread, warp or block, and thread 0 of each block takes the completions
    3. end          Ctrl+C sets a word that the kernel checks in each round
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .. import device as dev
from ..device import kernel
from ..enums import ExecScope, MemType, NicHandler
from ..errors import InvalidValueError
from ..eth import EthTxq
from ..gpu import Gpu
from ..nic.engine.port import PortConfig
from ..verbs import open as open_device
from .frames import frame
from .until_stopped import StopWord, failure

DEPTH = 8192  # basic blocks of the send queue
HOST_ROUND = 1024  # packets that threads of the host send together
WARP = 32
MOST_THREADS = 1024  # of a block
BLOCKS = 2  # that share a queue

_log = logging.getLogger(__name__)
_PACKETS, _STATUS, _WORDS = 0, 8, 16  # of a block's report


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """`size` is the bytes of a packet, `threads` how many send. `scope`: who posts together, with `shared`."""

    gpu: str
    device: str
    size: int
    threads: int
    nic_port: PortConfig | None = None
    shared: bool = False
    scope: ExecScope = ExecScope.BLOCK
    proxy: bool = False
    original_frame: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Return the blocks, and the threads of each. InvalidValueError for a number of threads that does not fit."""
        blocks = BLOCKS if self.shared else 1
        least, most = blocks * WARP, blocks * MOST_THREADS
        if self.threads % least or not least <= self.threads <= most:
            how = "with" if self.shared else "without"
            raise InvalidValueError(
                f"--threads {self.threads}: {how} --shared-qp it must be a multiple of {least}, up to {most}"
            )
        return blocks, self.threads // blocks


# --- the kernels -----------------------------------------------------------------------------------------------------


@kernel
def send_alone(txq: dev.EthTxq, packets: int, lkey: int, nbytes: int, each: int, stop: int, out: int) -> None:
    """Send from the threads of one block, which does not share the queue, until the word at `stop` is not 0.

    In a round, a thread sends its packet `each` times.
    """
    thread, threads = dev.thread_idx(), dev.block_dim()
    last, count = threads - 1, threads * each
    sent = 0
    status = dev.OK
    while status >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        first = 0
        if thread == last:
            first = dev.txq_reserve(txq, count, dev.EXCLUSIVE)
        first = dev.block_broadcast(first, last)
        if first < 0:
            status = first
            break
        for i in range(thread, count, threads):
            dev.txq_prepare_send(txq, first + i, packets + thread * nbytes, lkey, nbytes, i == count - 1)
        dev.block_sync()
        if thread == last:
            status = dev.post(txq, first, first + count - 1, dev.EXCLUSIVE)
            if status >= 0:
                status = dev.txq_poll(txq, 1, dev.EXCLUSIVE)
        status = dev.block_broadcast(status, last)
        if status >= 0:
            sent += count
    if thread == last:
        dev.st64(out + _PACKETS, sent)
        dev.st64(out + _STATUS, min(status, 0))


@kernel
def send_shared(txq: dev.EthTxq, packets: int, lkey: int, nbytes: int, scope: int, stop: int, out: int) -> None:
    """Send from the threads of several blocks, which share the queue, until the word at `stop` is not 0."""
    thread, size = dev.thread_idx(), dev.block_dim()
    own = out + dev.block_idx() * _WORDS
    at = packets + dev.global_id() * nbytes
    group = size if scope == dev.BLOCK else dev.warp_size() if scope == dev.WARP else 1
    notify = thread % group == group - 1  # the last thread of each group
    sent = 0
    status = dev.OK
    while status >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        ticket = dev.txq_send(txq, at, lkey, nbytes, notify, dev.GPU, dev.DEFAULT, scope)
        if ticket < 0:
            dev.st64(own + _STATUS, ticket)
        dev.block_sync()
        if thread == 0:
            status = dev.ld64(own + _STATUS)
            if status >= 0:
                status = dev.txq_poll(txq, size // group, dev.GPU)
        status = dev.block_broadcast(status, 0)
        if status >= 0:
            sent += size
    if thread == 0:
        dev.st64(own + _PACKETS, sent)
        dev.st64(own + _STATUS, min(status, 0))


# --- the host --------------------------------------------------------------------------------------------------------


def run(options: SampleOptions) -> int:
    """Send until Ctrl+C or SIGTERM. Return the number of packets."""
    blocks, block = options.grid
    packet = frame(options.size, original=options.original_frame)
    _log.info("Starting the sample")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        gpu = stack.enter_context(Gpu(options.gpu, warp=WARP))
        pd = ctx.create_pd()
        handler = NicHandler.CPU_PROXY if options.proxy else NicHandler.AUTO
        txq = stack.enter_context(EthTxq(gpu, pd, DEPTH, checksum=True, nic_handler=handler))
        packets = gpu.alloc(options.threads * options.size)
        packets.write(np.frombuffer(packet * options.threads, np.uint8))
        region = stack.enter_context(pd.register(packets))
        stop, out = StopWord(gpu), gpu.alloc(blocks * _WORDS, MemType.CPU_GPU)
        what = (txq, packets, region.lkey, options.size)
        if options.shared:
            launch = send_shared[blocks, block, gpu](*what, int(options.scope), stop.memory, out)
        else:
            each = max(1, HOST_ROUND // block) if gpu.target == "cpu" else 1
            launch = send_alone[blocks, block, gpu](*what, each, stop.memory, out)
        if options.proxy:
            _log.info("Thread CPU proxy progress is running... 0")
        _log.info("Sending. Ctrl+C ends the sample")
        stop.follow(launch)
        reports = out.array.view(np.int64).reshape(blocks, -1)
        status = int(reports[:, 1].min())
        if status < 0:
            raise failure(status, txq.last_error())
        total = int(reports[:, 0].sum())
    _log.info("Exiting from simple send sample. Total number of sent packets: %d", total)
    _log.info("Sample finished successfully")
    return total
