"""Two processes, each with a NIC on a GPU of its own: latency, rates and bandwidth of requests from one to the other.

The limits are measured in the same run: beside a latency a bare ping between two blocks of the first GPU, beside a
bandwidth a kernel of the first process that copies to the second GPU with as many blocks. A NIC has one worker here,
which takes one SM, and perhaps SMs that only copy.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gpu_nic import (
    AREA,
    COPIERS,
    DEPTH,
    KIB,
    MIB,
    RIGHTS,
    SECONDS,
    copy_area,
    ping_pong,
    post_own,
    put_signal_own,
    write_area,
)
from gpu_path import ROW, percentiles, print_table, put_and_wait_exclusive, put_and_wait_shared, queue

from gpunetio import Gpu, PortConfig, kernel, verbs
from gpunetio import device as dev

ADDRESSES = ("127.0.8.1", "127.0.8.2")
PATIENCE = 60.0  # seconds for the other process


@kernel
def bounce(rows, answers, count, times):
    """Write a number into a word of the other end, and wait until it writes the same here; or the other way round."""
    qp, raddr, rkey, word, _ = queue(rows)
    ticket = 0
    for i in range(1, count + 1):
        start = dev.clock_ns()
        if answers:
            dev.wait_word(qp, word, i)
        ticket = dev.p(qp, raddr, rkey, i, 8, dev.EXCLUSIVE)
        if not answers:
            dev.wait_word(qp, word, i)
            dev.st64(times + 8 * (i - 1), (dev.clock_ns() - start) >> 1)
    dev.wait(qp, ticket, dev.EXCLUSIVE)


class End:
    """A NIC on a GPU, with memory and queues."""

    def __init__(self, gpu: Gpu, stack: ExitStack, rank: int, copiers: int, nbytes: int):
        self.gpu = gpu
        port = PortConfig(engine=gpu.backend.engine, workers=1, copiers=copiers, addresses=(ADDRESSES[rank],))
        self.context = stack.enter_context(verbs.open(f"soft{rank}", port=port))
        self.pd = self.context.create_pd()
        self.memory = stack.enter_context(gpu.alloc(nbytes))
        self.region = self.pd.register(self.memory, RIGHTS)
        self.queues: list[Any] = []

    def create(self, count: int, depth: int) -> list[verbs.QpEndpoint]:
        """Create queues, and return what the other end must know of them."""
        self.queues = [self.gpu.create_qp(self.pd, depth) for _ in range(count)]
        return [each.qp.endpoint() for each in self.queues]

    def connect(self, endpoints: list[verbs.QpEndpoint]) -> None:
        """Connect the queues."""
        for ours, theirs in zip(self.queues, endpoints, strict=True):
            ours.connect(theirs)

    def await_reach(self) -> None:
        """Wait until requests of all queues need no packets."""
        nic = self.context.provider.nic  # type: ignore[attr-defined]
        end = time.monotonic() + PATIENCE
        while not all(nic.qps[each.qpn]["peer_keys"] for each in self.queues):
            assert time.monotonic() < end, "the NICs do not reach each other's memory"
            time.sleep(0.001)

    def close(self) -> None:
        """Close the queues."""
        for each in self.queues:
            each.close()
        self.queues = []

    def rows(self, address: int, rkey: int, spacing: int) -> np.ndarray:
        """Return what kernels need: the queues, and where they write to and from."""
        return np.array(
            [[each.device_address, address + i * spacing, rkey, self.memory.address + i * spacing, self.region.lkey]
             for i, each in enumerate(self.queues)], np.int64,
        )


def serve(pipe: Connection, place: str) -> None:
    """Be the other process: do what the first one asks for."""
    with Gpu(place) as gpu, ExitStack() as last:
        stack, end, running = ExitStack(), None, None
        last.callback(lambda: stack.close())
        while (request := pipe.recv()) is not None:
            what, *arguments = request
            answer: Any = None
            if what == "open":
                end = End(gpu, stack, 1, *arguments)
                answer = end.memory.address, end.region.rkey
            assert end is not None
            if what == "create":
                answer = end.create(*arguments)
            elif what == "connect":
                end.connect(*arguments)
                end.await_reach()
            elif what == "bounce":
                address, rkey, count = arguments
                rows = stack.enter_context(gpu.alloc(8 * ROW))
                rows.write(end.rows(address, rkey, 0))
                end.memory.write(np.zeros(8, np.uint8))
                running = bounce[1, 1, gpu](rows, 1, count, rows)
            elif what == "end":
                assert running is None or running.wait(SECONDS), "the kernel did not end"
                end.close()
                running = None
            elif what == "close":
                stack.close()
                stack, end = ExitStack(), None
            pipe.send(answer)


class Pair:
    """Both ends. The far one is in another process, which `pipe` leads to."""

    def __init__(self, gpu: Gpu, stack: ExitStack, pipe: Connection, copiers: int, nbytes: int):
        self.gpu, self._pipe = gpu, pipe
        self.far = self._ask("open", copiers, nbytes)
        stack.callback(self._ask, "close")
        self.end = End(gpu, stack, 0, copiers, nbytes)

    def _ask(self, *request: object) -> Any:
        self._pipe.send(request)
        return self._answer(request[0])

    def _answer(self, to: object) -> Any:
        assert self._pipe.poll(PATIENCE), f"the other process does not answer to {to}"
        return self._pipe.recv()

    def launch(
        self, body: Any, out: Any, argument: int, count: int, grid: int = 1, block: int = 1, queues: int = 1,
        spacing: int = 8192, depth: int = DEPTH, bounces: bool = False,
    ) -> float:
        """Seconds of one launch of a kernel with queues of its own."""
        theirs = self._ask("create", queues, depth)
        self._pipe.send(("connect", self.end.create(queues, depth)))  # each end waits until it knows of the other
        self.end.connect(theirs)
        self.end.await_reach()
        self._answer("connect")
        with self.gpu.alloc(8 * ROW * queues) as rows:
            rows.write(self.end.rows(*self.far, spacing))
            if bounces:
                self.end.memory.write(np.zeros(8, np.uint8))
                self._ask("bounce", self.end.memory.address, self.end.region.rkey, count)
            start = time.perf_counter()
            assert body[grid, block, self.gpu](rows, argument, count, out).wait(SECONDS), "the kernel did not end"
            seconds = time.perf_counter() - start
        self._ask("end")
        self.end.close()
        return seconds


def _latencies(gpu: Gpu, pipe: Connection, out: Any, count: int) -> list[dict[str, Any]]:
    with gpu.alloc(256) as words:
        assert ping_pong[2, 1, gpu](words, count, out).wait(SECONDS)
    limit = percentiles(out.read(0, 8 * count).view(np.int64))
    rows: list[dict[str, Any]] = [{"case": "a bare ping between two blocks of a GPU", "unit": "µs", **limit}]
    cases = (
        ("put + completion, 8 B, exclusive", put_and_wait_exclusive, 8, False, 3.5),
        ("put + completion, 8 B, shared", put_and_wait_shared, 8, False, None),
        ("ping-pong of 8 B, half a round trip", bounce, 0, True, 3.0),
    )
    with ExitStack() as stack:
        pair = Pair(gpu, stack, pipe, 0, 1 << 16)
        for name, body, argument, bounces, goal in cases:
            tries = []
            for _ in range(3):
                pair.launch(body, out, argument, count, bounces=bounces)
                tries.append(percentiles(out.read(0, 8 * count).view(np.int64)))
            best = min(tries[1:], key=lambda each: each["median"])
            rows.append({"case": name, "unit": "µs", **best, "goal": goal, "limit": limit["median"] / best["median"]})
    return rows


def _rate(gpu: Gpu, pipe: Connection, out: Any, what: str, body: Any, warps: int, posts: int) -> dict[str, Any]:
    with ExitStack() as stack:
        pair = Pair(gpu, stack, pipe, 0, 1 << 20)
        seconds = [pair.launch(body, out, 64, posts, warps, gpu.warp, warps) for _ in range(3)]
    rates = sorted(gpu.warp * warps * posts / each / 1e6 for each in seconds[1:])
    goal = {("writes of 64 B", 16): 10.0, ("put_signal", 1): 5.0}.get((what, warps))
    return {"case": f"{what}, {warps} warps", "unit": "M/s", "min": rates[0], "median": rates[-1], "goal": goal}


def _bandwidth(
    gpu: Gpu, far: Gpu, pipe: Connection, out: Any, nbytes: int, copiers: int, scale: float
) -> dict[str, Any]:
    writes, sms = max(64, int((4 << 30) * scale) // nbytes // 32 * 32), 1 + copiers
    threads = COPIERS if gpu.target == "cuda" else 1
    with ExitStack() as stack:
        here, there = (stack.enter_context(each.alloc(sms * AREA)) for each in (gpu, far))
        copied = []
        for _ in range(3):
            start = time.perf_counter()
            assert copy_area[sms, threads, gpu](there, here, nbytes, writes).wait(SECONDS)
            copied.append(sms * writes * nbytes / (time.perf_counter() - start) / 1e9)
    with ExitStack() as stack:
        pair = Pair(gpu, stack, pipe, copiers, AREA)
        moved = []
        for _ in range(3):
            seconds = pair.launch(write_area, out, nbytes, writes, 1, gpu.warp, depth=256)
            moved.append(writes * nbytes / seconds / 1e9)
    name = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
    goal = {(64 * KIB, 7): 200.0, (MIB, 7): 310.0, (8 * KIB, 7): 60.0}.get((nbytes, copiers))
    return {"case": f"writes of {name}, {sms} SMs", "unit": "GB/s", "min": min(moved[1:]), "median": max(moved[1:]),
            "goal": goal, "limit": max(moved[1:]) / max(copied[1:])}


def run(gpu: Gpu, far: Gpu, pipe: Connection, scale: float) -> list[dict[str, Any]]:
    """Every case, as rows of a table."""
    count, posts = max(1000, int(10_000 * scale)), max(32, int(16_000 * scale))
    with gpu.alloc(8 * max(count, 1024)) as out:
        rows = _latencies(gpu, pipe, out, count)
        for warps in (1, 16):
            rows.append(_rate(gpu, pipe, out, "writes of 64 B", post_own, warps, posts))
        rows.append(_rate(gpu, pipe, out, "put_signal", put_signal_own, 1, posts))
        for nbytes in (8 * KIB, 64 * KIB, MIB):
            for copiers in (0, 7) if gpu.target == "cuda" else (0,):
                rows.append(_bandwidth(gpu, far, pipe, out, nbytes, copiers, scale))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="0", help="GPU of the first process; 'twin' tries the benchmark itself")
    parser.add_argument("--to", default="1", help="GPU of the other process")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, options.to), daemon=True)
    process.start()
    try:
        with Gpu(options.to) as far, Gpu(options.gpu) as gpu:
            rows = run(gpu, far, pipe, options.scale)
            name, to = gpu.name, far.name
        pipe.send(None)
        process.join(PATIENCE)
    finally:
        process.kill()
    if options.json:
        print(json.dumps({"gpu": name, "to": to, "rows": rows}))
        return
    print(f"GPU {name}, to GPU {to} of another process")
    print_table(rows, 44)


if __name__ == "__main__":
    main()
