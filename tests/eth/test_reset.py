"""Queues of kernels that have failed begin anew: reset() moves them from ERR to RDY."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from scapy.layers.l2 import Ether

from eth_kernels import poll_each, receive, send_each
from eth_receive_rig import lead, remove_rules, take
from ethernet_rig import nic_of
from gpunetio import Gpu, MemType, device, eth
from gpunetio.enums import NicHandler
from gpunetio.errors import BadStateError
from gpunetio.formats.commands import Opcode
from gpunetio.formats.ethernet_queues import QueueState
from nic_rig import until, view

NBYTES = 64


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with Gpu("host") as gpu:
        yield gpu


class Received:
    """One call of `rxq_recv` after another, each in a kernel of its own."""

    def __init__(self, gpu: Gpu, rxq: eth.CyclicRxq):
        self.gpu, self.rxq, self.out = gpu, rxq, gpu.alloc(16, MemType.CPU_GPU)

    def __call__(self, most: int) -> tuple[int, int]:
        """Result, and index of the first packet."""
        assert receive[1, 1, self.gpu](self.rxq, most, 0, 0, device.THREAD, 0, self.out).wait(60)
        result, first = self.out.array.view(np.int64)[:2].tolist()
        return result, first


@pytest.mark.host_memory
@pytest.mark.parametrize("max_packet", [64, 9000], ids=["strides", "whole"])
def test_a_receive_queue_begins_at_its_first_place(ctx, pd, gpu, max_packet):
    with eth.CyclicRxq(gpu, pd, 1024, max_packet) as rxq:
        lead(ctx, rxq.tirn)
        call = Received(gpu, rxq)
        for arrived in (1, 700, 1024, 0, 3):
            frames = [bytes([arrived & 0xFF]) * 12 + n.to_bytes(4, "big") + bytes(40) for n in range(arrived)]
            assert take(ctx, frames) == ["rx_frame_delivered"] * arrived
            half = arrived // 2
            if half:
                assert call(half) == (half, 0)
            rxq.rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RDY, ctx={"state": QueueState.ERR})
            while (result := call(0)[0]) > 0:
                pass
            assert result == device.EIO
            assert "WR_FLUSH" in str(rxq.last_error())
            rxq.reset()
            assert (rxq.state, rxq.last_error()) == (QueueState.RDY, None)
            assert rxq.indices() == {"received": 0, "too_long": 0, "given_back": 0}
            assert take(ctx, frames) == ["rx_frame_delivered"] * arrived
            assert call(0) == (arrived, 0)
            start = rxq.region.address
            for n in range(0, arrived, 50):
                assert view(start + n * rxq.packet_stride, len(frames[n])).tobytes() == frames[n]
            rxq.reset()  # also a queue that has not failed
        remove_rules(ctx)


@pytest.mark.parametrize("options", [
    {}, {"nic_handler": NicHandler.CPU_PROXY}, {"completion_on_gpu": False},
], ids=["gpu", "proxy", "completions on the CPU"])
def test_a_send_queue_begins_at_its_first_block(ctx, pd, gpu, options):
    frame = bytes(Ether(dst=nic_of(ctx).mac.hex(":"))).ljust(NBYTES, b"\7")
    memory, out = gpu.alloc(4096, MemType.CPU_GPU), gpu.alloc(64 * 8, MemType.CPU_GPU)
    region = pd.register(memory)
    memory.array[:NBYTES] = list(frame)
    with eth.ManagedRxq(pd, 64, 1600) as rxq, eth.EthTxq(gpu, pd, 64, **options) as txq:
        lead(ctx, rxq.tirn)

        def send(count: int, lkey: int) -> None:
            how = (1, device.GPU, device.THREAD, device.DEFAULT)
            assert send_each[1, 1, gpu](txq, count, region.address, lkey, NBYTES, *how, out).wait(60)

        def poll() -> int:
            if not options.get("completion_on_gpu", True):
                (event, *_) = txq.wait_events(60)
                return device.EIO if event.error else 1
            assert poll_each[1, 1, gpu](txq, 1, 1, device.GPU, 1, out).wait(60)
            return int(out.array.view(np.int64)[0])

        for _ in range(3):
            send(1, region.lkey)
            assert poll() == 1
            send(1, 0xDEAD00)
            assert poll() == device.EIO
            until(lambda: txq.state is QueueState.ERR, "ERR")
            txq.reset()
            assert (txq.state, txq.last_error()) == (QueueState.RDY, None)
            assert txq.indices() == {"reserved": 0, "submitted": 0, "completed": 0, "notified": 0}
            send(1, region.lkey)
            assert poll() == 1
            with rxq.receive(least=2, timeout=10)[1] as packet:
                assert packet.data.tobytes() == frame
        remove_rules(ctx)


@pytest.mark.parametrize("kind", ["receive", "send"])
def test_no_reset_while_a_kernel_uses_the_queue(pd, gpu, kind):
    queue = eth.CyclicRxq(gpu, pd, 1024, 64) if kind == "receive" else eth.EthTxq(gpu, pd, 64)
    with queue:
        launch = SimpleNamespace(ended=False)
        queue.used_by(launch)
        with pytest.raises(BadStateError, match="cannot be reset while a kernel uses it: let the kernel end first"):
            queue.reset()
        launch.ended = True
        queue.reset()
    with pytest.raises(BadStateError, match="closed"):
        queue.reset()
