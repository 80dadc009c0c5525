"""Where packets, rings, completions and semaphores lie: kernels exchange packets through two NICs from each place."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_echo_kernels import SLOT, there_and_back
from eth_hand_over_kernel import hand_over, send_slots
from eth_kernels import send_each
from gpunetio import Gpu, GpuMemory, MemType, device, eth, verbs
from gpunetio.flow import FlowPort, match
from gpunetio.verbs import PD

PORT, NBYTES, BURST, ROUNDS = 4000, 300, 16, 70  # more than a lap of the receive queues
PORT_AT = 34  # of a frame: the source port
pytestmark = pytest.mark.soft_nic


def frames(count: int) -> np.ndarray:
    """Frames of UDP, a SLOT each, whose source ports count."""
    slots = np.zeros((count, SLOT), np.uint8)
    for n in range(count):
        head = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02") / IP() / UDP(sport=n, dport=PORT)
        slots[n, :NBYTES] = np.frombuffer(bytes(head / np.random.default_rng(n).bytes(NBYTES - 42)), np.uint8)
    return slots.reshape(-1)


class End:
    """The queues of one NIC, and a rule."""

    def __init__(self, name: str, gpu: Gpu, undo: ExitStack, receive: dict[str, object], send: dict[str, object]):
        self.ctx = undo.enter_context(verbs.open(name))
        self.pd: PD = self.ctx.create_pd()
        self.rxq = eth.CyclicRxq(gpu, self.pd, 1024, SLOT, **receive)  # type: ignore[arg-type]
        self.txq = eth.EthTxq(gpu, self.pd, 256, **send)  # type: ignore[arg-type]
        undo.enter_context(FlowPort(self.ctx)).steer(match.udp(dst=PORT), to=self.rxq)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("receive", "send"),
    [
        pytest.param({"memory": MemType.GPU}, {}, id="packets-gpu"),
        pytest.param({"memory": MemType.GPU_CPU}, {}, id="packets-gpu-cpu"),
        pytest.param({"queue_memory": "cpu_gpu"}, {"queue_memory": "cpu_gpu"}, id="queues-cpu"),
        pytest.param({"memory": MemType.GPU, "mcst": True}, {}, id="mcst"),
    ],
)
@pytest.mark.parametrize("scope", [device.THREAD, device.BLOCK], ids=["thread", "block"])
def test_packets_go_there_and_back(gpu, undo, receive, send, scope):
    near, far = (End(name, gpu, undo, receive, send) for name in ("soft0", "soft1"))
    memory = undo.enter_context(gpu.alloc(BURST * SLOT, receive.get("memory", MemType.CPU_GPU)))
    memory.write(frames(BURST))
    region = near.pd.register(memory)
    attrs, out = (undo.enter_context(gpu.alloc(BURST * 32, MemType.CPU_GPU)) for _ in range(2))
    launch = there_and_back[1, 4 if scope == device.BLOCK else 1, gpu](
        near.txq, near.rxq, far.txq, far.rxq, ROUNDS, BURST, memory.address, region.lkey, NBYTES, attrs, scope, out
    )
    assert launch.wait(110)
    assert out.array.view(np.int64)[:2].tolist() == [0, ROUNDS]
    region.close()


def test_the_cpu_frees_the_slots(gpu, undo):
    """Kernels cannot poll. Packets with NOTIFY become events, in their order, and 5 rings of packets leave."""
    near, far = (End(name, gpu, undo, {}, {"completion_on_gpu": False}) for name in ("soft0", "soft1"))
    count, every = 5 * 256, 8
    memory = undo.enter_context(gpu.alloc(16 * count + SLOT, MemType.CPU_GPU))
    tickets = undo.enter_context(gpu.alloc(8 * count, MemType.CPU_GPU))
    memory.write(frames(1)[:SLOT])
    for n in range(count):  # each packet begins 16 bytes behind the one before, all with the same MACs
        memory.array[16 * n : 16 * n + 16] = memory.array[:16]
    launch = send_each[1, 1, gpu](
        near.txq, count, memory.device_address, near.pd.register(memory).lkey, 60, every, device.GPU, device.THREAD,
        device.DEFAULT, tickets,
    )
    events, deadline = [], time.monotonic() + 60
    while len(events) < count // every and time.monotonic() < deadline:
        events += near.txq.wait_events(1)
    assert launch.wait(60)
    assert tickets.array.view(np.int64).tolist() == list(range(count))
    assert [event.position for event in events] == list(range(every - 1, count, every))
    assert not any(event.error for event in events)
    assert far.rxq.indices()["received"] == 0


@pytest.mark.parametrize("kind", list(MemType))
def test_packets_are_handed_over(gpu, undo, kind):
    near, far = (End(name, gpu, undo, {}, {}) for name in ("soft0", "soft1"))
    total, items = 200, 4
    semaphore = undo.enter_context(gpu.create_semaphore(items, memory=kind, info="<i8"))
    memory: GpuMemory = undo.enter_context(gpu.alloc(total * SLOT, MemType.CPU_GPU))
    seen = undo.enter_context(gpu.alloc(2 * total, MemType.CPU_GPU))
    out = undo.enter_context(gpu.alloc(64, MemType.CPU_GPU))
    memory.write(frames(total))
    lkey = near.pd.register(memory).lkey
    assert send_slots[1, 1, gpu](near.txq, memory, lkey, NBYTES, SLOT, total, out).wait(110)
    assert out.array.view(np.int64)[0] == device.OK
    assert hand_over[2, 1, gpu](far.rxq, semaphore, items, total, PORT_AT, seen, out).wait(110)
    assert out.array.view(np.int64)[:2].tolist() == [total, total]
    assert seen.array.view(">u2").tolist() == list(range(total))
    assert [int(semaphore.status(i)) for i in range(items)] == [device.SEM_FREE] * items
