"""What a benchmark is asked to do, which benchmarks there are, and the defaults of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..nic.port import PortConfig
from .exchange import PORT

ALL_SIZES = tuple(1 << n for n in range(1, 24))
BW_SIZES = (1, *(1 << n for n in range(6, 21)))
LAT_SIZES = (1, *(1 << n for n in range(6, 15)))
ITERATIONS = 2048
DEPTH = 1024  # slots of a send queue
CUDA_THREADS = 512
# What both ends must share, and how it is asked for.
TERMS = {"sizes": "--size", "iterations": "--iters", "duration": "--duration", "qps": "--qp"}
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
    """One run. `gpu` is what `Gpu` takes; `threads` None means what suits the target; `duration` is in seconds.

    `device` None is the first NIC that nobody uses. With two processes, `server` is the address that the client calls,
    `tcp_port` is where they meet, and `asked` names those of `TERMS` that the user chose: what one end leaves open, the
    other decides.
    """

    benchmark: Benchmark
    sizes: tuple[int, ...] = ()
    device: str | None = None
    nic_port: PortConfig | None = None
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
    server: str | None = None
    tcp_port: int = PORT
    asked: frozenset[str] = frozenset()

    def kernel_threads(self, target: str) -> int:
        """Kernel threads of a launch, at least one for each queue pair and a multiple of their number."""
        if self.benchmark.latency:
            return 1
        cores = len(os.sched_getaffinity(0))
        wanted = self.threads or (CUDA_THREADS if target == "cuda" else max(1, min(cores - 1, HOST_THREADS)))
        return -(-wanted // self.qps) * self.qps
