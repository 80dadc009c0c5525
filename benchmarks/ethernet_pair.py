"""Two processes of one host: the kernel of one sends frames, that of the other receives them, steered by a rule.

Each process has one core, for its kernel and its engine. What finds no room on the way is lost, as on a network: what
counts is what the receiver's kernel gets in a second. The peer is DPDK's testpmd, if it is installed: one process
sends, the other receives, with memif between them. Without it, the limit is C that moves the bare frames through
shared memory (wire_limits.c, shm-messages).
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import numpy as np
from ethernet_frames import UDP_PORT, packet_of
from ethernet_results import Result
from wire import build_limits, run_limit

from gpunetio import Gpu, MemType, eth, kernel
from gpunetio import device as dev
from gpunetio.flow import FlowPort, match
from gpunetio.verbs import open

RUN, WARM_UP = 1_000_000_000, 300_000_000  # ns: of a measurement, and before it
PACKETS, DEPTH = 8192, 4096
BURST = 64  # packets that a kernel posts with one doorbell
MOST, IN_TIME = 256, 100_000  # packets that a kernel receives at a time, or what came in so many ns
PATIENCE = 60.0  # seconds for a process to start, in which it may have to compile, or to end
TESTPMD, TESTPMD_SECONDS = "dpdk-testpmd", 6
_NS = 1_000_000_000
_RATE = re.compile(r"Rx-pps:\s+(\d+)")


# --- ours ------------------------------------------------------------------------------------------------------------


@kernel
def send_for(txq, laddr, lkey, nbytes, duration, out):
    """Send copies of a packet for some ns. Write how many, or a negative status."""
    end = dev.clock_ns() + duration
    sent = 0
    status = 0
    while dev.clock_ns() < end and status >= 0:
        first = dev.txq_reserve(txq, BURST, dev.EXCLUSIVE)
        status = first
        if first >= 0:
            for index in range(first, first + BURST):
                dev.txq_prepare_send(txq, index, laddr, lkey, nbytes)
            status = dev.post(txq, first, first + BURST - 1, dev.EXCLUSIVE)
            sent += BURST
    dev.st64(out, sent if status >= 0 else status)


@kernel
def receive_for(rxq, patience, duration, out):
    """Receive for some ns from the first packet on. Write how many packets came, or a negative status, and the ns."""
    came = 0
    status = dev.rxq_recv(rxq, 1, patience)
    start = dev.clock_ns()
    now = start
    while now - start < duration and status >= 0:
        status = dev.rxq_recv(rxq, MOST, IN_TIME)
        came += status
        now = dev.clock_ns()
    dev.st64(out, came if status >= 0 else status)
    dev.st64(out + 8, now - start)


def receive(nbytes: int) -> None:
    """Be the receiving process. Say its MAC once it is ready, and in the end how many packets came, in how many ns."""
    with ExitStack() as undo:
        ctx, gpu = undo.enter_context(open("soft1")), undo.enter_context(Gpu("host"))
        rxq = undo.enter_context(eth.CyclicRxq(gpu, ctx.create_pd(), PACKETS, nbytes))
        out = undo.enter_context(gpu.alloc(16, MemType.CPU_GPU))
        receive_for[1, 1, gpu](rxq, 0, 0, out).wait(PATIENCE)  # compiles
        port = undo.enter_context(FlowPort(ctx))
        port.steer(match.udp(dst=UDP_PORT), to=rxq, count=False)
        print(ctx.provider.nic.mac.hex(), flush=True)  # type: ignore[attr-defined]
        receive_for[1, 1, gpu](rxq, int(PATIENCE * _NS), WARM_UP, out).wait(2 * PATIENCE)
        receive_for[1, 1, gpu](rxq, _NS, RUN, out).wait(PATIENCE)
        print(*out.array.view(np.int64).tolist(), flush=True)


def send(to: bytes, nbytes: int) -> None:
    """Be the sending process. Say how many packets it has sent."""
    with ExitStack() as undo:
        ctx, gpu = undo.enter_context(open("soft0")), undo.enter_context(Gpu("host"))
        pd = ctx.create_pd()
        txq = undo.enter_context(eth.EthTxq(gpu, pd, DEPTH))
        memory = undo.enter_context(gpu.alloc(nbytes, MemType.CPU_GPU))
        region, out = undo.enter_context(pd.register(memory)), undo.enter_context(gpu.alloc(8, MemType.CPU_GPU))
        mac = ctx.provider.nic.mac  # type: ignore[attr-defined]
        memory.array[:nbytes] = np.frombuffer(packet_of(to, mac, nbytes), np.uint8)
        arguments = (txq, memory, region.lkey, nbytes)
        send_for[1, 1, gpu](*arguments, 0, out).wait(PATIENCE)  # compiles
        send_for[1, 1, gpu](*arguments, RUN + 3 * WARM_UP, out).wait(PATIENCE)
        print(*out.array.view(np.int64).tolist(), flush=True)


def start(undo: ExitStack, core: int | None, *argv: str) -> subprocess.Popen[str]:
    """A process, on one core if it is given, which ends with the benchmark."""
    process = undo.enter_context(
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    undo.callback(process.kill)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a process says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{' '.join(map(str, process.args))}: {process.communicate()[1].strip()[-300:]}")  # type: ignore[arg-type]
    return line.strip()


def cores() -> tuple[int, int]:
    """Two cores; the same twice if there is one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def ours(nbytes: int) -> tuple[float, float]:
    """Packets that the receiver got per µs, and that the sender has sent for each of them."""
    here, there = cores()
    with ExitStack() as undo:
        receiver = start(undo, here, sys.executable, __file__, "receive", str(nbytes))
        mac = line_of(receiver)
        sender = start(undo, there, sys.executable, __file__, "send", mac, str(nbytes))
        came, ns = map(int, line_of(receiver).split())
        sent = int(line_of(sender))
    if came <= 0 or sent <= 0:
        raise SystemExit(f"{came} packets came of {sent}; a negative number is a status")
    return came * 1e3 / ns, sent / (RUN + 3 * WARM_UP) * 1e3


# --- the peers -------------------------------------------------------------------------------------------------------


def testpmd(nbytes: int) -> float:
    """Packets per µs that testpmd receives from testpmd through memif: the median of what it says every second."""
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory())
        processes = []
        for core, role, mode in zip(cores(), ("server", "client"), ("rxonly", "txonly"), strict=True):
            device = f"net_memif0,role={role},socket={folder}/memif,socket-abstract=no"
            argv = [TESTPMD, "--no-huge", "-m", "128", "--no-pci", "--lcores", f"0@{core},1@{core}", f"--vdev={device}"]
            argv += [f"--file-prefix={mode}{os.getpid()}", "--", f"--forward-mode={mode}", "--total-num-mbufs=8192"]
            argv += [f"--txpkts={nbytes}", "--stats-period=1", "--auto-start", "--no-mlockall"]
            processes.append(start(undo, core, *argv))
            time.sleep(1.0)  # the client connects once
        time.sleep(TESTPMD_SECONDS)
        for process in reversed(processes):
            process.terminate()
        text, said = processes[0].communicate(timeout=PATIENCE)
    rates = [int(rate) for rate in _RATE.findall(text)]
    moving = [rate / 1e6 for rate in rates if rate]
    if not moving:
        raise SystemExit(f"{TESTPMD} has received nothing: {said.strip()[-300:]}")
    return statistics.median(moving)


def pair(rounds: int, nbytes: int) -> list[Result]:
    """Both sides in turns. The rounds are few: each starts four processes."""
    found = shutil.which(TESTPMD) is not None
    goal = "≥ 3 × testpmd" + (", ≥ 4 Mpps" if nbytes == 64 else "")
    result = Result(f"two processes, {nbytes} B", "Mpps", "testpmd memif" if found else "C, shared memory", goal)
    sent = []
    with tempfile.TemporaryDirectory() as folder:
        program = "" if found else build_limits(folder)
        for _ in range(max(1, rounds // 3)):
            received, also = ours(nbytes)
            result.ours.append(received)
            sent.append(also)
            size = 1 << (nbytes - 1).bit_length()  # the limit moves powers of two
            limit = f"shm-messages --slot {size} --message {size} --count 4000000"
            result.theirs.append(testpmd(nbytes) if found else run_limit(program, limit, []))
    result.note = f"sent {statistics.median(sent):.2f} Mpps; what finds no room is lost"
    return [result]


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
