"""Queues under traffic: floods, short time-outs, and rules that come and go. Packets are numbered."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_kernels import collect
from ethernet_rig import nic_of
from gpunetio import Gpu, MemType, PortConfig, eth, verbs
from gpunetio.errors import InUseError
from gpunetio.flow import FlowPort, match
from gpunetio.memory import HostMemory
from nic_rig import until
from stream_end import StreamEnd

NUMBER_AT, NBYTES, FILL = 44, 60, 0xA5
NO_BUFFER, DELIVERED = "rx_frame_no_buffer", "rx_frame_delivered"
FOREVER = 1 << 62
pytestmark = pytest.mark.soft_nic


class Traffic:
    """A NIC whose other end sends UDP packets with numbers, and a flow port."""

    def __init__(self, path: Any, undo: contextlib.ExitStack):
        port = PortConfig(addresses="10.9.0.1", wire=f"unix:{path}")
        self.ctx = undo.enter_context(verbs.open("soft0", port=port))
        self.gpu = undo.enter_context(Gpu("host"))
        self.pd, self.flows = self.ctx.create_pd(), undo.enter_context(FlowPort(self.ctx))
        self.end = undo.enter_context(contextlib.closing(StreamEnd(path)))
        self.counters = nic_of(self.ctx).counters
        self.sent = 0

    def frames(self, first: int, count: int, port: int) -> bytes:
        """Frames of a stream, with numbers from `first` on."""
        head = bytes(Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06") / IP(len=46) / UDP(dport=port, len=26))
        rows = np.zeros((count, 4 + NBYTES), np.uint8)
        rows[:, :4], rows[:, 4 : 4 + len(head)] = list(NBYTES.to_bytes(4, "big")), list(head)
        numbers = np.arange(first, first + count, dtype="<u4")
        rows[:, 4 + NUMBER_AT : 8 + NUMBER_AT] = numbers.view(np.uint8).reshape(-1, 4)
        return rows.tobytes()

    def send(self, first: int, count: int, port: int = 53) -> None:
        self.end.sock.sendall(self.frames(first, count, port))
        self.sent += count

    def settle(self) -> None:
        until(lambda: self.counters["rx_frames"] == self.sent, "the packets have arrived")
        nic_of(self.ctx).engine.synchronize()


class Collector:
    """A kernel that collects numbers from a cyclic queue, of its own rule."""

    def __init__(self, traffic: Traffic, port: int, room: int, timeout_ns: int, allowed: int):
        gpu = traffic.gpu
        self.rxq = eth.CyclicRxq(gpu, traffic.pd, 1024, 128, memory=MemType.CPU_GPU)
        traffic.flows.steer(match.udp(dst=port), self.rxq)
        self.numbers, self.words = (gpu.alloc(nbytes, MemType.CPU_GPU) for nbytes in (4 * room, 64))
        self.at = self.words.device_address
        self.word = self.words.array.view(np.int64)  # allowed, stop, and what the kernel says
        self.word[0] = allowed
        self.launch = collect[1, 1, gpu](
            self.rxq, 64, timeout_ns, NUMBER_AT, self.at, self.numbers, self.at + 8, self.at + 16
        )

    def end(self) -> list[int]:
        """Let the kernel take all that is there. Return the numbers."""
        self.word[0], self.word[1] = FOREVER, 1
        assert self.launch.wait(60)
        got, _, status = self.word[2:5].tolist()
        assert status >= 0, self.rxq.last_error()
        return self.numbers.array.view(np.uint32)[:got].tolist()


@pytest.fixture
def traffic(tmp_path) -> Iterator[Traffic]:
    with contextlib.ExitStack() as undo:
        yield Traffic(tmp_path / "s", undo)


def test_a_flood_at_twice_the_drain_rate(traffic):
    """What the slow kernel misses is counted, and the rest is in order. The other queue misses nothing."""
    slow, fast = Collector(traffic, 53, 20_000, 10_000_000, 0), Collector(traffic, 54, 20_000, 10_000_000, FOREVER)
    total, step = 4096, 64
    for first in range(0, total, step):
        traffic.send(first, step)
        traffic.send(first, step, port=54)
        traffic.settle()
        slow.word[0] += step // 2
        until(lambda wanted=first + step: fast.rxq.indices()["received"] >= wanted, "the fast kernel")
    assert fast.end() == list(range(total))
    taken = slow.end()
    dropped = traffic.counters[NO_BUFFER]
    assert len(taken) + dropped == total
    assert dropped > total // 2 - 1024 - step
    assert taken == sorted(set(taken))
    assert traffic.counters[DELIVERED] == total + len(taken)


def test_time_outs_while_packets_arrive(traffic):
    """A receive ends at its time-out at any moment of an arrival. Each packet comes once, in order, or is counted."""
    one = Collector(traffic, 53, 40_000, 2_000, FOREVER)
    total = 0
    for count in [1, 2, 3, 5, 8, 13, 64, 100] * 40:
        traffic.send(total, count)
        total += count
    traffic.settle()
    time.sleep(0.01)
    taken = one.end()
    assert taken == sorted(set(taken))
    assert len(taken) + traffic.counters[NO_BUFFER] == total
    assert one.word[3] > 0  # it has waited in vain


class Pool:
    """A queue of the CPU in memory of its own, its rule, and the numbers that it has received."""

    def __init__(self, traffic: Traffic, priority: int):
        self.memory = HostMemory(eth.ManagedRxq.estimate_buffer(64, 64))
        self.rxq = eth.ManagedRxq(traffic.pd, 64, 64, buffer=traffic.pd.register(self.memory))
        self.rule = traffic.flows.steer(match.udp(dst=53), self.rxq, priority=priority)
        self.numbers: list[int] = []

    def take(self, least: int = 1, timeout: float = 0) -> int:
        packets = self.rxq.receive(64, least=least, timeout=timeout)
        for packet in packets:
            self.numbers.append(int.from_bytes(packet.data[NUMBER_AT : NUMBER_AT + 4].tobytes(), "little"))
            packet.release()
        return len(packets)

    def close(self) -> None:
        """Close the rule, take what is there, and close the queue."""
        self.rule.close()
        while self.take():
            pass
        self.rxq.close()
        self.memory.array[:] = FILL


def test_rules_and_queues_come_and_go(traffic):
    """One queue follows another, by a rule above or below the one before. Each packet goes to one queue, and none to
    a queue that is closed.
    """
    stop, failed = threading.Event(), []

    def send() -> None:
        try:
            while not stop.is_set():
                traffic.send(traffic.sent, 8)
        except BaseException as error:
            failed.append(error)

    pools = [Pool(traffic, priority=0)]
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for turn in range(1, 16):
            last = pools[-1]
            last.take(8, timeout=30)
            with pytest.raises(InUseError, match="is still used by"):
                last.rxq.close()
            pools.append(Pool(traffic, priority=turn % 2))
            last.close()
    finally:
        stop.set()
        sender.join(30)
    traffic.settle()
    while pools[-1].take():
        pass
    assert not failed
    assert all((pool.memory.array == FILL).all() for pool in pools[:-1])
    for pool in pools:
        assert pool.numbers == sorted(pool.numbers)
        assert len(pool.numbers) >= 8 or pool is pools[-1]
    numbers = [number for pool in pools for number in pool.numbers]
    assert len(set(numbers)) == len(numbers)
    assert traffic.counters[DELIVERED] == len(numbers) == traffic.sent - traffic.counters[NO_BUFFER]
