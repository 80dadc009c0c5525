"""What a benchmark is asked to do, which benchmarks there are, and the defaults of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ALL_SIZES = tuple(1 << n for n in range(1, 24))
BW_SIZES = (1, *(1 << n for n in range(6, 21)))
LAT_SIZES = (1, *(1 << n for n in range(6, 15)))
ITERATIONS = 2048
DEPTH = 1024  # slots of a send queue
CUDA_THREADS = 512
HOST_THREADS = 8  # at most: the engine needs a core too


@dataclass(frozen=True)
class Benchmark:
    """One of the benchmarks. `reads`: the remote end is the source of the data."""

    name: str
    title: str
    latency: bool = False
    reads: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Message sizes that are measured unless others are asked for."""
        return LAT_SIZES if self.latency else BW_SIZES


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("put_bw", "GPUNetIO put BW test"),
        Benchmark("write_bw", "GPUNetIO RDMA write BW test"),
        Benchmark("get_bw", "GPUNetIO get BW test", reads=True),
        Benchmark("write_lat", "GPUNetIO write latency test", latency=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. `gpu` is what `Gpu` takes; `threads` None means what suits the target; `duration` is in seconds."""

    benchmark: Benchmark
    sizes: tuple[int, ...] = ()
    device: str = "soft0"
    gpu: str = "auto"
    gid_index: int = 0
    nic_handler: int = 0
    no_dbr: bool = False
    iterations: int = ITERATIONS
    duration: float | None = None
    qps: int = 1
    depth: int = DEPTH
    threads: int | None = None
    payload: Path | None = None

    def kernel_threads(self, target: str) -> int:
        """Kernel threads of a launch, at least one for each queue pair and a multiple of their number."""
        if self.benchmark.latency:
            return 1
        cores = len(os.sched_getaffinity(0))
        wanted = self.threads or (CUDA_THREADS if target == "cuda" else max(1, min(cores - 1, HOST_THREADS)))
        return -(-wanted // self.qps) * self.qps
