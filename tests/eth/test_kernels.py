"""Kernels that send and receive packets through two software NICs."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_echo_kernels import SLOT, there_and_back
from eth_receive_rig import lead, remove_rules
from ethernet_rig import nic_of
from gpunetio import Gpu, MemType, device, eth, verbs
from gpunetio.enums import NicHandler
from gpunetio.verbs import PD

BURST, ROOM = 64, 2048
pytestmark = pytest.mark.soft_nic


class End:
    """The queues of one NIC. Its receive queue gets all frames."""

    def __init__(self, name: str, gpu: Gpu, undo: ExitStack, **send: object):
        self.ctx = undo.enter_context(verbs.open(name))
        undo.callback(remove_rules, self.ctx)
        self.pd: PD = self.ctx.create_pd()
        self.rxq = eth.CyclicRxq(gpu, self.pd, 1024, ROOM, memory=MemType.CPU_GPU)
        self.txq = eth.EthTxq(gpu, self.pd, 256, **send)  # type: ignore[arg-type]
        lead(self.ctx, self.rxq.tirn)

    @property
    def mac(self) -> str:
        return nic_of(self.ctx).mac.hex(":")


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("handler", [NicHandler.GPU_SM_DB, NicHandler.CPU_PROXY])
@pytest.mark.parametrize("scope", [device.THREAD, device.BLOCK], ids=["thread", "block"])
def test_packets_go_there_and_back(gpu, undo, scope, handler):
    """For some laps of all rings: nothing is lost or changed, and every byte comes back."""
    near, far = (End(name, gpu, undo, nic_handler=handler) for name in ("soft0", "soft1"))
    memory = undo.enter_context(gpu.alloc(BURST * SLOT + 4096, MemType.CPU_GPU))
    region = near.pd.register(memory)
    nbytes, draw = 300, np.random.default_rng(1)
    for n in range(BURST):
        head = Ether(src=near.mac, dst=far.mac) / IP(id=n, len=nbytes - 14) / UDP(dport=n, len=nbytes - 34)
        payload = draw.integers(0, 256, nbytes - len(head), np.uint8)
        memory.array[n * SLOT : n * SLOT + nbytes] = [*bytes(head), *payload]
    attrs, out = (undo.enter_context(gpu.alloc(BURST * 32, MemType.CPU_GPU)) for _ in range(2))
    rounds = 2 * 1024 // BURST + 1
    launch = there_and_back[1, 4 if scope == device.BLOCK else 1, gpu](
        near.txq, near.rxq, far.txq, far.rxq, rounds, BURST, region.address, region.lkey, nbytes, attrs, scope, out
    )
    assert launch.wait(110)
    assert out.array.view(np.int64)[:2].tolist() == [0, rounds]
    for end in (near, far):
        assert end.txq.indices()["submitted"] == end.rxq.indices()["received"] == rounds * BURST
        assert end.txq.last_error() is None
