"""The options of a benchmark, the list of benchmarks, and their defaults."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..enums import ExecScope, MemType, NicHandler, SendDbrModeExt
from ..errors import InvalidValueError, NotSupportedError
from ..nic.engine.port import PortConfig
from ..rendezvous.link import PORT

ALL_SIZES = tuple(1 << n for n in range(1, 24))
SIZES = (1, *(1 << n for n in range(6, 15)))
MORE_SIZES = (1, *(1 << n for n in range(6, 21)))
INLINE_SIZES = (1, 4, 8, 12, 16, 20, 24, 28, 30, 32)
MOST_INLINE = 32  # bytes that a completion can carry
ITERATIONS = 2048
DEPTH = 2048  # slots of a send queue
CUDA_THREADS = 512
# Settings that must be equal at both ends, and their options.
TERMS = {
    "sizes": "--size", "iterations": "--iters", "duration": "--duration", "qps": "--qp", "inline": "--inline",
}
HOST_THREADS = 8  # at most, because the engine needs a core
HOST_WARP = 2  # lanes of a warp of host threads that post together
TRACED = 1024  # operations of one size that all threads together record by default
MOST_TRACED = 1 << 20

_OPERATIONS = {"write_bw": "round of writes", "twosided_bw": "send"}
_ALONE = (ExecScope.THREAD,)
_ANY_SCOPE = (ExecScope.THREAD, ExecScope.WARP, ExecScope.BLOCK)


@dataclass(frozen=True)
class Benchmark:
    """One of the benchmarks.

    `latency`     one thread at each end, which answers; otherwise a bandwidth test
    `reads`       the remote end is the source of the data
    `counts`      words at the receiver count the messages
    `companion`   a companion of the queue counts them when they are complete
    `two_sided`   the receiver has a kernel that posts receives
    `scopes`      which threads can post together
    `handlers`    how doorbells can reach the NIC
    `collapsed`   the completion queue has one entry
    `slots`       slots of the send queue, or of the companion's, per operation
    `sizes`       message sizes measured by default
    """

    name: str
    title: str
    latency: bool = False
    reads: bool = False
    counts: bool = False
    companion: bool = False
    two_sided: bool = False
    scopes: tuple[ExecScope, ...] = _ANY_SCOPE
    handlers: tuple[NicHandler, ...] = (NicHandler.AUTO, NicHandler.CPU_PROXY, NicHandler.GPU_SM_DB)
    collapsed: bool = False
    slots: int = 1
    sizes: tuple[int, ...] = SIZES

    @property
    def operation(self) -> str:
        """Return the operation that its kernel performs."""
        return _OPERATIONS.get(self.name) or self.name.rpartition("_")[0]

    @property
    def answers(self) -> bool:
        """Return whether the server also has a kernel."""
        return self.latency or self.two_sided

    @property
    def marked(self) -> bool:
        """Return whether a message is recognized by its last byte."""
        return self.latency and not self.counts


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("put_bw", "GPUNetIO put BW test", sizes=MORE_SIZES),
        Benchmark("write_bw", "GPUNetIO RDMA write BW test", scopes=_ALONE, sizes=MORE_SIZES),
        Benchmark("get_bw", "GPUNetIO get BW test", reads=True),
        Benchmark("put_signal_bw", "GPUNetIO put-signal BW test", counts=True, slots=2),
        Benchmark("put_counter_bw", "GPUNetIO put-counter BW test", counts=True, companion=True, slots=2),
        Benchmark("twosided_bw", "GPUNetIO two-sided BW test", two_sided=True),
        Benchmark(
            "write_lat", "GPUNetIO write latency test", latency=True, scopes=_ALONE, collapsed=True,
            handlers=(NicHandler.AUTO, NicHandler.CPU_PROXY, NicHandler.GPU_SM_DB, NicHandler.GPU_SM_BF),
        ),
        Benchmark("put_signal_lat", "GPUNetIO put-signal latency test", latency=True, scopes=_ALONE, counts=True),
        Benchmark(
            "put_counter_lat", "GPUNetIO put-counter latency test", latency=True, scopes=_ALONE, counts=True,
            companion=True,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one run.

    `gpu` is the argument of `Gpu`; `threads` None depends on the target; `duration` is in seconds.

    `device` None is the first NIC that is not in use. `traced` operations per thread and size are recorded; 0 means as
    many as fit, None means none. With two processes, `server` is the address that the client connects to, `tcp_port` is
    where they meet, and `asked` names those of `TERMS` that the user chose: the other end decides the rest.
    """

    benchmark: Benchmark
    sizes: tuple[int, ...] = ()
    device: str | None = None
    nic_port: PortConfig | None = None
    gpu: str = "auto"
    queue_memory: str = "auto"
    payload_memory: MemType = MemType.CPU_GPU
    gid_index: int = 0
    nic_handler: NicHandler = NicHandler.AUTO
    send_dbr_mode: SendDbrModeExt = SendDbrModeExt.VALID_DBR
    scope: ExecScope = ExecScope.THREAD
    iterations: int = ITERATIONS
    duration: float | None = None
    qps: int = 1
    depth: int = DEPTH
    threads: int | None = None
    inline: bool = False
    payload: Path | None = None
    traced: int | None = None
    server: str | None = None
    tcp_port: int = PORT
    asked: frozenset[str] = frozenset()

    def kernel_threads(self, target: str) -> int:
        """Return the kernel threads of a launch at one end. Each queue pair has the same number of warps or blocks."""
        if self.benchmark.latency:
            return 1
        cores = len(os.sched_getaffinity(0))
        least = 1 if self.scope == ExecScope.THREAD else 2 * HOST_WARP
        wanted = self.threads or (CUDA_THREADS if target == "cuda" else max(least, min(cores - 1, HOST_THREADS)))
        unit = {
            ExecScope.THREAD: self.qps,
            ExecScope.WARP: self.warp(target) * (self.qps if self.benchmark.two_sided else math.lcm(2, self.qps)),
            ExecScope.BLOCK: self.blocks(wanted),
        }[self.scope]
        return -(-wanted // unit) * unit

    def blocks(self, threads: int) -> int:
        """Return the blocks of a launch at one end.

        Two blocks share the queues, unless the threads cannot be halved.
        """
        if self.benchmark.latency:
            return 1
        if self.benchmark.two_sided or self.benchmark.name == "write_bw":
            return self.qps
        if self.scope == ExecScope.BLOCK:
            return self.qps if self.qps > 1 else 2
        return 2 if threads % 2 == 0 else 1

    def warp(self, target: str) -> int:
        """Return the lanes of a warp."""
        if target == "cuda":
            return 32
        return HOST_WARP if self.scope == ExecScope.WARP else 1

    def together(self, target: str) -> int:
        """Return the number of threads that post with one reservation."""
        if self.scope == ExecScope.BLOCK:
            threads = self.kernel_threads(target)
            return threads // self.blocks(threads)
        return self.warp(target) if self.scope == ExecScope.WARP else 1

    def slots(self, target: str) -> int:
        """Return the slots of a send queue.

        A companion's queue must hold what all threads reserve before the first one posts.
        """
        if self.benchmark.companion and not self.benchmark.latency:
            return max(self.depth, self.benchmark.slots * self.kernel_threads(target))
        return self.depth

    def noting(self, threads: int) -> list[tuple[int, int]]:
        """Return block and thread of each thread that records its operations."""
        size = threads // self.blocks(threads)
        if self.benchmark.name == "write_bw":  # where a block's last thread posts for all
            return [(block, size - 1) for block in range(threads // size)]
        return [divmod(thread, size) for thread in range(threads)]

    def traced_of(self, threads: int) -> int:
        """Return how many operations each thread of `noting` records."""
        return self.traced or max(1, TRACED // len(self.noting(threads)))

    def check(self) -> None:
        """Raise InvalidValueError for options that a benchmark does not have."""
        benchmark = self.benchmark
        name = benchmark.name
        if self.nic_handler not in benchmark.handlers:
            raise NotSupportedError(
                f"-p {int(self.nic_handler)}: {name} has no NIC handler {self.nic_handler.name}, but "
                + ", ".join(f"{int(handler)} ({handler.name})" for handler in benchmark.handlers)
            )
        if self.scope not in benchmark.scopes:
            raise NotSupportedError(
                f"-e {int(self.scope)}: {name} has no execution scope {self.scope.name}: "
                + ("one thread posts at each end" if benchmark.latency else "a block's last thread submits for all")
            )
        if self.inline and (not benchmark.two_sided or max(self.sizes, default=0) > MOST_INLINE):
            raise InvalidValueError(
                f"--inline: a completion carries at most {MOST_INLINE} bytes, not {max(self.sizes)}"
                if benchmark.two_sided
                else f"--inline: {name} has no receives whose completions could carry data"
            )

    def check_threads(self, target: str) -> None:
        """Raise InvalidValueError for threads that cannot post together, or record too much, on a known target."""
        threads = self.kernel_threads(target)
        if not self.benchmark.latency and self.benchmark.name != "write_bw":
            self._check_together(target, threads)
        noting = len(self.noting(threads))
        if self.traced_of(threads) * noting > MOST_TRACED:
            raise InvalidValueError(
                f"--trace-ops {self.traced} of {noting} threads are too many: {MOST_TRACED} in all is the limit"
            )

    def _check_together(self, target: str, threads: int) -> None:
        blocks = self.blocks(threads)
        if threads // blocks > 1024:
            raise InvalidValueError(
                f"-e {int(self.scope)} with --qp {self.qps} takes {threads} threads in {blocks} blocks, and a block "
                "has 1024 at most: use fewer queue pairs"
            )
        needed = self.together(target) * self.benchmark.slots
        if needed > self.depth:
            raise InvalidValueError(
                f"-e {int(self.scope)}: {self.together(target)} threads post {needed} requests together, for which "
                f"--tx-depth {self.depth} is too small: give {needed} or more"
            )

    def check_receives(self, target: str, receives: int) -> None:
        """Raise InvalidValueError if the server posts too few receives for the threads that send together.

        `receives` is the size of its queue. It posts receives by halves: the next half when one half is full. So no
        half may wait for a message that needs the other half.
        """
        together = self.together(target)
        if together > max(1, receives // 2):
            raise InvalidValueError(
                f"-e {int(self.scope)}: {together} threads send together, into the server's receive queue of "
                f"{receives} slots, of which half are posted at a time: give the server --tx-depth {2 * together} "
                "or more"
            )
