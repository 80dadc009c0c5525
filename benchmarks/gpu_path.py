"""Kernels on a real GPU against the software NIC's CPU engine: latency of a put, rates of posting, and bandwidth.

The limit beside each latency is a bare doorbell → answer ping between the same GPU and a CPU thread, in the same run;
beside a bandwidth it is memcpy by as many threads. `goal` is what the project asks for on an H200, in the unit of the
row.
"""

from __future__ import annotations

import argparse
import json
import threading
from contextlib import ExitStack
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gpunetio import Gpu, MemType, device_function, kernel, verbs
from gpunetio import device as dev
from gpunetio.enums import NicHandler, QpSendDbrMode
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import clock_ns, copy, ld_relaxed64, st_mmio64, st_release64

DEPTH = 1024
WARM_UP = 500
ENGINES = 4  # NICs that the queues of the last case are spread over
SPACING = 4096  # bytes between the buffers of queues
ROW = 5  # words of a queue in a table: QP, raddr, rkey, laddr, lkey
MIB = 1 << 20
AREA = 16 * MIB  # that each NIC writes from and to, piece by piece
WRITES = 1024  # of 1 MiB by each NIC
RECORD: dict[str, Any] = {}  # options of queues
NO_RECORD = {"send_dbr_mode": QpSendDbrMode.NO_DBR_EXT}
PROXY = {"nic_handler": NicHandler.CPU_PROXY}


@device_function
def queue(row):
    """A queue of the table: QP, raddr, rkey, laddr, lkey."""
    return dev.ld64(row), dev.ld64(row + 8), dev.ld64(row + 16), dev.ld64(row + 24), dev.ld64(row + 32)


@kernel
def put_and_wait_exclusive(row, nbytes, count, times):
    qp, raddr, rkey, laddr, lkey = queue(row)
    for i in range(count):
        start = dev.clock_ns()
        dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE), dev.EXCLUSIVE)
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def put_and_wait_shared(row, nbytes, count, times):
    qp, raddr, rkey, laddr, lkey = queue(row)
    for i in range(count):
        start = dev.clock_ns()
        dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, nbytes))
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@kernel
def post_exclusive(row, nbytes, count, status):
    """One thread, a doorbell each."""
    qp, raddr, rkey, laddr, lkey = queue(row)
    ticket = 0
    for _ in range(count):
        ticket = dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE)
    dev.st64(status, dev.wait(qp, ticket, dev.EXCLUSIVE))


@kernel
def post_deferred(row, nbytes, count, status):
    """One thread, a doorbell for every 16th put."""
    qp, raddr, rkey, laddr, lkey = queue(row)
    ticket = 0
    for _ in range(count // 16):
        for _ in range(15):
            dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE, dev.SKIP_DB_RINGING)
        ticket = dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE)
    dev.st64(status, dev.wait(qp, ticket, dev.EXCLUSIVE))


@kernel
def post_batches(row, nbytes, count, status):
    """One thread, 64 slots and a doorbell at a time."""
    qp, raddr, rkey, laddr, lkey = queue(row)
    last = 0
    for _ in range(count // 64):
        first = dev.reserve(qp, 64, dev.EXCLUSIVE)
        for i in range(64):
            dev.prepare_write(qp, first + i, raddr, rkey, laddr, lkey, nbytes)
        last = dev.post(qp, first, first + 63, dev.EXCLUSIVE)
    dev.st64(status, dev.wait(qp, last, dev.EXCLUSIVE))


@kernel
def post_shared(row, nbytes, count, status):
    """Every thread on the one queue, in thread scope."""
    qp, raddr, rkey, laddr, lkey = queue(row)
    ticket = 0
    for _ in range(count):
        ticket = dev.put(qp, raddr, rkey, laddr, lkey, nbytes)
    dev.st64(status + 8 * dev.global_id(), dev.wait(qp, ticket))


@kernel
def post_warps(row, nbytes, count, status):
    """Every warp on the one queue, in warp scope."""
    qp, raddr, rkey, laddr, lkey = queue(row)
    ticket = 0
    for _ in range(count):
        ticket = dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.GPU, dev.DEFAULT, dev.WARP)
    dev.st64(status + 8 * dev.global_id(), dev.wait(qp, ticket, dev.GPU, dev.WARP))


@kernel
def post_warps_own(rows, nbytes, count, status):
    """Every warp on a queue of its own, in warp scope."""
    qp, raddr, rkey, laddr, lkey = queue(rows + 8 * ROW * (dev.global_id() // dev.warp_size()))
    ticket = 0
    for _ in range(count):
        ticket = dev.put(qp, raddr, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE, dev.DEFAULT, dev.WARP)
    dev.st64(status + 8 * dev.global_id(), dev.wait(qp, ticket, dev.EXCLUSIVE, dev.WARP))


@kernel
def write_area(rows, nbytes, count, status):
    """A block of one thread for each queue: writes through its area, again and again."""
    qp, raddr, rkey, laddr, lkey = queue(rows + 8 * ROW * dev.block_idx())
    ticket = 0
    for i in range(count):
        at = i * nbytes % AREA
        ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.EXCLUSIVE)
    dev.st64(status + 8 * dev.block_idx(), dev.wait(qp, ticket, dev.EXCLUSIVE))


@engine_function
def copy_area(target, source, nbytes, count):
    """Nanoseconds of the same by memcpy."""
    start = clock_ns()
    for i in range(count):
        at = i * nbytes % AREA
        copy(target + at, source + at, nbytes)
    return clock_ns() - start


@kernel
def ping(question, answer, count, times):
    for i in range(count):
        start = dev.clock_ns()
        dev.fence_release()
        st_mmio64(question, i + 1)
        while ld_relaxed64(answer) != i + 1:
            pass
        dev.st64(times + 8 * i, dev.clock_ns() - start)


@engine_function
def pong(question, answer, count):
    """The CPU's side of the bare ping."""
    for i in range(count):
        while ld_relaxed64(question) != i + 1:
            pass
        st_release64(answer, i + 1)


class Latency(NamedTuple):
    """A case whose kernel measures each operation; the goal is in µs."""

    name: str
    body: Any
    goal: float
    options: dict[str, Any] = RECORD


class Rate(NamedTuple):
    """A case that is timed as a whole: `posts` by each thread; the goal is in 10⁶ posts a second."""

    name: str
    body: Any
    grid: int
    block: int
    posts: int
    goal: float | None = None
    queues: int = 1
    options: dict[str, Any] = RECORD


LATENCIES = (
    Latency("put + completion, exclusive", put_and_wait_exclusive, 2.3),
    Latency("put + completion, GPU-shared", put_and_wait_shared, 3.0),
    Latency("put + completion, exclusive, no record", put_and_wait_exclusive, 2.6, NO_RECORD),
    Latency("put + completion, GPU-shared, no record", put_and_wait_shared, 3.0, NO_RECORD),
    Latency("put + completion, exclusive, CPU proxy", put_and_wait_exclusive, 3.2, PROXY),
)
BANDWIDTHS = {1: None, 2: 24.0, 4: 40.0}  # NICs, and GB/s of all
RATES = (
    Rate("posts, 1 thread, a doorbell each, record", post_exclusive, 1, 1, 64_000, 0.45),
    Rate("posts, 1 thread, a doorbell each, no record", post_exclusive, 1, 1, 64_000, 0.6, options=NO_RECORD),
    Rate("posts, 1 thread, a doorbell each, shared", post_shared, 1, 1, 64_000),
    Rate("posts, 1 thread, a doorbell per 16", post_deferred, 1, 1, 256_000, 4.0),
    Rate("posts, 1 thread, a doorbell per 64", post_batches, 1, 1, 640_000),
    Rate("posts, 32 threads of a warp, thread scope", post_shared, 1, 32, 40_000, 8.0),
    Rate("posts, warp scope, 1 warp, exclusive", post_warps_own, 1, 32, 64_000, 14.0),
    Rate("posts, warp scope, 1 warp, shared", post_warps, 1, 32, 64_000),
    Rate("posts, warp scope, 16 warps of a block", post_warps, 1, 512, 8_000, 50.0),
    Rate("posts, warp scope, 16 warps of 16 blocks", post_warps, 16, 32, 8_000),
    Rate("posts, 8 warps, a queue each, 4 engines", post_warps_own, 8, 32, 64_000, 80.0, queues=8),
)


class Bench:
    """NICs and memory that each can reach."""

    def __init__(self, gpu: Gpu, stack: ExitStack, nics: int, nbytes: int = 1 << 16, spacing: int = SPACING):
        self.gpu, self.spacing = gpu, spacing
        self.here, self.there = gpu.alloc(nbytes, MemType.CPU_GPU), gpu.alloc(nbytes, MemType.CPU_GPU)
        self.pds = [stack.enter_context(verbs.open(f"soft{i}")).create_pd() for i in range(nics)]
        self.keys = [(pd.register(self.here), pd.register(self.there)) for pd in self.pds]

    def launch(
        self, body: Any, out: Any, nbytes: int, count: int, grid: int = 1, block: int = 1, queues: int = 1,
        depth: int = DEPTH, **options: Any,
    ) -> float:
        """Seconds of one launch of a kernel with queues of its own."""
        with ExitStack() as stack, self.gpu.alloc(8 * ROW * queues) as rows:
            table, near = [], []
            for i in range(queues):
                pd, (here, there) = self.pds[i % len(self.pds)], self.keys[i % len(self.pds)]
                a, b = (stack.enter_context(self.gpu.create_qp(pd, depth, **options)) for _ in range(2))
                a.connect(b)
                near.append(a)
                at = i * self.spacing  # engines that write to one cache line would wait for each other
                table.append([a.device_address, self.there.address + at, there.rkey, self.here.address + at, here.lkey])
            rows.write(np.array(table, np.int64))
            start = perf_counter()
            ended = body[grid, block, self.gpu](rows, nbytes, count, out).wait(60)
            assert ended, [qp.indices() for qp in near]
            return perf_counter() - start


def percentiles(times: np.ndarray) -> dict[str, float]:
    sample = np.sort(times[WARM_UP:]) / 1000
    return {"min": float(sample[0]), "median": float(np.median(sample)), "p99": float(sample[int(len(sample) * 0.99)])}


def bare_ping(gpu: Gpu, count: int) -> dict[str, float]:
    """Doorbell → answer with nothing in between, in µs."""
    with gpu.alloc(128, MemType.CPU_GPU) as words, gpu.alloc(8 * count, MemType.GPU) as times:
        pong(words.device_address, words.device_address + 64, 0)
        cpu = threading.Thread(
            target=pong, args=(words.device_address, words.device_address + 64, count), daemon=True
        )
        cpu.start()
        assert ping[1, 1, gpu](words.device_address, words.device_address + 64, count, times).wait(60)
        return percentiles(times.read().view(np.int64))


def run(gpu: Gpu, scale: float) -> list[dict[str, Any]]:
    """Every case, as rows of a table."""
    rows: list[dict[str, Any]] = []
    count = int(10_000 * scale)
    limit = bare_ping(gpu, count)
    rows.append({"case": "bare doorbell → answer", "unit": "µs", **limit})
    with gpu.alloc(8 * max(count, 1024), MemType.GPU) as out:
        with ExitStack() as stack:
            bench = Bench(gpu, stack, 1)
            for case in LATENCIES:
                tries = []
                for _ in range(4):
                    bench.launch(case.body, out, 8, count, **case.options)
                    tries.append(percentiles(out.read(0, 8 * count).view(np.int64)))
                row = min(tries[1:], key=lambda each: each["median"])
                rows.append({
                    "case": case.name, "unit": "µs", **row, "limit": limit["median"] / row["median"], "goal": case.goal,
                })
            rows += [_rate(bench, case, out, scale) for case in RATES if case.queues == 1]
        with ExitStack() as stack:
            bench = Bench(gpu, stack, ENGINES)
            rows += [_rate(bench, case, out, scale) for case in RATES if case.queues > 1]
        for nics, goal in BANDWIDTHS.items():
            with ExitStack() as stack:
                rows.append(_bandwidth(Bench(gpu, stack, nics, nics * AREA, AREA), nics, goal, out, scale))
    return rows


def _bandwidth(bench: Bench, nics: int, goal: float | None, out: Any, scale: float) -> dict[str, Any]:
    writes = int(WRITES * scale)
    total = nics * writes * MIB / 1e9
    bench.here.array[:] = 1
    copy_area(bench.there.address, bench.here.address, MIB, 0)
    rates, limits = [], []
    for _ in range(4):
        rates.append(total / bench.launch(write_area, out, MIB, writes, nics, 1, nics, depth=16))
        threads = [
            threading.Thread(
                target=copy_area, args=(bench.there.address + at, bench.here.address + at, MIB, writes), daemon=True
            ) for at in range(0, nics * AREA, AREA)
        ]
        start = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        limits.append(total / (perf_counter() - start))
    rates, limit = sorted(rates[1:]), sorted(limits[1:])[1]
    for memory in (bench.here, bench.there):
        memory.close()
    return {
        "case": f"writes of 1 MiB, {nics} NIC{'s' * (nics > 1)}", "unit": "GB/s", "min": rates[0], "median": rates[1],
        "p99": rates[2], "goal": goal, "limit": rates[1] / limit,
    }


def _rate(bench: Bench, case: Rate, out: Any, scale: float) -> dict[str, Any]:
    posts = int(case.posts * scale) // 64 * 64
    on_gpu = bench.gpu.target == "cuda"
    grid, block = (case.grid, case.block) if on_gpu else (min(case.grid, case.queues), 1)
    threads = grid * block
    seconds = []
    for _ in range(4):
        seconds.append(bench.launch(case.body, out, 8, posts, grid, block, case.queues, **case.options))
        status = out.read(0, 8 * threads).view(np.int64)
        assert not status.any(), status
    rates = sorted(posts * threads / each / 1e6 for each in seconds[1:])
    return {"case": case.name, "unit": "M/s", "min": rates[0], "median": rates[1], "p99": rates[2], "goal": case.goal}


def print_table(rows: list[dict[str, Any]], width: int) -> None:
    """Print rows, the first column `width` wide."""
    print(f"{'case':<{width}}{'unit':>6}{'min':>9}{'median':>9}{'p99':>9}{'goal':>7}{'of the limit':>14}")
    for row in rows:
        cells = "".join(f"{row[k]:>9.2f}" if row.get(k) else f"{'':>9}" for k in ("min", "median", "p99"))
        cells += f"{row['goal']:>7.2f}" if row.get("goal") else f"{'':>7}"
        print(f"{row['case']:<{width}}{row['unit']:>6}{cells}" + (f"{row['limit']:>14.2f}" if "limit" in row else ""))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="auto", help="GPU to use; 'host' tries the benchmark itself")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with Gpu(options.gpu) as gpu:
        rows = run(gpu, options.scale)
        if options.json:
            print(json.dumps({"gpu": gpu.name, "rows": rows}))
            return
        print(f"GPU {gpu.name}; of rates and bandwidths: the worst, the middle and the best of three launches")
        print_table(rows, 46)


if __name__ == "__main__":
    main()
