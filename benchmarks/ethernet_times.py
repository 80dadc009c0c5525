"""How late packets leave that wait for a time: by the NIC's own timestamps of their completions."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
from ethernet_frames import packet_of
from ethernet_results import Result

from gpunetio import Gpu, MemType, eth, kernel
from gpunetio import device as dev
from gpunetio.verbs import open

PACKETS = 200  # of a round
LEAD, INTERVAL = 20_000_000, 1_000_000  # ns until the first packet is due, and from one to the next
NBYTES = 64
PATIENCE = 60.0  # seconds


@kernel
def send_at(txq, times, count, laddr, lkey, nbytes, out):
    """Send a packet at each of the times, and write the last status."""
    status = 0
    for i in range(count):
        status = min(status, dev.txq_wait_send(txq, dev.ld64(times + 8 * i), laddr, lkey, nbytes, 1, dev.EXCLUSIVE))
    dev.st64(out, status)


def nanoseconds(stamp: int) -> int:
    """Those of a real-time timestamp."""
    return (stamp >> 32) * 1_000_000_000 + (stamp & 0xFFFF_FFFF)


def lateness(rounds: int) -> list[Result]:
    """The 99th percentile of each round, in µs."""
    result = Result("send_wait_time, lateness, p99", "µs", "—", "p99 ≤ 20 µs, none early")
    earliest, middle = [], []
    with ExitStack() as undo:
        ctx, gpu = undo.enter_context(open("soft0")), undo.enter_context(Gpu("host"))
        pd = ctx.create_pd()
        txq = undo.enter_context(eth.EthTxq(gpu, pd, 4 * PACKETS, wait_on_time=True, completion_on_gpu=False))
        if not txq.caps.real_time_send:
            raise SystemExit(f"{ctx} has no real-time timestamps")
        memory, times = gpu.alloc(NBYTES, MemType.CPU_GPU), gpu.alloc(8 * PACKETS, MemType.CPU_GPU)
        region, out = undo.enter_context(pd.register(memory)), gpu.alloc(8, MemType.CPU_GPU)
        mac = ctx.provider.nic.mac  # type: ignore[attr-defined]
        memory.array[:] = np.frombuffer(packet_of(b"\x02" + bytes(5), mac, NBYTES), np.uint8)
        arguments = (memory, region.lkey, NBYTES, out)
        send_at[1, 1, gpu](txq, times, 0, *arguments).wait(PATIENCE)  # compiles
        for _ in range(rounds):
            start = time.time_ns() + LEAD
            due = [txq.calculate_timestamp(start + i * INTERVAL) for i in range(PACKETS)]
            times.array.view(np.int64)[:] = due
            launch = send_at[1, 1, gpu](txq, times, PACKETS, *arguments)
            stamps: list[int] = []
            while len(stamps) < PACKETS and (events := txq.wait_events(PATIENCE)):
                stamps += [event.timestamp for event in events if event.timestamp is not None]
            launch.wait(PATIENCE)
            if len(stamps) != PACKETS or out.array.view(np.int64)[0] < 0:
                raise SystemExit(f"{len(stamps)} of {PACKETS} packets were sent")
            late = [(nanoseconds(s) - nanoseconds(d)) / 1e3 for s, d in zip(stamps, due, strict=True)]
            result.ours.append(float(np.percentile(late, 99)))
            earliest.append(min(late))
            middle.append(float(np.median(late)))
    result.note = f"median {np.median(middle):.2f} µs; the earliest packet left {min(earliest):.2f} µs after its time"
    return [result]
