"""send_wait_time: bursts of packets leave at times that were fixed in advance, because the NIC itself waits for them.

    1. resources    device, GPU, a send queue, 8 bursts of 32 packets of 1024 bytes
    2. times        the first burst is due 50 ms from now, each further one --time after the one before it
    3. data path    for each burst, the kernel posts a WAIT for its time and then the packets, and takes the completion
                    of the last packet
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .. import device as dev
from ..device import kernel
from ..enums import MemType
from ..errors import NotSupportedError
from ..eth import EthTxq, WaitOnTime, query_caps
from ..gpu import Gpu
from ..nic.engine.port import PortConfig
from ..verbs import open as open_device
from .frames import frame
from .until_stopped import StopWord, failure

BURSTS, PACKETS, PACKET_BYTES = 8, 32, 1024
DEPTH = 8192  # basic blocks of the send queue
LEAD_NS = 50_000_000  # until the first burst
MOST_NS = 3_999_999_999  # between bursts: a time that is 4 s ahead or more counts as past
PATIENCE = 10.0  # seconds to wait for a packet to be sent, beyond its time
TEXT = "Sent from DOCA GPUNetIO {}"

_log = logging.getLogger(__name__)
_PACKETS, _STATUS, _WORDS = 0, 8, 16  # of the kernel's report


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """`interval_ns` is the time from one burst to the next."""

    gpu: str
    device: str
    interval_ns: int
    nic_port: PortConfig | None = None


@kernel
def send_bursts(
    txq: dev.EthTxq, packets: int, lkey: int, nbytes: int, times: int, bursts: int, stop: int, out: int
) -> None:
    """Send bursts of one packet per thread, which leave at the times in `times`."""
    thread, count = dev.thread_idx(), dev.block_dim()
    last = count - 1
    sent = 0
    status = dev.OK
    for burst in range(bursts):
        if dev.block_broadcast(dev.ld_relaxed64(stop), 0) != 0:
            break
        at = packets + (burst * count + thread) * nbytes
        due = dev.ld64(times + 8 * burst)
        ticket = dev.txq_wait_send(txq, due, at, lkey, nbytes, thread == last, dev.GPU, dev.DEFAULT, dev.BLOCK)
        status = min(ticket, 0)
        if thread == 0 and status >= 0:
            status = dev.txq_poll(txq, 1)
        status = dev.block_broadcast(status, 0)
        if status < 0:
            break
        sent += count
    if thread == 0:
        dev.st64(out + _PACKETS, sent)
        dev.st64(out + _STATUS, min(status, 0))


def run(options: SampleOptions) -> int:
    """Send all bursts. Return the number of packets."""
    _log.info("Starting the sample")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        supported = query_caps(ctx).wait_on_time
        _log.info("Wait on time supported mode: %s", supported.name.capitalize())
        if supported is WaitOnTime.NONE:
            raise NotSupportedError(
                f"{ctx} does not wait for a time. A card needs ACCURATE_TX_SCHEDULER=1 and REAL_TIME_CLOCK_ENABLE=1 in "
                "its settings (mlxconfig), and must be a ConnectX-7 or later"
            )
        gpu = stack.enter_context(Gpu(options.gpu, warp=PACKETS))
        pd = ctx.create_pd()
        interval = options.interval_ns / 1e9
        txq = stack.enter_context(
            EthTxq(gpu, pd, DEPTH, checksum=True, wait_on_time=True, timeout=interval + PATIENCE)
        )
        packets = gpu.alloc(BURSTS * PACKETS * PACKET_BYTES)
        packets.write(np.frombuffer(b"".join(_packets()), np.uint8))
        region = stack.enter_context(pd.register(packets))
        times = gpu.alloc(8 * BURSTS, MemType.CPU_GPU)
        stop, out = StopWord(gpu), gpu.alloc(_WORDS, MemType.CPU_GPU)
        arguments = (txq, packets, region.lkey, PACKET_BYTES, times)
        send_bursts[1, PACKETS, gpu](*arguments, 0, stop.memory, out).wait(PATIENCE)  # compiles now: times do not wait
        start = time.time_ns() + LEAD_NS
        due = [txq.calculate_timestamp(start + i * options.interval_ns) for i in range(BURSTS)]
        times.array.view(np.int64)[:] = due
        seconds = max(PATIENCE, (LEAD_NS / 1e9 + BURSTS * interval) + PATIENCE / 2)
        launch = send_bursts[1, PACKETS, gpu](*arguments, BURSTS, stop.memory, out)
        _log.info("Waiting %d sec for %d packets to be sent", seconds, BURSTS * PACKETS)
        stop.follow(launch, seconds)
        sent, status = out.array.view(np.int64).tolist()
        if status < 0:
            raise failure(status, txq.last_error())
    _log.info("Sent %d packets in %d bursts", sent, sent // PACKETS)
    _log.info("Sample finished successfully")
    return int(sent)


def _packets() -> list[bytes]:
    texts = (TEXT.format(i).encode() for i in range(BURSTS * PACKETS))
    return [frame(PACKET_BYTES, text) for text in texts]
