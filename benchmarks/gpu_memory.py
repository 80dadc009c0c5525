"""Payload in GPU memory with the software NIC's CPU engine: WRITEs inside one process against cudaMemcpyAsync.

Both move the same bytes between the same memories in batches of the same size, in turns; the ratio is that of the
medians. With CUDA only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gpunetio import Gpu, MemType, verbs
from gpunetio.enums import WcStatus, WrOpcode
from gpunetio.errors import DocaError
from gpunetio.verbs import SendWr, Sge

MIB = 1 << 20
GOAL = 0.7
DIRECTIONS = (  # from, to, whether there is a goal
    ("GPU", "pinned", True), ("pinned", "GPU", True), ("GPU", "GPU", False), ("GPU", "pageable", False),
    ("pageable", "GPU", False),
)
TIMEOUT = 30.0  # seconds for a batch


def make(gpu: Gpu, place: str, nbytes: int) -> tuple[Any, int]:
    """Memory of one kind, and its address."""
    if place == "pageable":
        array = np.ones(nbytes, np.uint8)
        return array, int(array.ctypes.data)
    memory = gpu.alloc(nbytes, MemType.GPU if place == "GPU" else MemType.CPU_GPU)
    return memory, memory.address


def seconds(action: Callable[..., None], *args: Any) -> float:
    """How long it takes."""
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


class Copies:
    """cudaMemcpyAsync on a stream of its own."""

    def __init__(self):
        from cuda.bindings import runtime  # type: ignore[attr-defined]

        self._runtime = runtime
        self._stream = self._check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))

    def batch(self, target: int, source: int, nbytes: int, slots: int, count: int) -> None:
        """`count` copies, and wait for all."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        for i in range(count):
            at = i % slots * nbytes
            self._check(self._runtime.cudaMemcpyAsync(target + at, source + at, nbytes, kind, self._stream))
        self._check(self._runtime.cudaStreamSynchronize(self._stream))

    @staticmethod
    def _check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"CUDA error {result[0]}")
        return result[1] if len(result) > 1 else None


class Writes:
    """RDMA WRITEs between two queue pairs of one software NIC."""

    def __init__(self, pd: verbs.PD, count: int):
        depth = 1 << (count - 1).bit_length()
        self._cq = pd.ctx.create_cq(2 * depth)
        self._a, b = (pd.create_qp(sq_wr=depth, send_cq=self._cq, receive_cq=self._cq) for _ in range(2))
        self._a.connect(b)

    def batch(self, target: verbs.MR, source: verbs.MR, nbytes: int, slots: int, count: int) -> None:
        """`count` WRITEs, and a completion for each."""
        wrs = []
        for i in range(count):
            at = i % slots * nbytes
            entry = Sge(source.address + at, nbytes, source.lkey)
            place = target.address + at
            wrs.append(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[entry], remote_addr=place, rkey=target.rkey))
        self._a.post_send(*wrs)
        end, left = time.monotonic() + TIMEOUT, count
        while left:
            for done in self._cq.poll(left):
                if done.status is not WcStatus.SUCCESS:
                    raise RuntimeError(f"a WRITE failed: {done}")
                left -= 1
            if time.monotonic() > end:
                raise TimeoutError(f"{left} of {count} WRITEs have not completed after {TIMEOUT:g} s")


def run(gpu: Gpu, nbytes: int, count: int, rounds: int) -> list[dict[str, Any]]:
    """Every direction, as rows of a table."""
    rows = []
    slots = min(count, 16)
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        copies, writes = Copies(), Writes(pd, count)
        for source, target, has_goal in DIRECTIONS:
            (here, from_), (there, to) = make(gpu, source, slots * nbytes), make(gpu, target, slots * nbytes)
            mine, theirs = pd.register(here), pd.register(there)
            times: tuple[list[float], list[float]] = ([], [])
            for i in range(rounds + 1):
                ours = seconds(writes.batch, theirs, mine, nbytes, slots, count)
                limit = seconds(copies.batch, to, from_, nbytes, slots, count)
                if i:  # the first does not count
                    times[0].append(ours)
                    times[1].append(limit)
            ours, limit = (nbytes * count / statistics.median(part) / 1e9 for part in times)
            rows.append({
                "from": source, "to": target, "ours": ours, "limit": limit, "ratio": ours / limit,
                "goal": GOAL if has_goal else None,
            })
            mine.close()
            theirs.close()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="auto", help="a CUDA ordinal or PCI address")
    parser.add_argument("--bytes", type=int, default=MIB, help="of a message")
    parser.add_argument("--count", type=int, default=256, help="messages of a batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        gpu = Gpu(options.gpu)
    except DocaError as error:
        parser.error(str(error))
    with gpu:
        if gpu.target != "cuda":
            parser.error("on the host target all memory is host memory: there is nothing to measure without CUDA")
        rows = run(gpu, options.bytes, options.count, options.rounds)
        if options.json:
            print(json.dumps({"gpu": gpu.name, "bytes": options.bytes, "rows": rows}))
            return
        print(f"WRITEs of {options.bytes} B in batches of {options.count}, medians of {options.rounds}, GPU {gpu.name}")
        print(f"{'from':>10}{'to':>10}{'WRITE':>14}{'cudaMemcpyAsync':>18}{'ratio':>8}   goal")
        for row in rows:
            goal = f"≥ {row['goal']}" if row["goal"] else ""
            rates = f"{row['ours']:>9.2f} GB/s{row['limit']:>13.2f} GB/s"
            print(f"{row['from']:>10}{row['to']:>10}{rates}{row['ratio']:>8.2f}   {goal}")


if __name__ == "__main__":
    main()
