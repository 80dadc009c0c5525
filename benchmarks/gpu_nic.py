"""A NIC whose turns a GPU makes: latency of a put, rates of small writes, and bandwidth of large ones, on that GPU.

The limit beside a latency is a bare ping between two blocks, beside a bandwidth a copy kernel with as many blocks as
the NIC has workers, each in the same run. A worker takes one SM.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np
from gpu_path import ROW, percentiles, print_table, put_and_wait_exclusive, put_and_wait_shared, queue

from gpunetio import Gpu, PortConfig, kernel, verbs
from gpunetio import device as dev
from gpunetio.enums import Access
from gpunetio.jit.ops import copy, ld_relaxed64, on_host, st_release64
from gpunetio.nic.memory.copies import copy_part

DEPTH = 1024
AREA = 32 << 20  # bytes that a queue writes from and to, piece by piece
KIB, MIB = 1 << 10, 1 << 20
COPIERS = 512  # threads of a block of the copy kernel
RIGHTS = Access.all() | Access.RELAXED_ORDERING
SECONDS = 30


@kernel
def ping_pong(words, count, times):
    """Two blocks: one asks, one answers."""
    for i in range(count):
        if dev.block_idx() == 0:
            start = dev.clock_ns()
            st_release64(words, i + 1)
            while ld_relaxed64(words + 128) != i + 1:
                pass
            dev.st64(times + 8 * i, dev.clock_ns() - start)
        else:
            while ld_relaxed64(words) != i + 1:
                pass
            st_release64(words + 128, i + 1)


@kernel
def post_own(rows, nbytes, count, status):
    """Every warp of every block on a queue of its own, in warp scope; each lane from and to its own place."""
    qp, raddr, rkey, laddr, lkey = queue(rows + 8 * ROW * (dev.global_id() // dev.warp_size()))
    at = dev.lane_id() * nbytes
    ticket = 0
    for _ in range(count):
        ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.EXCLUSIVE, dev.DEFAULT, dev.WARP)
    dev.st64(status + 8 * dev.global_id(), dev.wait(qp, ticket, dev.EXCLUSIVE, dev.WARP))


@kernel
def put_signal_own(rows, nbytes, count, status):
    """One warp: puts with a signal each, in warp scope; each lane to its own place, and all signals to one word."""
    qp, raddr, rkey, laddr, lkey = queue(rows + 8 * ROW * (dev.global_id() // dev.warp_size()))
    at = dev.lane_id() * nbytes
    ticket = 0
    for _ in range(count):
        ticket = dev.put_signal(
            qp, raddr + at, rkey, laddr + at, lkey, nbytes, raddr + 4096, rkey, laddr + 4096, lkey, 1, dev.EXCLUSIVE,
            dev.DEFAULT, dev.WARP,
        )
    dev.st64(status + 8 * dev.global_id(), dev.wait(qp, ticket, dev.EXCLUSIVE, dev.WARP))


@kernel
def write_area(rows, nbytes, count, status):
    """A warp for each queue: writes through its area, again and again, a write for each lane at a time."""
    qp, raddr, rkey, laddr, lkey = queue(rows + 8 * ROW * dev.block_idx())
    ticket = 0
    for i in range(dev.lane_id(), count, dev.warp_size()):
        at = i * nbytes % AREA
        ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.EXCLUSIVE, dev.DEFAULT, dev.WARP)
    dev.st64(status + 8 * dev.global_id(), dev.wait(qp, ticket, dev.EXCLUSIVE, dev.WARP))


@kernel
def copy_area(target, source, nbytes, count):
    """The same by a block of threads for each queue."""
    area = dev.block_idx() * AREA
    for i in range(count):
        at = area + i * nbytes % AREA
        if on_host():
            copy(target + at, source + at, nbytes)
        else:
            copy_part(target + at, source + at, nbytes, dev.thread_idx() // 32, dev.block_dim() // 32)


class Bench:
    """A NIC with so many workers on the GPU, and memory for so many queues; what is written may be on another GPU."""

    def __init__(
        self, gpu: Gpu, stack: ExitStack, engine: str, workers: int, nbytes: int, other: Gpu | None = None,
        copiers: int = 0,
    ):
        self.gpu = gpu
        port = PortConfig(engine=engine, workers=workers, copiers=copiers)
        context = stack.enter_context(verbs.open("soft0", port=port))
        self.pd = context.create_pd()
        self.here, self.there = (stack.enter_context(each.alloc(nbytes)) for each in (gpu, other or gpu))
        self.local, self.remote = self.pd.register(self.here, RIGHTS), self.pd.register(self.there, RIGHTS)

    def launch(
        self, body: Any, out: Any, nbytes: int, count: int, grid: int = 1, block: int = 1, queues: int = 1,
        spacing: int = 8192, depth: int = DEPTH,
    ) -> float:
        """Seconds of one launch of a kernel with queues of its own."""
        with ExitStack() as stack, self.gpu.alloc(8 * ROW * queues) as rows:
            table = []
            for i in range(queues):
                a, b = (stack.enter_context(self.gpu.create_qp(self.pd, depth)) for _ in range(2))
                a.connect(b)
                at = i * spacing
                table.append([a.device_address, self.there.address + at, self.remote.rkey, self.here.address + at,
                              self.local.lkey])
            rows.write(np.array(table, np.int64))
            start = perf_counter()
            assert body[grid, block, self.gpu](rows, nbytes, count, out).wait(SECONDS), "the kernel did not end"
            return perf_counter() - start


def _latencies(gpu: Gpu, engine: str, out: Any, count: int, other: Gpu | None) -> list[dict[str, Any]]:
    rows = []
    with gpu.alloc(256) as words:
        assert ping_pong[2, 1, gpu](words, count, out).wait(SECONDS)
    limit = percentiles(out.read(0, 8 * count).view(np.int64))
    rows.append({"case": "a bare ping between two blocks", "unit": "µs", **limit})
    goals = (3.5, None) if other else (2.5, None)
    for body, goal in zip((put_and_wait_exclusive, put_and_wait_shared), goals, strict=True):
        with ExitStack() as stack:
            bench = Bench(gpu, stack, engine, 1, 1 << 16, other)
            tries = []
            for _ in range(3):
                bench.launch(body, out, 8, count)
                tries.append(percentiles(out.read(0, 8 * count).view(np.int64)))
            best = min(tries[1:], key=lambda each: each["median"])
        name = body.name.removeprefix("put_and_wait_")
        rows.append({"case": f"put + completion, 8 B, {name}", "unit": "µs", **best, "goal": goal,
                     "limit": limit["median"] / best["median"]})
    return rows


def _rate(
    gpu: Gpu, engine: str, out: Any, what: str, body: Any, workers: int, warps: int, grid: int, posts: int,
    goal: float | None, other: Gpu | None,
) -> dict[str, Any]:
    with ExitStack() as stack:
        bench = Bench(gpu, stack, engine, workers, 1 << 20, other)
        seconds = []
        for _ in range(3):
            seconds.append(bench.launch(body, out, 64, posts, grid, gpu.warp * warps // grid, warps))
            status = out.read(0, 8 * gpu.warp * warps).view(np.int64)
            assert not status.any(), status
    rates = sorted(gpu.warp * warps * posts / each / 1e6 for each in seconds[1:])
    return {"case": f"{what}, {warps} warps, {workers} SMs", "unit": "M/s", "min": rates[0], "median": rates[-1],
            "goal": goal}


def _bandwidth(
    gpu: Gpu, engine: str, out: Any, nbytes: int, workers: int, scale: float, other: Gpu | None, copiers: int = 0
) -> dict[str, Any]:
    sms = workers + copiers
    writes = max(64, int((4 << 30) * scale) // nbytes // 32 * 32)
    threads = COPIERS if gpu.target == "cuda" else 1
    with ExitStack() as stack:
        bench = Bench(gpu, stack, engine, workers, sms * AREA, other, copiers)
        moved, copied = [], []
        for _ in range(3):
            seconds = bench.launch(
                write_area, out, nbytes, writes, workers, gpu.warp, workers, spacing=AREA, depth=256
            )
            moved.append(workers * writes * nbytes / seconds / 1e9)
            start = perf_counter()
            assert copy_area[sms, threads, gpu](bench.there, bench.here, nbytes, writes).wait(SECONDS)
            copied.append(sms * writes * nbytes / (perf_counter() - start) / 1e9)
        status = out.read(0, 8 * gpu.warp * workers).view(np.int64)
        assert not status.any(), status
    name = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
    queues = ", 1 queue" if copiers else ""
    return {"case": f"writes of {name}, {sms} SMs{queues}", "unit": "GB/s", "min": min(moved[1:]),
            "median": max(moved[1:]), "goal": None, "limit": max(moved[1:]) / max(copied[1:])}


def run(gpu: Gpu, engine: str, scale: float, other: Gpu | None) -> list[dict[str, Any]]:
    """Every case, as rows of a table."""
    count, posts = max(1000, int(10_000 * scale)), int(16_000 * scale)
    with gpu.alloc(8 * max(count, 1024)) as out:
        rows = _latencies(gpu, engine, out, count, other)
        for workers, warps in ((1, 1), (1, 4), (4, 4), (4, 16), (8, 16)):
            goal = (10.0 if other else 30.0) if warps == 16 else None
            rows.append(_rate(gpu, engine, out, "writes of 64 B", post_own, workers, warps, warps, posts, goal, other))
        rows.append(_rate(gpu, engine, out, "put_signal", put_signal_own, 1, 1, 1, posts, 5.0, other))
        for nbytes in (8 * KIB, 64 * KIB, MIB):
            for workers, copiers in ((1, 0), (8, 0), (1, 7)):
                rows.append(_bandwidth(gpu, engine, out, nbytes, workers, scale, other, copiers))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="0", help="GPU to use; 'twin' tries the benchmark itself")
    parser.add_argument("--to", help="another GPU, to whose memory everything is written")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        other = stack.enter_context(Gpu(options.to)) if options.to else None
        gpu = stack.enter_context(Gpu(options.gpu))
        rows = run(gpu, gpu.backend.engine, options.scale, other)
        if options.json:
            print(json.dumps({"gpu": gpu.name, "rows": rows}))
            return
        print(f"GPU {gpu.name}{f', to GPU {other.name}' if other else ''}")
        print_table(rows, 40)


if __name__ == "__main__":
    main()
