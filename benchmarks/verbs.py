"""DOCA Verbs from Python on the software NIC: the rate of the CPU data path, and what the control path costs."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gpunetio import verbs
from gpunetio.enums import SendFlags, WcStatus, WrOpcode
from gpunetio.memory import PAGE, HostMemory
from gpunetio.verbs import CQ, MR, QP, Completion, RecvWr, SendWr, Sge

BATCH, NBYTES, PLACES = 64, 8, 512
DEADLINE = 10.0  # seconds that a batch may take
GIB, MIB = 1 << 30, 1 << 20


@dataclass
class Result:
    """One figure, with what it should be."""

    name: str
    value: float
    unit: str
    goal: str = ""


# --- the CPU data path -----------------------------------------------------------------------------------------------


class Pair:
    """Two connected queue pairs of one NIC, each with a CQ for each direction, and memory at both ends."""

    def __init__(self, stack: ExitStack, ctx: verbs.Context, depth: int = 256):
        self.pd = stack.enter_context(ctx.create_pd())
        self.cqs = [stack.enter_context(ctx.create_cq(2 * depth)) for _ in range(4)]
        self.near, self.far = (
            stack.enter_context(
                self.pd.create_qp(sq_wr=depth, rq_wr=depth, send_cq=sent, receive_cq=received, max_inline_data=NBYTES)
            )
            for sent, received in (self.cqs[:2], self.cqs[2:])
        )
        self.near.connect(self.far)
        self.source, self.target = HostMemory(PLACES * NBYTES), HostMemory(PLACES * NBYTES)
        self.source.array[:] = np.random.default_rng(1).integers(0, 256, self.source.nbytes, np.uint8)
        self.local = stack.enter_context(self.pd.register(self.source))
        self.remote = stack.enter_context(self.pd.register(self.target))

    def writes(self, first: int) -> list[SendWr]:
        """A batch of writes to the places from `first` on, a multiple of the batch."""
        opcode, lkey, rkey = WrOpcode.RDMA_WRITE, self.local.lkey, self.remote.rkey
        here, there = self.local.address + first % PLACES * NBYTES, self.remote.address + first % PLACES * NBYTES
        return [
            SendWr(
                opcode=opcode, sges=(Sge(here + n * NBYTES, NBYTES, lkey),), wr_id=first + n,
                remote_addr=there + n * NBYTES, rkey=rkey,
            )
            for n in range(BATCH)
        ]

    def check(self) -> None:
        """What was written is what was to be written."""
        if not np.array_equal(self.source.array, self.target.array):
            raise SystemExit("the payload at the target is not that of the source")


def drain(cq: CQ, count: int) -> list[Completion]:
    """Poll until `count` requests have completed."""
    found = cq.poll(BATCH)
    end = time.monotonic() + DEADLINE
    while len(found) < count:
        found += cq.poll(BATCH)
        if time.monotonic() > end:
            raise SystemExit(f"{len(found)} of {count} requests have completed within {DEADLINE:g} s")
    return found


def confirm(found: list[Completion], wanted: list[int]) -> None:
    """Every request has succeeded, in order."""
    if [done.wr_id for done in found] != wanted or any(done.status != WcStatus.SUCCESS for done in found):
        raise SystemExit(f"wrong completions: {found}")


def rate(batch: Callable[[int], None], batches: int, rounds: int) -> float:
    """Millions of messages a second: the median of the rounds."""
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        for n in range(batches):
            batch(n)
        rates.append(batches * BATCH / (time.perf_counter() - start) / 1e6)
    return statistics.median(rates)


def posted_again(pair: Pair) -> Callable[[int], None]:
    """The same requests each time."""
    requests = [pair.writes(first) for first in range(0, PLACES, BATCH)]

    def batch(n: int) -> None:
        pair.near.post_send(*requests[n % len(requests)])
        drain(pair.cqs[0], BATCH)

    return batch


def posted_new(pair: Pair) -> Callable[[int], None]:
    """Requests and their entries newly constructed."""

    def batch(n: int) -> None:
        pair.near.post_send(*pair.writes(n * BATCH % PLACES))
        drain(pair.cqs[0], BATCH)

    return batch


def posted_inline(pair: Pair) -> Callable[[int], None]:
    """The bytes in the requests themselves."""
    requests = [
        SendWr(
            opcode=WrOpcode.RDMA_WRITE, inline=pair.source.array[at : at + NBYTES].tobytes(),
            remote_addr=pair.remote.address + at, rkey=pair.remote.rkey,
        )
        for at in range(0, BATCH * NBYTES, NBYTES)
    ]

    def batch(_: int) -> None:
        pair.near.post_send(*requests)
        drain(pair.cqs[0], BATCH)

    return batch


def received(pair: Pair) -> Callable[[int], None]:
    """SENDs, of which the last one of a batch is signalled, into receives that were posted before."""
    sges = [(Sge(pair.local.address + at, NBYTES, pair.local.lkey),) for at in range(0, BATCH * NBYTES, NBYTES)]
    into = [(Sge(pair.remote.address + at, NBYTES, pair.remote.lkey),) for at in range(0, BATCH * NBYTES, NBYTES)]
    receives = [RecvWr(sges=spot, wr_id=n) for n, spot in enumerate(into)]
    flags = [SendFlags(0)] * (BATCH - 1) + [SendFlags.SIGNALED]
    sends = [SendWr(opcode=WrOpcode.SEND, sges=spot, flags=flag) for spot, flag in zip(sges, flags, strict=True)]

    def batch(_: int) -> None:
        pair.far.post_recv(*receives)
        pair.near.post_send(*sends)
        drain(pair.cqs[3], BATCH)
        drain(pair.cqs[0], 1)

    return batch


def one_by_one(pair: Pair, count: int) -> list[float]:
    """Microseconds from a post to its completion, of single requests."""
    request, samples = pair.writes(0)[0], []
    for _ in range(count):
        start = time.perf_counter()
        pair.near.post_send(request)
        drain(pair.cqs[0], 1)
        samples.append(1e6 * (time.perf_counter() - start))
    return samples


def after_sleep(pair: Pair, count: int) -> list[float]:
    """Microseconds from a post to its completion when the engine sleeps."""
    request, samples = pair.writes(0)[0], []
    for _ in range(count):
        time.sleep(5e-3)
        start = time.perf_counter()
        pair.near.post_send(request)
        drain(pair.cqs[0], 1)
        samples.append(1e6 * (time.perf_counter() - start))
    return samples


def data_path(rounds: int, batches: int) -> list[Result]:
    """Rates, latencies, and the processor time of an idle process."""
    with ExitStack() as stack:
        ctx = stack.enter_context(verbs.open("soft0"))
        pair = Pair(stack, ctx)
        pair.near.post_send(*pair.writes(0))
        confirm(drain(pair.cqs[0], BATCH), list(range(BATCH)))
        results = [
            Result(f"{name}, batches of {BATCH}", rate(make(pair), batches, rounds), "M/s", goal)
            for name, make, goal in (
                ("WRITE of 8 B, the same requests", posted_again, "≥ 0.5"),
                ("WRITE of 8 B, new requests each time", posted_new, ""),
                ("WRITE of 8 B inline", posted_inline, ""),
                ("SEND of 8 B, posted receives and their completions", received, ""),
            )
        ]
        pair.check()
        results += [
            Result("WRITE of 8 B alone, post to completion", statistics.median(one_by_one(pair, 2000)), "µs"),
            Result("the same, to a sleeping engine", statistics.median(after_sleep(pair, 100)), "µs", "< 1000"),
            Result("an idle process with open queues", idle(), "% of a core", "< 3"),
        ]
        return results


def idle(seconds: float = 2.0) -> float:
    """Processor time of this process while it sleeps, in percent of a core."""
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(seconds)
    return 100 * (time.process_time() - start) / seconds


# --- the control path ------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def pair_life(count: int) -> float:
    """Milliseconds to create, connect and destroy two queue pairs: the median."""
    samples = []
    with verbs.open("soft0") as ctx:
        pd, cq = ctx.create_pd(), ctx.create_cq(64)
        for _ in range(count):
            start = time.perf_counter()
            near, far = (pd.create_qp(sq_wr=16, rq_wr=16, send_cq=cq, receive_cq=cq) for _ in range(2))
            near.connect(far)
            near.close()
            far.close()
            samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def registration(count: int) -> float:
    """Milliseconds to register 1 GiB: the median."""
    samples = []
    with verbs.open("soft0") as ctx:
        pd, memory = ctx.create_pd(), np.empty(GIB, np.uint8)
        for _ in range(count):
            start = time.perf_counter()
            region: MR = pd.register(memory)
            samples.append(1e3 * (time.perf_counter() - start))
            region.close()
    return statistics.median(samples)


def many_queues(count: int, rounds: int, batches: int) -> list[Result]:
    """So many queue pairs in one process, and a busy pair beside them."""
    with ExitStack() as stack:
        ctx = stack.enter_context(verbs.open("soft0"))
        pair = Pair(stack, ctx)
        pd, cq = ctx.create_pd(), ctx.create_cq(64)
        before, start = resident(), time.perf_counter()
        queues: list[QP] = [pd.create_qp(sq_wr=1, send_cq=cq) for _ in range(count)]
        results = [
            Result(f"{count} QPs: create", time.perf_counter() - start, "s", "≤ 10"),
            Result(f"{count} QPs: memory", (resident() - before) / MIB, "MiB", "≤ 1024"),
            Result(f"beside {count} idle QPs: WRITE of 8 B", rate(posted_again(pair), batches, rounds), "M/s", "≥ 0.5"),
            Result(f"beside {count} idle QPs: one WRITE", statistics.median(one_by_one(pair, 1000)), "µs"),
            Result(f"an idle process with {count} QPs", idle(), "% of a core"),
        ]
        results.insert(2, Result(f"{count} QPs: memory, touched", (resident() - before) / MIB, "MiB", "≤ 1024"))
        start = time.perf_counter()
        for queue in queues:
            queue.close()
        results.insert(1, Result(f"{count} QPs: destroy", time.perf_counter() - start, "s"))
        pair.check()
        return results


# --- all of it -------------------------------------------------------------------------------------------------------


def show(results: list[Result]) -> None:
    """The table."""
    table = Table(title="DOCA Verbs from Python", box=box.SIMPLE)
    for name in ("what", "figure", "unit", "goal"):
        table.add_column(name, no_wrap=True, justify="right" if name == "figure" else "left")
    for result in results:
        table.add_row(result.name, f"{result.value:.3g}", result.unit, result.goal)
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each rate; the median counts")
    parser.add_argument("--batches", type=int, default=500, help=f"batches of {BATCH} messages in a turn")
    parser.add_argument("--queues", type=int, default=10_000, help="queue pairs of one process")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    results = data_path(args.rounds, args.batches)
    results += [
        Result("an RC pair: create, connect, destroy", pair_life(200), "ms", "≤ 3"),
        Result("an MR of 1 GiB", registration(50), "ms", "≤ 1"),
    ]
    results += many_queues(args.queues, args.rounds, args.batches)
    if args.json:
        shown: list[dict[str, Any]] = [asdict(result) for result in results]
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        show(results)


if __name__ == "__main__":
    main()
