"""Packets in and out of kernels on a real GPU: one block of one NIC echoes what a block of another NIC sends.

Both blocks are of one launch. The NICs' engines are CPU threads, which carry the packets over memory; rings and packets
are in pinned memory. A packet's way in and out is half of a round trip, which has two of them. The limit beside it is
the bare doorbell → answer ping of gpu_path.py in the same run. `goal` is what the project asks for on an H200.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np
from gpu_path import bare_ping
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from gpunetio import Gpu, MemType, device_function, eth, kernel, verbs
from gpunetio import device as dev
from gpunetio.flow import FlowPort, match

PORT = 4000  # of UDP
SLOT = 2048  # bytes from one packet to the next
PACKETS, DEPTH = 8192, 4096  # of a receive queue, of a send queue
PATIENCE = 20_000_000_000  # ns
WARM_UP = 500
SIZES = (64, 1500)
ON_THE_WAY = 1 << 18  # bytes: what does not fit into a link is lost, as on a network
_MAC = (1 << 48) - 1
OVERHEAD = 64  # bytes that a frame takes besides


@device_function
def swap_macs(packet):
    """Exchange the MACs at the beginning of a frame, which lies at a multiple of 8."""
    first, rest = dev.ld64(packet), dev.ld32(packet + 8)  # before any store: each load is a trip to the host
    to, source = first & _MAC, first >> 48 & 0xFFFF | (rest & 0xFFFF_FFFF) << 16
    dev.st64(packet, source | to << 48)
    dev.st32(packet + 8, to >> 16)


@device_function
def echo(tx, rx, nbytes, total):
    """Send back `total` packets, each from where it arrived. Return how many came back to the network."""
    me, threads = dev.thread_idx(), dev.block_dim()
    key, done, deadline = dev.rxq_lkey(rx), 0, dev.clock_ns() + PATIENCE
    while done < total and dev.clock_ns() < deadline:
        some = dev.rxq_recv(rx, threads, 0, 0, dev.BLOCK)
        if some < 0:
            break
        if me < some:
            packet = dev.rxq_packet(rx, dev.rxq_first(rx) + me)
            swap_macs(packet)
            dev.txq_send(tx, packet, key, nbytes, 0, dev.CTA)
        done += some
    return done


@device_function
def echo_one(tx, rx, nbytes, total):
    """The same by one thread, a packet at a time."""
    key = dev.rxq_lkey(rx)
    for _ in range(total):
        if dev.rxq_recv(rx, 1, PATIENCE) != 1:
            break
        packet = dev.rxq_packet(rx, dev.rxq_first(rx))
        swap_macs(packet)
        dev.txq_send(tx, packet, key, nbytes, 0, dev.EXCLUSIVE)


@device_function
def ask(tx, rx, laddr, lkey, nbytes, total, window):
    """Send `total` packets with at most `window` on their way. Return how many came back."""
    me, threads = dev.thread_idx(), dev.block_dim()
    sent, back, deadline = 0, 0, dev.clock_ns() + PATIENCE
    while back < total and dev.clock_ns() < deadline:
        if sent < total and sent - back + threads <= window:
            dev.txq_send(tx, laddr + SLOT * me, lkey, nbytes, 0, dev.CTA)
            sent += threads
        some = dev.rxq_recv(rx, threads, 0, 0, dev.BLOCK)
        if some < 0:
            break
        back += some
    return back


@kernel
def flood(near_tx, near_rx, far_tx, far_rx, laddr, lkey, nbytes, total, window, out):
    """Block 0 sends and receives, block 1 echoes. `total` is a multiple of the threads."""
    if dev.block_idx() == 0:
        count = ask(near_tx, near_rx, laddr, lkey, nbytes, total, window)
    else:
        count = echo(far_tx, far_rx, nbytes, total)
    if dev.thread_idx() == 0:
        dev.st64(out + 8 * dev.block_idx(), count)


@kernel
def ping(near_tx, near_rx, far_tx, far_rx, laddr, lkey, nbytes, total, times):
    """The same with one packet at a time and blocks of one thread: the time of each round trip."""
    if dev.block_idx() == 1:
        echo_one(far_tx, far_rx, nbytes, total)
    else:
        for i in range(total):
            start = dev.clock_ns()
            dev.txq_send(near_tx, laddr, lkey, nbytes, 0, dev.EXCLUSIVE)
            if dev.rxq_recv(near_rx, 1, PATIENCE) != 1:
                break
            dev.st64(times + 8 * i, dev.clock_ns() - start)


class End:
    """The queues of one NIC."""

    def __init__(self, name: str, gpu: Gpu, undo: ExitStack):
        self.ctx = undo.enter_context(verbs.open(name))
        self.pd = self.ctx.create_pd()
        self.rxq = eth.CyclicRxq(gpu, self.pd, PACKETS, SLOT, memory=MemType.CPU_GPU)
        self.txq = eth.EthTxq(gpu, self.pd, DEPTH)
        port = undo.enter_context(FlowPort(self.ctx))
        port.steer(match.udp(dst=PORT), to=self.rxq, count=False)


def run(gpu: Gpu, scale: float) -> list[dict[str, Any]]:
    """Every case, as rows of a table."""
    on_gpu = gpu.target == "cuda"
    threads = 128 if on_gpu else 1
    pings, packets = max(2 * WARM_UP, int(5_000 * scale)), int((1 << 20) * scale) // 256 * 256
    limit = bare_ping(gpu, pings)
    rows: list[dict[str, Any]] = [{"case": "bare doorbell → answer", "unit": "µs", **limit}]
    with ExitStack() as undo:
        near, far = (End(name, gpu, undo) for name in ("soft0", "soft1"))
        memory = undo.enter_context(gpu.alloc(threads * SLOT, MemType.CPU_GPU))
        out = undo.enter_context(gpu.alloc(8 * pings, MemType.CPU_GPU))
        lkey = near.pd.register(memory).lkey
        queues = near.txq, near.rxq, far.txq, far.rxq
        for nbytes in SIZES:
            head = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02") / IP() / UDP(dport=PORT)
            frame = head / bytes(nbytes - len(head))
            for i in range(threads):
                memory.array[SLOT * i : SLOT * i + nbytes] = np.frombuffer(bytes(frame), np.uint8)
            tries = []
            for _ in range(3):
                out.array[:] = 0
                assert ping[2, 1, gpu](*queues, memory.address, lkey, nbytes, pings, out).wait(60)
                times = out.array.view(np.int64)[:pings]
                assert times.all(), f"{np.count_nonzero(times == 0)} of {pings} packets did not come back"
                sample = np.sort(times[WARM_UP:]) / 2000  # half a round trip in µs
                tries.append({"min": sample[0], "median": np.median(sample), "p99": sample[int(len(sample) * 0.99)]})
            best = {k: float(v) for k, v in min(tries, key=lambda each: each["median"]).items()}
            rows.append({
                "case": f"a packet in and out, {nbytes} B", "unit": "µs", **best,
                "goal": 6.0 if nbytes == SIZES[0] else None, "limit": limit["median"] / best["median"],
            })
            rates, window = [], min(DEPTH // 2, ON_THE_WAY // (nbytes + OVERHEAD))
            for _ in range(4):
                start = perf_counter()
                arguments = (memory.address, lkey, nbytes, packets, window, out)
                assert flood[2, threads, gpu](*queues, *arguments).wait(60)
                rates.append(packets / (perf_counter() - start) / 1e6)
                back, echoed = out.array.view(np.int64)[:2].tolist()
                assert back == echoed == packets, f"{echoed} of {packets} were sent back, and {back} arrived"
            rates = sorted(rates[1:])
            rows.append({
                "case": f"received and sent back, {nbytes} B, 1 block", "unit": "M/s", "min": rates[0],
                "median": rates[1], "p99": rates[2], "goal": 5.0 if nbytes == SIZES[0] else None,
            })
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="auto", help="GPU to use; 'host' tries the benchmark itself")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with Gpu(args.gpu) as gpu:
        rows = run(gpu, args.scale)
        name = str(gpu)
    if args.json:
        print(json.dumps({"gpu": name, "rows": rows}, indent=2))
        return
    print(f"{name}; of rates: the worst, the middle and the best of three launches")
    print(f"{'case':40} {'unit':>5} {'min':>8} {'median':>8} {'p99':>8} {'goal':>6} {'of the limit':>13}")
    for row in rows:
        goal = "" if row.get("goal") is None else f"{row['goal']:.2f}"
        share = f"{row['limit']:.2f}" if "limit" in row else ""
        print(
            f"{row['case']:40} {row['unit']:>5} {row['min']:8.2f} {row['median']:8.2f} {row['p99']:8.2f} {goal:>6} "
            f"{share:>13}"
        )


if __name__ == "__main__":
    main()
