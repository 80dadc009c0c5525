"""The software NIC against C++ that does the same job on the same memory, and against memcpy: rates and ratios."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gpunetio import Gpu, kernel, open
from gpunetio.device.modes import EXCLUSIVE
from gpunetio.device.onesided import put, wait
from gpunetio.device.qp import reserve
from gpunetio.device.submit import post
from gpunetio.device.waiting import HOST_SPINS
from gpunetio.device.wqe import prepare_write
from gpunetio.enums import Access
from gpunetio.formats import cqe, doorbell, wqe
from gpunetio.formats.commands import QpState
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP
from gpunetio.formats.layout import Entry
from gpunetio.formats.packet import PSN_MASK
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import be32, clock_ns, st_release32
from gpunetio.memory import HostMemory
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.host import engine
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.nic.state.cq import CQ_ROW
from gpunetio.nic.state.message import MAX_SEGMENTS
from gpunetio.nic.state.objects import MKEY_ROW
from gpunetio.nic.state.qp import QP_ROW, QpRow
from gpunetio.nic.state.work_queue import WORK_QUEUE
from gpunetio.nic.state.worker import WORKER
from gpunetio.nic.turn import step
from gpunetio.service import STOP_TIMEOUT, ServiceThread

PEER = Path(__file__).with_name("engine_peer.cpp")
ENTRIES = (
    WORKER, QP_ROW, WORK_QUEUE, CQ_ROW, MKEY_ROW, COUNTERS,
    wqe.CTRL_SEG, wqe.RADDR_SEG, wqe.DATA_SEG, cqe.CQE64, DEV_QP, DEV_CQ,
)
CONSTANTS = {
    "INLINE_SEG": wqe.INLINE_SEG, "SEGMENT": wqe.SEGMENT, "MAX_TRANSFER": wqe.MAX_TRANSFER,
    "WQEBB_SHIFT": wqe.WQEBB_SHIFT, "CE_SHIFT": wqe.CE_SHIFT, "CE_ALWAYS": int(wqe.CompletionMode.ALWAYS),
    "CQ_UPDATE": int(wqe.CtrlFlags.CQ_UPDATE), "RDMA_WRITE": int(wqe.WqeOpcode.RDMA_WRITE),
    "CQE_SHIFT": cqe.CQE_SHIFT, "CI_MASK": cqe.CI_MASK, "WQE_IDX_SHIFT": doorbell.WQE_IDX_SHIFT,
    "PI_MASK": doorbell.PI_MASK, "PSN_MASK": PSN_MASK, "MAX_SEGMENTS": MAX_SEGMENTS,
    "DS_MASK": wqe.DS_MASK,
    "RTR": int(QpState.RTR), "RTS": int(QpState.RTS), "REMOTE_WRITE": int(Access.REMOTE_WRITE),
    "YIELD_EVERY": engine.yield_every(), "HOST_SPINS": HOST_SPINS,
}
FUNCTIONS = {"drain": 3, "post_writes": 9, "engine": 1, "copy_pieces": 5}  # name → number of arguments
# The last one keeps GCC 12 from merging stores of which the next WQE loads a half: the peer is about 10 % faster so.
FLAGS = ["-std=c++20", "-Wall", "-shared", "-fPIC", "-O3", "-march=native", "-fno-tree-slp-vectorize"]
KIB, MIB = 1 << 10, 1 << 20


# --- the C++ peer --------------------------------------------------------------------------------------------------


def c_struct(entry: Entry) -> str:
    """`entry` as a C++ structure with the same offsets."""
    lines, end = [], 0
    for name, (dtype, offset, *_) in sorted((entry.dtype.fields or {}).items(), key=lambda item: item[1][1]):
        if offset > end:
            lines.append(f"    uint8_t pad{end}[{offset - end}];")
        kind = {"i": "int", "u": "uint"}.get(dtype.kind) if offset % dtype.itemsize == 0 else None
        lines.append(f"    {kind}{8 * dtype.itemsize}_t {name};" if kind else f"    uint8_t {name}[{dtype.itemsize}];")
        end = offset + dtype.itemsize
    if entry.size > end:
        lines.append(f"    uint8_t pad{end}[{entry.size - end}];")
    name = type(entry).__name__
    checks = [f"static_assert(offsetof({name}, {field}) == {at});" for field, at in entry.offsets.items()]
    checks.append(f"static_assert(sizeof({name}) == {entry.size});")
    return "\n".join([f"struct {name} {{", *lines, "};", *checks])


def build_peer(folder: str) -> ctypes.CDLL:
    """The C++ peer, compiled for this machine."""
    constants = [f"constexpr int64_t {name} = {value};" for name, value in CONSTANTS.items()]
    text = "\n".join(["#include <cstddef>", "#include <cstdint>", *constants, *map(c_struct, ENTRIES), ""])
    Path(folder, "layout.h").write_text(text)
    library = Path(folder, "peer.so")
    subprocess.run(["g++", *FLAGS, "-I", folder, str(PEER), "-o", str(library)], check=True)
    peer = ctypes.CDLL(str(library))
    for name, count in FUNCTIONS.items():
        function = getattr(peer, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * count
    return peer


# --- ours: the same entry points ------------------------------------------------------------------------------------


@engine_function
def drain(nic, row, target):
    """Ring the doorbell and be the engine until WQE `target` - 1 is complete: nanoseconds, or -1."""
    q = QpRow(row)
    start = clock_ns()
    st_release32(q.doorbell, be32((target & doorbell.PI_MASK) << doorbell.WQE_IDX_SHIFT))
    while q.sq_ci != target:
        step.step(nic)
        if q.failed != 0:
            return -1
    return clock_ns() - start


@kernel
def post_writes(qp, raddr, rkey, laddr, lkey, nbytes, places, count, batch, out):
    """Post `count` writes of `nbytes`, `batch` with each doorbell, and wait: `out` is nanoseconds and status."""
    start = clock_ns()
    last = -1
    if batch == 1:
        for i in range(count):
            where = (i & (places - 1)) * nbytes
            last = put(qp, raddr + where, rkey, laddr + where, lkey, nbytes, EXCLUSIVE)
    else:
        for _ in range(0, count, batch):
            first = reserve(qp, batch, EXCLUSIVE)
            for index in range(first, first + batch):
                where = (index & (places - 1)) * nbytes
                prepare_write(qp, index, raddr + where, rkey, laddr + where, lkey, nbytes)
            last = post(qp, first, first + batch - 1, EXCLUSIVE)
    out[1] = wait(qp, last, EXCLUSIVE)
    out[0] = clock_ns() - start


# --- the machine under test ----------------------------------------------------------------------------------------


class Bench:
    """A connected QP of the software NIC with memory at both ends.

    `cores`: poster and engine on "two" cores, on "one", or where the system puts them ("free").
    """

    def __init__(self, depth: int, payload: int, workers: int = 1):
        self.cores = "one"
        self.ctx = open("soft0", port=PortConfig(workers=workers))
        self.nic: Any = self.ctx.provider.nic  # type: ignore[attr-defined]
        self.gpu = Gpu("host")
        pd = self.ctx.create_pd()
        self.depth, self.qp = depth, self.gpu.create_qp(pd, depth)
        self.peer = self.gpu.create_qp(pd, 64)
        self.qp.connect(self.peer)
        self.source, self.target = HostMemory(payload), HostMemory(payload)
        self.source.array[:] = np.random.default_rng(1).integers(0, 256, self.source.nbytes, np.uint8)
        self.local, self.remote = pd.register(self.source), pd.register(self.target)
        self.address = int(self.nic.record.__array_interface__["data"][0])
        self.row = self.nic.qps.row_address(self.qp.qpn)
        self.fields = self.nic.qps[self.qp.qpn]

    def close(self) -> None:
        """Close the queues, and the NIC with the last of its users."""
        self.gpu.close()
        self.ctx.close()

    def stop_engine(self) -> None:
        """Stop the NIC's own engine: from now on whoever measures brings an engine along."""
        self.nic.record["stop"] = 1
        self.nic.engine.kick()
        while self.nic.engine.running:
            time.sleep(1e-3)

    def fill_ring(self, nbytes: int) -> int:
        """Post a ring full of writes of `nbytes` without ringing: the producer index to ring."""
        raw = (ctypes.c_uint8 * (self.depth * wqe.WQEBB)).from_address(self.qp.qp.sq_address)
        parts = {"ctrl": wqe.CTRL_SEG.dtype, "raddr": wqe.RADDR_SEG.dtype, "data": wqe.DATA_SEG.dtype, "rest": "V16"}
        slots = np.ndarray(self.depth, np.dtype(list(parts.items())), buffer=memoryview(raw))
        first = int(self.fields["sq_ci"])
        index = first + np.arange(self.depth)
        at = index % self.depth
        where = index % (self.source.nbytes // nbytes) * nbytes
        ctrl, raddr, data = slots["ctrl"], slots["raddr"], slots["data"]
        stamp = (index & doorbell.PI_MASK) << doorbell.WQE_IDX_SHIFT
        ctrl["opmod_idx_opcode"][at] = stamp | int(wqe.WqeOpcode.RDMA_WRITE)
        ctrl["qpn_ds"], ctrl["fm_ce_se"] = self.qp.qpn << 8 | 3, int(wqe.CtrlFlags.CQ_UPDATE)
        raddr["raddr"][at], raddr["rkey"] = self.remote.address + where, self.remote.rkey
        data["addr"][at], data["lkey"], data["byte_count"] = self.local.address + where, self.local.lkey, nbytes
        return first + self.depth

    @contextmanager
    def engine_running(self, body: Callable[[int], Any]) -> Iterator[None]:
        """`body`, an engine's loop, on a thread of its own; a kernel's threads inherit this thread's core."""
        cores = sorted(os.sched_getaffinity(0))
        first, last = cores[:1], cores[-1:]
        here, there = {"two": (first, last), "one": (first, first), "free": (cores, cores)}[self.cores]

        def serve() -> None:
            os.sched_setaffinity(0, there)
            body(self.address)

        self.nic.record["stop"] = 0
        thread = ServiceThread("engine", serve)
        thread.start()
        os.sched_setaffinity(0, here)
        yield
        os.sched_setaffinity(0, cores)
        self.nic.record["stop"] = 1
        self.nic.engine.kick()
        if not thread.join():
            raise SystemExit(f"the engine did not stop within {STOP_TIMEOUT:g} s")

    def write_args(self, nbytes: int, places: int, count: int, batch: int) -> tuple[int, ...]:
        """The arguments of `post_writes`."""
        ends = self.remote.address, self.remote.rkey, self.local.address, self.local.lkey
        return self.qp.device_address, *ends, nbytes, places, count, batch

    def ring(self, target: int) -> None:
        """Ring for the WQEs below `target`."""
        value = (target & doorbell.PI_MASK) << doorbell.WQE_IDX_SHIFT
        register = ctypes.c_uint32.from_address(int(self.fields["doorbell"]))
        register.value = int.from_bytes(value.to_bytes(4, "big"), sys.byteorder)

    def check_payload(self) -> None:
        """What was written is what was to be written."""
        if not np.array_equal(self.source.array, self.target.array):
            raise SystemExit("the payload at the target is not that of the source")


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Samples of one job by both sides, in `unit`; the two took turns."""

    name: str
    limit: str
    unit: str
    goal: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Everything worth keeping, as plain values."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        ours_best, theirs_best = max(self.ours), max(self.theirs)
        return {k: v for k, v in asdict(self).items() if k not in ("ours", "theirs")} | {
            "ours_median": ours, "limit_median": theirs, "ratio_median": ours / theirs,
            "ours_best": ours_best, "limit_best": theirs_best, "ratio_best": ours_best / theirs_best,
        }


def good(ns: int) -> int:
    """`ns`, unless it says that the run failed."""
    if ns <= 0:
        raise SystemExit("the run failed: the engine refused a request, or a wait ended with an error")
    return ns


def engine_alone(bench: Bench, peer: ctypes.CDLL, rounds: int) -> Result:
    """64-byte writes that are already posted, from the doorbell to the last completion, on one thread."""
    nbytes = 64
    result = Result(f"engine alone, {nbytes} B", "C++", "M/s", "≥ 40 M/s, ratio ≥ 0.8")
    for _ in range(rounds):
        for function, samples in ((drain, result.ours), (peer.drain, result.theirs)):
            ns = good(function(bench.address, bench.row, bench.fill_ring(nbytes)))
            samples.append(1e3 * bench.depth / ns)
    return result


def run_ours(bench: Bench, args: tuple[int, ...]) -> int:
    """A kernel posts, our engine executes: nanoseconds."""
    out = np.zeros(2, np.int64)
    with bench.engine_running(engine.run):
        post_writes[1, 1, bench.gpu](*args, out).wait(60)
    return int(out[0]) if out[1] == 0 else -1


def run_peer(bench: Bench, peer: ctypes.CDLL, args: tuple[int, ...]) -> int:
    """C++ posts and C++ executes: nanoseconds."""
    with bench.engine_running(peer.engine):
        return int(peer.post_writes(*args))


def messages(bench: Bench, peer: ctypes.CDLL, rounds: int, batch: int, count: int) -> Result:
    """8-byte writes by one posting thread, executed by the engine on another."""
    name, goal = ("a doorbell each", "≥ 5 M/s") if batch == 1 else (f"batches of {batch}", "≥ 40 M/s")
    result = Result(f"poster + engine ({bench.cores}), 8 B, {name}", "C++", "M/s", goal)
    args = bench.write_args(8, 512, count, batch)
    for _ in range(rounds):
        result.ours.append(1e3 * count / good(run_ours(bench, args)))
        result.theirs.append(1e3 * count / good(run_peer(bench, peer, args)))
    return result


def bandwidth(bench: Bench, peer: ctypes.CDLL, rounds: int, count: int) -> Result:
    """64 KiB writes against memcpy of the same pieces of the same buffers."""
    nbytes, places = 64 * KIB, bench.source.nbytes // (64 * KIB)
    result = Result(f"poster + engine ({bench.cores}), 64 KiB × {places}", "memcpy", "GB/s", "ratio ≥ 0.8")
    args = bench.write_args(nbytes, places, count, 1)
    for _ in range(rounds):
        result.ours.append(nbytes * count / good(run_ours(bench, args)))
        ns = good(peer.copy_pieces(bench.target.address, bench.source.address, nbytes, places, count))
        result.theirs.append(nbytes * count / ns)
    return result


def in_threads(jobs: Sequence[Callable[[], Any]]) -> int:
    """Run jobs at the same time, each on a thread of its own: nanoseconds from the first start to the last end."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> tuple[int, int]:
        barrier.wait()
        start = time.monotonic_ns()
        job()
        return start, time.monotonic_ns()

    with ThreadPoolExecutor(len(jobs)) as pool:
        spans = list(pool.map(run, jobs))
    return max(end for _, end in spans) - min(start for start, _ in spans)


def scaling(peer: ctypes.CDLL, workers: int, rounds: int) -> Result:
    """1 MiB writes that are already posted, by a QP for each worker, against memcpy by as many threads."""
    nbytes, places, depth = MIB, 4, 1024
    goal = {1: "", 2: "≥ 24 GB/s on 16 cores", 4: "≥ 40 GB/s on 16 cores"}.get(workers, "")
    result = Result(f"{workers} workers, 1 MiB × {places} each", "memcpy", "GB/s", goal)
    benches = [Bench(depth, places * nbytes, workers) for _ in range(workers)]
    if len({int(bench.fields["worker"]) for bench in benches}) != workers:
        raise SystemExit("some workers have no queue pair")
    amount = workers * depth * nbytes
    for _ in range(rounds):
        targets = [bench.fill_ring(nbytes) for bench in benches]
        start = time.monotonic_ns()
        for bench, target in zip(benches, targets):
            bench.ring(target)
        benches[0].nic.engine.kick()
        while any(bench.fields["sq_ci"] != target for bench, target in zip(benches, targets)):
            if any(bench.fields["failed"] for bench in benches):
                good(-1)
            time.sleep(2e-4)
        result.ours.append(amount / (time.monotonic_ns() - start))
        jobs = [
            partial(peer.copy_pieces, bench.target.address, bench.source.address, nbytes, places, depth)
            for bench in benches
        ]
        result.theirs.append(amount / in_threads(jobs))
    for bench in benches:
        bench.check_payload()
        bench.close()
    return result


def show(results: list[Result]) -> None:
    """The table."""
    table = Table(title="medians over the rounds", box=box.SIMPLE)
    for name in ("job", "ours", "limit", "ratio", "of bests", "goal"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("job", "goal") else "right")
    for result in results:
        s = result.summary()
        ours, limit = (f"{s[key]:.1f} {result.unit}" for key in ("ours_median", "limit_median"))
        ratios = (f"{s[key]:.2f}" for key in ("ratio_median", "ratio_best"))
        table.add_row(result.name, ours, f"{result.limit} {limit}", *ratios, result.goal)
    console = Console()
    console.width = max(console.width, 118)
    console.print(table)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side")
    parser.add_argument("--ring", type=int, default=1 << 15, help="WQEs that the engine alone finds posted")
    parser.add_argument("--depth", type=int, default=1 << 14, help="slots of the poster's queue")
    parser.add_argument("--count", type=int, default=1 << 20, help="messages of a round with a poster")
    parser.add_argument(
        "--cores", choices=["two", "one", "free"], action="append", help="for poster and engine; default: one, then two"
    )
    parser.add_argument("--workers", metavar="N,…", help="measure only how 1 MiB writes scale with so many workers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peer = build_peer(folder)
    if args.workers:
        results = [scaling(peer, int(workers), args.rounds) for workers in args.workers.split(",")]
    else:
        results = one_worker(peer, args)
    if args.json:
        print(json.dumps([result.summary() for result in results], indent=2, ensure_ascii=False))
    else:
        show(results)


def one_worker(peer: ctypes.CDLL, args: argparse.Namespace) -> list[Result]:
    """A NIC with one worker, which runs on the thread that measures or beside a poster."""
    alone, posted = Bench(args.ring, 256 * KIB), Bench(args.depth, 4096 * KIB)
    alone.stop_engine()
    results = [engine_alone(alone, peer, 4 * args.rounds)]
    for posted.cores in args.cores or ["one", "two"]:
        results += [
            messages(posted, peer, args.rounds, 1, args.count),
            messages(posted, peer, args.rounds, 64, 4 * args.count),
            bandwidth(posted, peer, args.rounds, max(args.count >> 6, 1)),
        ]
    alone.check_payload()
    posted.check_payload()
    return results


if __name__ == "__main__":
    main()
