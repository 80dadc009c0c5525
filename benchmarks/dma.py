"""DMA from a kernel against the copies of the machine itself: memcpy on the host, cudaMemcpyAsync on a GPU.

A thread of a kernel enqueues copies of 1 MiB, commits them, and waits: one at a time, and 64 in flight. The limit
copies the same buffers, in turns. On the host it is memcpy by this process, while the software NIC's engine copies on
another core. On a GPU it is cudaMemcpyAsync on a stream, with one synchronization for each batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gpunetio import Gpu, GpuMemory, MemType, kernel, verbs
from gpunetio import device as dev
from gpunetio.core import BufArray, MemoryMap
from gpunetio.dma import Dma

MIB = 1 << 20
GOALS = {1: 0.7, 64: 0.9}  # by copies in flight: of the limit's rate
BUFS = 64  # of each memory
PATIENCE = 120.0
_Copy = Callable[[int, int], float]  # of copies in flight and of batches: seconds


@kernel
def copy_batches(dma, source, target, nbytes, in_flight, batches, out):
    """Enqueue, commit and wait for so many copies at a time. Write the ns that it took, or a negative status."""
    status = dev.OK
    start = dev.clock_ns()
    for batch in range(batches):
        for n in range(in_flight):
            i = (batch * in_flight + n) % BUFS
            status = min(status, dev.dma_memcpy(dma, dev.buf_get(source, i), 0, dev.buf_get(target, i), 0, nbytes))
        ticket = dev.dma_commit(dma)
        status = min(status, dev.dma_wait(dma, ticket))
    dev.st64(out, dev.clock_ns() - start if status >= 0 else status)


def by_the_nic(stack: ExitStack, gpu: Gpu, source: GpuMemory, target: GpuMemory) -> _Copy:
    """Return what copies by DMA from a kernel."""
    pd = stack.enter_context(verbs.open("soft0")).create_pd()
    arrays = [
        stack.enter_context(BufArray(gpu, stack.enter_context(MemoryMap(pd, memory)), BUFS, MIB))
        for memory in (source, target)
    ]
    dma, out = stack.enter_context(Dma(pd, gpu=gpu, depth=BUFS)), gpu.alloc(8, MemType.CPU_GPU)

    def copy(in_flight: int, batches: int) -> float:
        launch = copy_batches[1, 1, gpu](dma, *arrays, MIB, in_flight, batches, out)
        if not launch.wait(PATIENCE) or (ns := int(out.array.view(np.int64)[0])) < 0:
            raise SystemExit(f"a copy has failed: {dma.queue.last_error()}")
        return ns / 1e9

    copy(1, 1)  # compiles
    return copy


def by_memcpy(source: GpuMemory, target: GpuMemory) -> _Copy:
    """Return what copies by memcpy, which NumPy calls."""
    here, there = (memory.array.reshape(BUFS, MIB) for memory in (source, target))

    def copy(in_flight: int, batches: int) -> float:
        start = time.perf_counter()
        for n in range(batches * in_flight):
            there[n % BUFS] = here[n % BUFS]
        return time.perf_counter() - start

    return copy


def by_cuda(source: GpuMemory, target: GpuMemory) -> _Copy:
    """Return what copies by cudaMemcpyAsync."""
    from cuda.bindings import runtime

    _, stream = runtime.cudaStreamCreate()
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def copy(in_flight: int, batches: int) -> float:
        start = time.perf_counter()
        for n in range(batches * in_flight):
            at = n % BUFS * MIB
            runtime.cudaMemcpyAsync(target.device_address + at, source.device_address + at, MIB, kind, stream)
            if (n + 1) % in_flight == 0:
                runtime.cudaStreamSynchronize(stream)
        return time.perf_counter() - start

    return copy


def measure(which: str, way: tuple[MemType, MemType], rounds: int) -> list[dict[str, object]]:
    """Return a row for one copy at a time, and one for 64 in flight."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        gpu = stack.enter_context(Gpu(which))
        source, target = (stack.enter_context(gpu.alloc(BUFS * MIB, kind)) for kind in way)
        ours = by_the_nic(stack, gpu, source, target)
        theirs = by_cuda(source, target) if gpu.target == "cuda" else by_memcpy(source, target)
        for in_flight, goal in GOALS.items():
            batches = 256 // in_flight
            ours(in_flight, batches)
            theirs(in_flight, batches)
            rates = [[in_flight * batches * MIB / 1e9 / copy(in_flight, batches) for copy in (ours, theirs)]
                     for _ in range(rounds)]
            rows.append({
                "way": " → ".join("GPU" if kind is MemType.GPU and gpu.target == "cuda" else "host" for kind in way),
                "in_flight": in_flight, "gb_s": statistics.median(rate for rate, _ in rates),
                "limit_gb_s": statistics.median(rate for _, rate in rates),
                "ratio": statistics.median(rate / limit for rate, limit in rates), "goal": goal,
            })
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="host", help="where the kernel runs: host, or a GPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    host, far = MemType.CPU_GPU, MemType.GPU
    ways = [(host, host)] if args.gpu == "host" else [(host, far), (far, host), (far, far)]
    rows = [row for way in ways for row in measure(args.gpu, way, args.rounds)]
    if args.json:
        return print(json.dumps(rows, indent=2))
    table = Table(box=box.SIMPLE)
    for column in ("1 MiB copies", "in flight", "GB/s", "limit GB/s", "ratio", "goal"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    return print(f"medians of {args.rounds} rounds; the ratio is the median of the rounds' ratios")


if __name__ == "__main__":
    main()
