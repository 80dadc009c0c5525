"""What kernels and programs do wrong with queues of packets: one error that says so, and the rest goes on."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_kernels import collect, send_each, wait_for
from ethernet_rig import nic_of
from gpunetio import Gpu, MemType, PortConfig, device, eth, verbs
from gpunetio.errors import BadStateError, NotSupportedError, TimedOutError
from gpunetio.flow import FlowPort, match

FOREVER, NUMBER_AT = 1 << 62, 44
pytestmark = pytest.mark.soft_nic


class Bench:
    """Queues of one NIC: what is sent comes back, to a kernel that collects the words at NUMBER_AT."""

    def __init__(self, undo: contextlib.ExitStack):
        self.ctx = undo.enter_context(verbs.open("soft0", port=PortConfig(mtu=1500)))
        self.gpu = undo.enter_context(Gpu("host"))
        self.flows, self.pd = undo.enter_context(FlowPort(self.ctx)), self.ctx.create_pd()
        self.rxq = eth.CyclicRxq(self.gpu, self.pd, 1024, 128, memory=MemType.CPU_GPU)
        self.rule = self.flows.steer(match.udp(dst=53), self.rxq)
        self.memory, self.numbers, self.words, self.out = (
            self.gpu.alloc(nbytes, MemType.CPU_GPU) for nbytes in (1 << 16, 4096, 64, 64)
        )
        self.region = self.pd.register(self.memory)
        undo.callback(self.region.close)
        self.word, at = self.words.array.view(np.int64), self.words.device_address
        self.word[0] = FOREVER
        arguments = self.rxq, 64, 1_000_000, NUMBER_AT, at, self.numbers, at + 8, at + 16
        self.kernel = collect[1, 1, self.gpu](*arguments)
        undo.callback(self.stop)

    def stop(self) -> list[int]:
        """End the kernel. Return what it has collected."""
        self.word[1] = 1
        assert self.kernel.wait(60)
        assert self.word[4] >= 0
        return self.numbers.array.view(np.uint32)[: self.word[2]].tolist()

    def put(self, number: int, nbytes: int = 60) -> int:
        """Put a frame with a number into memory. Return its address."""
        frame = Ether(src="02:00:00:00:00:05", dst=nic_of(self.ctx).mac.hex(":")) / IP() / UDP(dport=53)
        data = bytes(frame / bytes(2) / number.to_bytes(4, "little") / bytes(nbytes - 48))
        self.memory.array[: len(data)] = np.frombuffer(data, np.uint8)
        return self.region.iova

    def send(self, txq: eth.EthTxq, address: int, lkey: int, nbytes: int = 60) -> int:
        """Send a packet by a kernel. Return the status."""
        arguments = 1, device.EXCLUSIVE, device.THREAD, device.DEFAULT, self.out
        assert send_each[1, 1, self.gpu](txq, 1, address, lkey, nbytes, *arguments).wait(60)
        ticket = int(self.out.array.view(np.int64)[0])
        assert wait_for[1, 1, self.gpu](txq, ticket, device.EXCLUSIVE, 1, self.out).wait(60)
        return int(self.out.array.view(np.int64)[0])


@pytest.fixture
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as undo:
        yield Bench(undo)


def test_a_queue_stays_while_a_kernel_uses_it(bench, monkeypatch):
    """The kernel goes on, and the queue closes when it has ended."""
    monkeypatch.setattr("gpunetio.eth.kernel_queue.LAUNCH_TIMEOUT", 0.05)
    bench.rule.close()
    with pytest.raises(TimedOutError, match=r"cyclic receive queue 0x\w+ .*kernel"):
        bench.rxq.close()
    assert not bench.rxq.closed
    with pytest.raises(BadStateError, match="cannot be reset"):
        bench.rxq.reset()
    with bench.flows.steer(match.udp(), bench.rxq), eth.EthTxq(bench.gpu, bench.pd, 64) as txq:
        assert bench.send(txq, bench.put(7), bench.region.lkey) == device.OK
        assert bench.stop() == [7]
    bench.rxq.close()


def test_a_packet_longer_than_a_place(bench):
    """It lies in the places behind its own, and the packets behind it come all the same."""
    with eth.EthTxq(bench.gpu, bench.pd, 64) as txq:
        for number, nbytes in enumerate((60, 1000, 60, 129, 128, 60)):
            assert bench.send(txq, bench.put(number, nbytes), bench.region.lkey, nbytes) == device.OK
    assert bench.stop() == list(range(6))


def test_packets_that_the_device_refuses(bench):
    """A key of another NIC, bytes outside a region, a packet longer than the MTU: they fail that send queue, alone."""
    with verbs.open("soft1") as other, eth.EthTxq(bench.gpu, bench.pd, 64) as good:
        elsewhere = other.create_pd().register(bench.memory)
        mtu = eth.query_caps(bench.ctx).mtu
        for address, lkey, nbytes, words, report in (
            (bench.region.iova, elsewhere.lkey, 60, "LOCAL_PROT", f"no memory region has lkey {elsewhere.lkey:#x}"),
            (bench.region.iova + (1 << 16), bench.region.lkey, 60, "LOCAL_PROT", "is outside the region of lkey"),
            (bench.region.iova, bench.region.lkey, mtu + 15, "LOCAL_LENGTH", f"the port sends 14 to {mtu + 14}"),
        ):
            with eth.EthTxq(bench.gpu, bench.pd, 64) as txq:
                assert bench.send(txq, address, lkey, nbytes) < 0
                assert words in str(txq.last_error())
                assert report in nic_of(bench.ctx).reports[-1].message
                assert bench.send(good, bench.put(nbytes), bench.region.lkey) == device.OK
                txq.reset()
                assert bench.send(txq, bench.put(nbytes + 1), bench.region.lkey) == device.OK
        elsewhere.close()
    assert bench.stop() == [60, 61, 60, 61, mtu + 15, mtu + 16]


def test_send_scheduling_is_off():
    """By the device's settings. Queues that do not wait for a time work."""
    with verbs.open("soft0", port=PortConfig(send_scheduling=False)) as ctx, Gpu("host") as gpu:
        pd = ctx.create_pd()
        assert eth.query_caps(ctx).wait_on_time is eth.WaitOnTime.NONE
        with pytest.raises(NotSupportedError, match="mode NONE"):
            eth.EthTxq(gpu, pd, wait_on_time=True)
        with eth.EthTxq(gpu, pd) as txq:
            assert txq.last_error() is None
