"""Ethernet frames between a software NIC and the kernel, on TAP devices and packet sockets, beside C and testpmd.

It runs itself again in a network namespace of its own. Without root, that is one of a user namespace, where testpmd and
TAP devices may be out of reach.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gpunetio import Gpu, PortConfig, open
from gpunetio import device as dev
from gpunetio.device import kernel
from gpunetio.eth import EthTxq
from gpunetio.flow import DROP, FlowPort, match
from gpunetio.nic.nic import SoftNic
from gpunetio.verbs import Context

PEER = Path(__file__).with_name("kernel_wires_peer.c")
INSIDE = "--inside"
TAP, NEAR, FAR = "bench0", "near", "far"
FRAME = bytes.fromhex("0200000000aa 0200000000bb 88b5")  # to nobody, so the kernel drops it at once
BATCH, COUNT = 64, 1 << 15
TESTPMD = "dpdk-testpmd"
LOOK = 0.0005  # seconds between looks at whether a ring is empty
STARTING = 3.0  # seconds that testpmd has to start
PATIENCE = 30  # seconds that any program has to end


@kernel
def post(txq, frame, lkey, nbytes):
    """Post COUNT frames, the last of which completes."""
    for i in range(COUNT // BATCH):
        first = dev.txq_reserve(txq, BATCH, dev.EXCLUSIVE)
        for j in range(BATCH):
            dev.txq_prepare_send(txq, first + j, frame, lkey, nbytes, (i + 1) * BATCH == COUNT and j == BATCH - 1)
        dev.post(txq, first, first + BATCH - 1, dev.EXCLUSIVE)


@kernel
def finish(txq):
    """Take the completion."""
    dev.txq_poll(txq, 1, dev.EXCLUSIVE)


# --- how to send, and how to receive ---------------------------------------------------------------------------------


def arrived(interface: str) -> int:
    """Frames that an interface of this namespace has received."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[1])
    return 0


@dataclass
class Bench:
    """What all runs share. Rates are frames in a second."""

    peer: Path
    seconds: float

    def start(self, how: str, interface: str, nbytes: int, seconds: float = 0.0) -> subprocess.Popen[str]:
        command = [str(self.peer), how, interface, str(seconds or self.seconds), str(nbytes)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def flood(self, interface: str, nbytes: int) -> None:
        """Send to an interface for as long as a run takes."""
        self.start("ring-write", interface, nbytes).communicate(timeout=PATIENCE)

    def ours(self, wire: str, seen_by: str, flooded: str, nbytes: int, sending: bool) -> float:
        with ExitStack() as stack:
            ctx = stack.enter_context(open("soft0", port=PortConfig(wire=wire, addresses="10.99.0.1", mtu=1500)))
            nic: SoftNic = ctx.provider.nic  # type: ignore[attr-defined]
            if sending:
                return self._send(ctx, nic, stack, seen_by, nbytes)
            steered = stack.enter_context(FlowPort(ctx))
            steered.steer(match.everything(), to=DROP)
            self.flood(flooded, nbytes)
            return int(nic.counters["rx_frame_rule_dropped"]) / self.seconds

    def _send(self, ctx: Context, nic: SoftNic, stack: ExitStack, seen_by: str, nbytes: int) -> float:
        """Time the engine from a ring full of WQEs until the last one has completed."""
        gpu, pd = stack.enter_context(Gpu("host")), ctx.create_pd()
        txq = stack.enter_context(EthTxq(gpu, pd, COUNT))
        frame = gpu.alloc(nbytes)
        frame.write(np.frombuffer(FRAME.ljust(nbytes, b"\0"), np.uint8))
        region = stack.enter_context(pd.register(frame))
        seconds, before = 0.0, arrived(seen_by)
        while seconds < self.seconds:
            nic.pause()
            post[1, 1, gpu](txq, frame, region.lkey, nbytes).wait(PATIENCE)
            done = int(nic.counters["tx_frames"]) + COUNT
            start = time.perf_counter()
            nic.resume()
            while int(nic.counters["tx_frames"]) < done:
                time.sleep(LOOK)
            seconds += time.perf_counter() - start
            finish[1, 1, gpu](txq).wait(PATIENCE)
        return (arrived(seen_by) - before) / seconds

    def plain(self, how: str, interface: str, nbytes: int) -> float:
        """A sender in C, which counts what the kernel has taken."""
        run = self.start(how, interface, nbytes)
        out, _ = run.communicate(timeout=PATIENCE)
        return int(out) / self.seconds

    def reader(self, how: str, interface: str, flooded: str, nbytes: int) -> float:
        """A receiver in C."""
        run = self.start(how, interface, nbytes, self.seconds + 0.5)
        assert run.stdout is not None
        run.stdout.readline()
        self.flood(flooded, nbytes)
        return int(run.communicate(timeout=PATIENCE)[0]) / self.seconds

    def testpmd(self, device: str, seen_by: str, flooded: str, nbytes: int, sending: bool) -> float:
        mode = ["--forward-mode=txonly", f"--txpkts={nbytes}"] if sending else ["--forward-mode=rxonly"]
        command = [
            TESTPMD, "-l", "0,1", "--main-lcore=0", "--no-huge", "-m", "256", "--no-pci", "--no-telemetry",
            f"--file-prefix=gpunetio{os.getpid()}", f"--vdev={device}", "--", "--total-num-mbufs=16384", "--auto-start",
            "--no-mlockall", *mode,
        ]
        run = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            time.sleep(STARTING)
            before = arrived(seen_by)
            if sending:
                time.sleep(self.seconds)
            else:
                self.flood(flooded, nbytes)
            sent = arrived(seen_by) - before
            out, _ = run.communicate("\n", timeout=PATIENCE)
        finally:
            run.kill()
        if sending:
            return sent / self.seconds
        counts = [line.split("RX-packets:")[1].split()[0] for line in out.splitlines() if "RX-packets:" in line]
        if not counts:
            raise SystemExit(f"{TESTPMD} has not run:\n{out}")
        return int(counts[0]) / self.seconds


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A job, done in several ways. `rates` has what each round of a way has measured."""

    job: str
    ways: dict[str, Callable[[], float]]
    rates: dict[str, list[float]] = field(default_factory=dict)

    def run(self) -> None:
        for way, run in self.ways.items():
            self.rates.setdefault(way, []).append(run())

    def median(self, way: str) -> float | None:
        return statistics.median(self.rates[way]) if way in self.rates else None


def rows(bench: Bench, nbytes: int, with_testpmd: bool) -> list[Row]:
    """The jobs with frames of a size."""
    b, made = bench, []
    for job, sending in (("to the kernel", True), ("from the kernel", False)):
        tap: dict[str, Callable[[], float]] = {
            "gpunetio": lambda s=sending: b.ours(f"tap:{TAP}", TAP, TAP, nbytes, s),
            "C, read and write": (lambda: b.plain("tap-write", TAP, nbytes)) if sending
            else (lambda: b.reader("tap-read", TAP, TAP, nbytes)),
        }
        ways: dict[str, Callable[[], float]] = {
            "gpunetio": lambda s=sending: b.ours(f"packet:{NEAR}", FAR, FAR, nbytes, s),
            "C, read and write": (lambda: b.plain("packet-write", NEAR, nbytes)) if sending
            else (lambda: b.reader("packet-read", NEAR, FAR, nbytes)),
            "C, PACKET_MMAP": (lambda: b.plain("ring-write", NEAR, nbytes)) if sending
            else (lambda: b.reader("ring-read", NEAR, FAR, nbytes)),
        }
        if with_testpmd:
            tap["testpmd"] = lambda s=sending: b.testpmd(f"net_tap0,iface={TAP}", TAP, TAP, nbytes, s)
            ways["testpmd"] = lambda s=sending: b.testpmd(f"net_af_packet0,iface={NEAR}", FAR, FAR, nbytes, s)
        made += [Row(f"TAP, {nbytes} B {job}", tap), Row(f"packet socket, {nbytes} B {job}", ways)]
    return made


def show(results: Sequence[Row]) -> None:
    """Print a table."""
    ways = list(dict.fromkeys(way for row in results for way in row.rates))
    table = Table("Mpps", *ways, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in results:
        medians = (row.median(way) for way in ways)
        table.add_row(row.job, *("" if rate is None else f"{rate / 1e6:.3f}" for rate in medians))
    Console().print(table)


def inside(arguments: argparse.Namespace) -> None:
    """Measure. This namespace is ours alone."""
    for command in (
        "link set lo up", f"link add {NEAR} type veth peer name {FAR}", f"link set {NEAR} up", f"link set {FAR} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    with tempfile.TemporaryDirectory() as folder:
        peer = Path(folder) / "peer"
        subprocess.run(["gcc", "-O2", str(PEER), "-o", str(peer)], check=True)
        bench = Bench(peer, arguments.seconds)
        results = [row for nbytes in (60, 1514) for row in rows(bench, nbytes, shutil.which(TESTPMD) is not None)]
        for _ in range(arguments.rounds):
            for row in results:
                row.run()
    if arguments.json:
        print(json.dumps({row.job: row.rates for row in results}))
    else:
        show(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments)
        return
    namespace: list[str] = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    raise SystemExit(subprocess.run([*namespace, sys.executable, *sys.argv, INSIDE]).returncode)


if __name__ == "__main__":
    main()
