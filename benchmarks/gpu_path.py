"""Kernels on a real GPU against the software NIC's CPU engine: latency of a put, and rates of posting.

The limit beside each figure is a bare doorbell → answer ping between the same GPU and a CPU thread, in the same run.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable

import numpy as np

from gpunetio import Gpu, MemType, SharingMode, device, kernel, verbs
from gpunetio.device.compile import engine_function
from gpunetio.device.ops import fence_release_doorbell, ld_relaxed64, st_mmio64, st_release64

DEPTH = 1024
WARM_UP = 500


@kernel
def put_and_wait(qp, raddr, rkey, laddr, lkey, nbytes, count, sharing, times):
    for i in range(count):
        start = device.clock_ns()
        device.wait(qp, device.put(qp, raddr, rkey, laddr, lkey, nbytes, sharing), sharing)
        device.st64(times + 8 * i, device.clock_ns() - start)


@kernel
def put_and_wait_exclusive(qp, raddr, rkey, laddr, lkey, nbytes, count, sharing, times):
    """The same with a constant mode, which folds."""
    for i in range(count):
        start = device.clock_ns()
        ticket = device.put(qp, raddr, rkey, laddr, lkey, nbytes, device.EXCLUSIVE)
        device.wait(qp, ticket, device.EXCLUSIVE)
        device.st64(times + 8 * i, device.clock_ns() - start)


@kernel
def post_exclusive(qp, raddr, rkey, laddr, lkey, nbytes, count, sharing, status):
    ticket = 0
    for _ in range(count):
        ticket = device.put(qp, raddr, rkey, laddr, lkey, nbytes, device.EXCLUSIVE)
    device.st64(status, device.wait(qp, ticket, device.EXCLUSIVE))


@kernel
def post_shared(qp, raddr, rkey, laddr, lkey, nbytes, count, sharing, status):
    ticket = 0
    for _ in range(count):
        ticket = device.put(qp, raddr, rkey, laddr, lkey, nbytes)
    device.st64(status + 8 * device.global_id(), device.wait(qp, ticket))


@kernel
def post_batches(qp, raddr, rkey, laddr, lkey, nbytes, count, sharing, status):
    last = 0
    for _ in range(count // 64):
        first = device.reserve(qp, 64, device.EXCLUSIVE)
        for i in range(64):
            device.prepare_write(qp, first + i, raddr, rkey, laddr, lkey, nbytes)
        last = device.post(qp, first, first + 63, device.EXCLUSIVE)
    device.st64(status, device.wait(qp, last, device.EXCLUSIVE))


@kernel
def ping(question, answer, count, times):
    for i in range(count):
        start = device.clock_ns()
        fence_release_doorbell()
        st_mmio64(question, i + 1)
        while ld_relaxed64(answer) != i + 1:
            pass
        device.st64(times + 8 * i, device.clock_ns() - start)


@engine_function
def pong(question, answer, count):
    """The CPU's side of the bare ping."""
    for i in range(count):
        while ld_relaxed64(question) != i + 1:
            pass
        st_release64(answer, i + 1)


def _percentiles(times: np.ndarray) -> dict[str, float]:
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
        return _percentiles(times.read().view(np.int64))


def run(gpu: Gpu, scale: float) -> list[dict[str, object]]:
    """Every case, as rows of a table."""
    rows: list[dict[str, object]] = []
    count = int(10_000 * scale)
    limit = bare_ping(gpu, count)
    rows.append({"case": "bare doorbell → answer", "unit": "µs", **limit})
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        here, there = gpu.alloc(1 << 16, MemType.CPU_GPU), gpu.alloc(1 << 16, MemType.CPU_GPU)
        mine, theirs = pd.register(here), pd.register(there)

        def launch(body: Callable, out, n: int, nbytes: int, sharing: SharingMode, block: int = 1) -> float:
            from time import perf_counter

            with gpu.create_qp(pd, DEPTH) as a, gpu.create_qp(pd, DEPTH) as b:
                a.connect(b)
                start = perf_counter()
                args = (a, there.address, theirs.rkey, here.address, mine.lkey, nbytes, n, int(sharing), out)
                assert body[1, block, gpu](*args).wait(60), a.indices()
                return perf_counter() - start

        with gpu.alloc(8 * max(count, 64), MemType.GPU) as out:
            for name, body, sharing in (
                ("put + completion, exclusive", put_and_wait_exclusive, SharingMode.EXCLUSIVE),
                ("put + completion, mode as argument", put_and_wait, SharingMode.EXCLUSIVE),
                ("put + completion, GPU-shared", put_and_wait, SharingMode.GPU),
            ):
                for _ in range(2):
                    launch(body, out, count, 8, sharing)
                    row = _percentiles(out.read(0, 8 * count).view(np.int64))
                rows.append({"case": name, "unit": "µs", **row, "limit": limit["median"] / row["median"]})
            for name, body, block in (
                ("posts, 1 thread, a doorbell each, exclusive", post_exclusive, 1),
                ("posts, 1 thread, a doorbell each, shared", post_shared, 1),
                ("posts, 32 threads sharing", post_shared, 32),
                ("posts, 1 thread, a doorbell per 64", post_batches, 1),
            ):
                each = int(64_000 * scale) // block // 64 * 64
                launch(body, out, each, 8, SharingMode.GPU, block)
                seconds = min(launch(body, out, each, 8, SharingMode.GPU, block) for _ in range(3))
                status = out.read(0, 8 * block).view(np.int64)
                assert not status.any(), status
                rows.append({"case": name, "unit": "M/s", "median": each * block / seconds / 1e6})
    return rows


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
        print(f"{'case':<46}{'unit':>6}{'min':>9}{'median':>9}{'p99':>9}{'limit/median':>14}   on GPU {gpu.name}")
        for row in rows:
            cells = "".join(f"{row[k]:>9.2f}" if k in row else f"{'':>9}" for k in ("min", "median", "p99"))
            print(f"{row['case']:<46}{row['unit']:>6}{cells}" + (f"{row['limit']:>14.2f}" if "limit" in row else ""))


if __name__ == "__main__":
    main()
