"""The RDMA library's strong and weak modes against the low-level put, from kernels: what an operation costs.

All three use queues of the same kind and size, in turns. The limit of each figure is the low-level one of the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gpunetio import Access, Gpu, MemType, kernel, verbs
from gpunetio import device as dev
from gpunetio.core import BufArray, MemoryMap
from gpunetio.rdma import Rdma

DEPTH, NBYTES = 1024, 64
BATCH = 64  # operations of a commit
GOALS = {("one operation", "strong"): "≥ 0.9", ("one operation", "weak"): "≥ strong"}


@kernel
def put_one(qp, raddr, rkey, laddr, lkey, count, times):
    """A put and its completion."""
    for i in range(count):
        start = dev.clock_ns()
        dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, NBYTES))
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def strong_one(rdma, rbuf, lbuf, count, times):
    """A strong write, its commit and its completion."""
    for i in range(count):
        start = dev.clock_ns()
        dev.rdma_write_strong(rdma, 0, dev.buf_get(rbuf, 0), 0, dev.buf_get(lbuf, 0), 0, NBYTES)
        dev.rdma_commit_strong(rdma, 0)
        dev.rdma_wait_all(rdma)
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def weak_one(rdma, rbuf, lbuf, count, times):
    """A weak write, its commit and its completion."""
    first, _ = dev.rdma_get_info(rdma, 0)
    for i in range(count):
        start = dev.clock_ns()
        dev.rdma_write_weak(rdma, 0, dev.buf_get(rbuf, 0), 0, dev.buf_get(lbuf, 0), 0, NBYTES, 0, 0, first + i)
        dev.rdma_commit_weak(rdma, 0, 1)
        dev.rdma_wait_all(rdma)
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def put_many(qp, raddr, rkey, laddr, lkey, count, times):
    """Puts of a thread that announces them together: the last one rings."""
    for i in range(count):
        start = dev.clock_ns()
        for _ in range(BATCH - 1):
            dev.put(qp, raddr, rkey, laddr, lkey, NBYTES, dev.GPU, dev.SKIP_DB_RINGING)
        dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, NBYTES))
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def strong_many(rdma, rbuf, lbuf, count, times):
    """Strong writes of a thread that commits them together."""
    for i in range(count):
        start = dev.clock_ns()
        for _ in range(BATCH):
            dev.rdma_write_strong(rdma, 0, dev.buf_get(rbuf, 0), 0, dev.buf_get(lbuf, 0), 0, NBYTES)
        dev.rdma_commit_strong(rdma, 0)
        dev.rdma_wait_all(rdma)
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def weak_many(rdma, rbuf, lbuf, count, times):
    """Weak writes of a thread that commits them together."""
    first, _ = dev.rdma_get_info(rdma, 0)
    for i in range(count):
        start = dev.clock_ns()
        for n in range(BATCH):
            position = first + i * BATCH + n
            dev.rdma_write_weak(rdma, 0, dev.buf_get(rbuf, 0), 0, dev.buf_get(lbuf, 0), 0, NBYTES, 0, 0, position)
        dev.rdma_commit_weak(rdma, 0, BATCH)
        dev.rdma_wait_all(rdma)
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@dataclass
class Result:
    """What a mode costs: the median of the best round in ns, and the low-level put's divided by it."""

    case: str
    mode: str
    ns: float
    ratio: float
    goal: str


class Bench:
    """Two ends on one NIC: low-level queues, and connections of the library."""

    def __init__(self, stack: ExitStack, which: str):
        self.gpu = stack.enter_context(Gpu(which))
        pd = stack.enter_context(verbs.open("soft0")).create_pd()
        place = [stack.enter_context(MemoryMap(pd, self.gpu.alloc(4096, MemType.CPU_GPU))) for _ in range(2)]
        self.local, self.remote = place
        a, b = (stack.enter_context(self.gpu.create_qp(pd, DEPTH, cq_collapsed=True)) for _ in range(2))
        a.connect(b)
        self.qp = a
        options: dict[str, Any] = {"gpu": self.gpu, "permissions": Access.all(), "send_queue_size": DEPTH}
        self.rdma, peer = (stack.enter_context(Rdma(pd, **options)) for _ in range(2))
        (there, far), (here, near) = peer.export(), self.rdma.export()
        near.connect(there)
        far.connect(here)
        self.lbuf, self.rbuf = (stack.enter_context(BufArray(self.gpu, memory, 1, 4096)) for memory in place)

    def median(self, run: Any, low_level: bool, count: int) -> float:
        """The median of one operation or batch, in ns."""
        with self.gpu.alloc(8 * count, MemType.CPU_GPU) as times:
            remote, local = self.remote, self.local
            if low_level:
                arguments = (self.qp, remote.address, remote.rkey, local.address, local.lkey, count, times)
            else:
                arguments = (self.rdma, self.rbuf, self.lbuf, count, times)
            if not run[1, 1, self.gpu](*arguments).wait(60):
                raise SystemExit("a kernel did not end")
            return float(np.median(times.array.view(np.int64)))


CASES: dict[str, tuple[tuple[str, Any, bool], ...]] = {
    "one operation": (("put", put_one, True), ("strong", strong_one, False), ("weak", weak_one, False)),
    f"{BATCH} operations": (("put", put_many, True), ("strong", strong_many, False), ("weak", weak_many, False)),
}


def measure(which: str, rounds: int, count: int) -> list[Result]:
    """Run all modes in turns; the best round of each counts."""
    results: list[Result] = []
    with ExitStack() as stack:
        bench = Bench(stack, which)
        for case, modes in CASES.items():
            for _, run, low_level in modes:
                bench.median(run, low_level, 10)  # compiles
            best: dict[str, float] = {}
            for _ in range(rounds):
                for mode, run, low_level in modes:
                    best[mode] = min(best.get(mode, float("inf")), bench.median(run, low_level, count))
            results += [
                Result(case, mode, ns, best["put"] / ns, GOALS.get((case, mode), "")) for mode, ns in best.items()
            ]
    return results


def show(results: list[Result], printer: Callable[..., None]) -> None:
    table = Table("case", "mode", "ns", "put / this", "goal")
    for one in results:
        table.add_row(one.case, one.mode, f"{one.ns:.0f}", f"{one.ratio:.2f}", one.goal)
    printer(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="host", help="host, or a GPU as `Gpu` takes it")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each mode; the best counts")
    parser.add_argument("--count", type=int, default=2000, help="operations or batches in a turn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    results = measure(args.gpu, args.rounds, args.count)
    if args.json:
        print(json.dumps([asdict(one) for one in results], indent=2, ensure_ascii=False))
    else:
        show(results, Console().print)


if __name__ == "__main__":
    main()
