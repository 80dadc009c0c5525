"""Kernels of the host sleep while they wait for packets. They wake for a packet, an error, and at their deadline."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from eth_receive_rig import remove_rules
from gpunetio import Gpu, MemType, device, eth, kernel, verbs
from gpunetio.flow import FlowPort, match
from gpunetio.formats.commands import Opcode
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.jit.code import Launch
from gpunetio.memory import HostMemory
from nic_rig import view

LONG = 5_000_000_000  # ns
ASLEEP = 0.02  # seconds after which a kernel without packets certainly sleeps
FIRST_TYPE = 0x88B5  # IEEE 802: for local experiments

pytestmark = pytest.mark.soft_nic


@kernel
def take(rxq, count, patience_ns, scope, out):
    """Receive packets one at a time, up to `count`. Store the last result, and how many there were."""
    taken = 0
    result = 1
    while taken < count and result > 0:
        result = device.rxq_recv(rxq, 1, patience_ns, 0, scope)
        taken += max(result, 0)
    if device.thread_idx() == 0:
        device.st64(out, result)
        device.st64(out + 8, taken)


class Rig:
    """Queues of a NIC, one for each ether type from FIRST_TYPE on, and another NIC that sends to them."""

    def __init__(self, queues: int, undo: ExitStack, warp: int = 1):
        self.gpu = undo.enter_context(Gpu("host", warp=warp))
        self.near, self.far = (undo.enter_context(verbs.open(name)) for name in ("soft0", "soft1"))
        undo.callback(remove_rules, self.near)
        rules = undo.enter_context(FlowPort(self.near))
        pd = self.near.create_pd()
        self.rxqs = [undo.enter_context(eth.CyclicRxq(self.gpu, pd, 1024, 2048)) for _ in range(queues)]
        self.out = undo.enter_context(self.gpu.alloc(64 * queues, MemType.CPU_GPU))
        self.rules = [
            undo.enter_context(rules.steer(match.eth(ether_type=FIRST_TYPE + i), to=rxq))
            for i, rxq in enumerate(self.rxqs)
        ]
        pd = self.far.create_pd()
        self.frame = pd.register(HostMemory(64))
        self.sends = undo.enter_context(eth.CpuTxq(pd, 256))

    def launch(self, number: int, count: int, patience_ns: int = LONG, threads: int = 1) -> Launch:
        scope = device.THREAD if threads == 1 else device.BLOCK
        at = self.out.device_address + 64 * number
        return take[1, threads, self.gpu](self.rxqs[number], count, patience_ns, scope, at)

    def send(self, number: int) -> None:
        """Send a packet to a queue."""
        head = eth.query_caps(self.near).mac + eth.query_caps(self.far).mac + (FIRST_TYPE + number).to_bytes(2, "big")
        view(self.frame.address, len(head))[:] = np.frombuffer(head, np.uint8)
        self.sends.send(self.frame)
        assert self.sends.completions(timeout=10)[0].error is None

    def taken(self, number: int) -> tuple[int, int]:
        """The last result, and how many packets were taken."""
        result, taken = self.out.array.view(np.int64).reshape(-1, 8)[number, :2].tolist()
        return result, taken


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("threads", [1, 4])
def test_packets_wake_a_kernel(undo, threads):
    """It would sleep for five seconds. Some packets come when it has just gone to sleep, some while it still looks."""
    rig = Rig(1, undo, warp=threads)
    launch = rig.launch(0, 60, threads=threads)
    for i in range(60):
        time.sleep((0, 50e-6, ASLEEP)[i % 3])
        rig.send(0)
    assert launch.wait(30)
    assert rig.taken(0) == (1, 60)


def test_each_kernel_wakes_for_its_own_packets(undo):
    rig = Rig(3, undo)
    launches = [rig.launch(number, 20) for number in range(3)]
    for i in range(20):
        for number in (0, 2, 1) if i % 2 else (2, 1, 0):
            time.sleep(0.002)
            rig.send(number)
    assert all(launch.wait(30) for launch in launches)
    assert [rig.taken(number) for number in range(3)] == [(1, 20)] * 3


def test_a_receive_ends_in_time(undo):
    """Nothing comes: each receive ends without packets, however long the kernel has been idle."""
    rig = Rig(1, undo)
    for _ in range(3):
        assert rig.launch(0, 1, patience_ns=5_000_000).wait(30)
        assert rig.taken(0) == (0, 0)


def test_an_error_wakes_a_kernel(undo):
    rig = Rig(1, undo)
    launch = rig.launch(0, 1)
    time.sleep(ASLEEP)
    rig.rxqs[0].rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RDY, ctx={"state": QueueState.ERR})
    assert launch.wait(30)
    assert rig.taken(0) == (device.EIO, 0)
    rig.rxqs[0].reset()
    launch = rig.launch(0, 1)
    time.sleep(ASLEEP)
    rig.send(0)
    assert launch.wait(30)
    assert rig.taken(0) == (1, 1)


def test_closing_waits_for_a_kernel_that_sleeps(undo):
    rig = Rig(1, undo)
    launch = rig.launch(0, 1, patience_ns=200_000_000)
    time.sleep(ASLEEP)
    rig.rules[0].close()
    rig.rxqs[0].close()
    assert launch.done
    assert rig.taken(0) == (0, 0)


def test_a_fork_disturbs_no_kernel_that_sleeps(undo):
    rig = Rig(1, undo)
    launch = rig.launch(0, 2)
    time.sleep(ASLEEP)
    child = os.fork()
    if child == 0:
        os._exit(0)
    rig.send(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(ASLEEP)
    rig.send(0)
    assert launch.wait(30)
    assert rig.taken(0) == (1, 2)


def ticks(thread: str) -> int:
    """The CPU time of a thread of this process, in clock ticks."""
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_kernel_that_waits_takes_next_to_no_cpu_time(undo):
    """A tenth of a core is many times what it takes, and a tenth of what a thread takes that spins."""
    rig = Rig(1, undo)
    before = set(os.listdir("/proc/self/task"))
    launch = rig.launch(0, 1)
    (thread,) = set(os.listdir("/proc/self/task")) - before
    time.sleep(ASLEEP)
    began = ticks(thread)
    time.sleep(1)
    assert ticks(thread) - began < os.sysconf("SC_CLK_TCK") / 10
    rig.send(0)
    assert launch.wait(30)
