"""gpunetio packet_processing counts 64 B UDP packets of many flows, which a kernel of another process sends.

The sender runs on CPU threads, the counting kernels on a GPU or on CPU threads. Each process has an engine; the packets
go over memory. What finds no room on the way is lost, as on a network: what counts is what kernels have counted in the
time in which the sender sent. The limit is testpmd, of which one process sends and another one receives (rxonly), with
memif between them; without testpmd there is none. `goal` is what the project asks for: on two cores, and on an H200.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from contextlib import ExitStack

import numpy as np
from ethernet_frames import flows_of, frame_of
from ethernet_pair import BURST, DEPTH, PATIENCE, TESTPMD, line_of, start, testpmd
from ethernet_results import Result, show

from gpunetio import Gpu, MemType, eth, kernel
from gpunetio import device as dev
from gpunetio.packet_processing.app import Application
from gpunetio.packet_processing.options import Options
from gpunetio.packet_processing.queues import Protocol
from gpunetio.verbs import open

NBYTES = 64
FLOWS = 256  # of which the hash makes shares of the queues
SECONDS, WARM_UP = 2.0, 0.5
_NS = 1_000_000_000


@kernel
def send_flows(txq, frames, lkey, duration, out):
    """Send packets of all flows in turn for some ns. Write how many, or a negative status."""
    end = dev.clock_ns() + duration
    sent = 0
    status = 0
    while dev.clock_ns() < end and status >= 0:
        first = dev.txq_reserve(txq, BURST, dev.EXCLUSIVE)
        status = first
        if first >= 0:
            last = first + BURST - 1
            for index in range(first, last + 1):
                dev.txq_prepare_send(txq, index, frames + index % FLOWS * NBYTES, lkey, NBYTES, index == last)
            status = dev.post(txq, first, last, dev.EXCLUSIVE)
            sent += BURST
    if sent > 0:
        status = dev.txq_wait(txq, status, dev.EXCLUSIVE)
    dev.st64(out, sent if status >= 0 else status)


def receive(gpu: str, queues: int, seconds: float) -> None:
    """Be the application. Say its MAC once it is ready, and in the end what it has counted and what was dropped."""
    with ExitStack() as undo:
        application = Application(Options(gpu=gpu, device="soft1", queues=queues, seconds=seconds), undo)
        print(application.ctx.provider.nic.mac.hex(), flush=True)  # type: ignore[attr-defined]
        report = application.run(())
    udp = report.of_protocol(Protocol.UDP)
    totals = [queue.counts["total"] for queue in udp]
    busy = max(queue.busy_seconds for queue in udp)
    print(json.dumps({"totals": totals, "dropped": sum(queue.dropped or 0 for queue in udp), "busy": busy}), flush=True)


def send(to: bytes) -> int:
    """Send for SECONDS. Return how many packets were sent."""
    with ExitStack() as undo:
        ctx, gpu = undo.enter_context(open("soft0")), undo.enter_context(Gpu("host"))
        pd = ctx.create_pd()
        txq = undo.enter_context(eth.EthTxq(gpu, pd, DEPTH))
        memory = undo.enter_context(gpu.alloc(FLOWS * NBYTES, MemType.CPU_GPU))
        region, out = undo.enter_context(pd.register(memory)), undo.enter_context(gpu.alloc(8, MemType.CPU_GPU))
        mac = ctx.provider.nic.mac  # type: ignore[attr-defined]
        frames = b"".join(to + mac + frame_of(flow, NBYTES)[12:] for flow in flows_of(FLOWS, 1))
        memory.array[:] = np.frombuffer(frames, np.uint8)
        for seconds in (0.0, SECONDS):  # the first launch compiles
            send_flows[1, 1, gpu](txq, memory, region.lkey, int(seconds * _NS), out).wait(PATIENCE)
        return int(out.array.view(np.int64)[0])


def count(gpu: str, queues: int, cores: tuple[int, int] | None) -> tuple[float, str]:
    """Packets per µs that the application has counted, and what else there is to say."""
    with ExitStack() as undo:
        here, there = cores or (None, None)
        seconds = SECONDS + 2 * WARM_UP + 5
        receiver = start(undo, here, sys.executable, __file__, "--receive", gpu, str(queues), str(seconds))
        mac = line_of(receiver)
        time.sleep(WARM_UP)
        sender = start(undo, there, sys.executable, __file__, "--send", mac)
        sent = int(line_of(sender))
        said = json.loads(line_of(receiver))
    share = min(said["totals"]) / max(1, max(said["totals"]))
    text = f"sent {sent / SECONDS / 1e6:.2f} Mpps, dropped {said['dropped']}, least and most of a queue {share:.2f}, "
    return sum(said["totals"]) / SECONDS / 1e6, f"{text}kernel busy {said['busy']:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="host", help="where the application's kernels run")
    parser.add_argument("--queues", type=int, nargs="+", default=[1], help="numbers of queues to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        return receive(args.receive[0], int(args.receive[1]), float(args.receive[2]))
    if args.send:
        return print(send(bytes.fromhex(args.send)), flush=True)
    limited = shutil.which(TESTPMD) is not None
    on_host = args.gpu == "host"
    results = []
    for queues in args.queues:
        goal = "≥ 3 Mpps" if on_host else "≥ 10 Mpps" if queues == 4 else ""
        result = Result(f"{queues} queues of UDP", "Mpps", "testpmd memif" if limited else "", goal)
        for _ in range(args.rounds):
            rate, result.note = count(args.gpu, queues, (0, 1) if on_host else None)
            result.ours.append(rate)
            if limited:
                result.theirs.append(testpmd(NBYTES))
        results.append(result)
    if args.json:
        return print(json.dumps([result.summary() for result in results], indent=2))
    show(results)
    return print(f"medians of {args.rounds} rounds")


if __name__ == "__main__":
    main()
