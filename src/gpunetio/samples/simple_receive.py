"""simple_receive: a kernel receives UDP packets until Ctrl+C.

    1. resources    device, GPU, a cyclic receive queue of 16384 packets of 2048 bytes
    2. steering     a flow rule leads UDP over IPv4 to the queue
    3. data path    one block of 32 threads: receive a burst, let each thread read its share of the packets, repeat
    4. end          Ctrl+C sets a word that the kernel checks after each burst
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from .. import device as dev
from ..device import kernel
from ..enums import ExecScope, MemType
from ..eth import CyclicRxq
from ..flow import FlowPort, match
from ..formats.layout import Entry
from ..gpu import Gpu
from ..nic.engine.port import PortConfig
from ..verbs import open as open_device
from .until_stopped import StopWord, failure

PACKETS, PACKET_BYTES = 16384, 2048
THREADS = 32
BURST = 2048  # packets
PATIENCE_NS = 500_000  # for a burst

_log = logging.getLogger(__name__)

# The kernel's report. Only thread 0 writes it.
OUT = Entry("simple_receive_out", 24, """
    packets  0  i64
    nbytes   8  i64
    status  16  i64
""")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """`gpu` and `device` name the GPU and the NIC; `scope` says which threads receive together."""

    gpu: str
    device: str
    nic_port: PortConfig | None = None
    scope: ExecScope = ExecScope.BLOCK


# --- the kernel ------------------------------------------------------------------------------------------------------


@kernel
def receive(rxq: dev.EthRxq, scope: int, attrs: int, sums: int, stop: int, out: int) -> None:
    """Receive bursts until the word at `stop` is not 0. `attrs` has room for a burst, `sums` for one word per thread.
    """
    thread = dev.thread_idx()
    packets = 0
    nbytes = 0
    received = 0
    while received >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        if scope != dev.THREAD:
            received = dev.rxq_recv(rxq, BURST, PATIENCE_NS, attrs, scope)
        elif thread == 0:
            received = dev.rxq_recv(rxq, BURST, PATIENCE_NS, attrs)
        received = dev.block_broadcast(received, 0)
        own = 0
        for i in range(thread, received, dev.block_dim()):  # a real program would read the packets here
            own += dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
        dev.st64(sums + 8 * thread, own)
        dev.block_sync()
        if thread == 0 and received > 0:
            packets += received
            for i in range(dev.block_dim()):
                nbytes += dev.ld64(sums + 8 * i)
            dev.st64(out + OUT.packets, packets)
            dev.st64(out + OUT.nbytes, nbytes)
    if thread == 0:
        dev.st64(out + OUT.status, min(received, 0))


# --- the host --------------------------------------------------------------------------------------------------------


def run(options: SampleOptions) -> int:
    """Receive until Ctrl+C or SIGTERM. Return the number of packets."""
    _log.info("Starting the sample")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        gpu = stack.enter_context(Gpu(options.gpu, warp=THREADS))
        rxq = stack.enter_context(CyclicRxq(gpu, ctx.create_pd(), PACKETS, PACKET_BYTES, queue_id=0))
        attrs, sums = gpu.alloc(BURST * dev.ATTR_BYTES), gpu.alloc(8 * THREADS)
        stop, out = StopWord(gpu), gpu.alloc(OUT.size, MemType.CPU_GPU)
        port = stack.enter_context(FlowPort(ctx))
        port.steer(match.ipv4() & match.udp(), to=rxq)
        launch = receive[1, THREADS, gpu](rxq, int(options.scope), attrs, sums, stop.memory, out)
        _log.info("Receiving. Ctrl+C ends the sample")
        stop.follow(launch)
        row = OUT.at(out.array)
        packets, status = int(row["packets"]), int(row["status"])
        if status < 0:
            raise failure(status, rxq.last_error())
    _log.debug("%d bytes", row["nbytes"])
    _log.info("Exiting from simple receive sample. Total number of received packets: %d", packets)
    _log.info("Sample finished successfully")
    return packets
