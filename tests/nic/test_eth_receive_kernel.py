"""Frames that the engine delivers to a striding queue, received by kernels of the host."""

import random

import numpy as np
import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_kernels import receive_all
from eth_receive_rig import Buffer, Cq, Rq, lead, opened, remove_rules, take
from ethernet_rig import Maker
from gpunetio import Gpu, MemType, device
from gpunetio.formats.commands import WqType
from gpunetio.formats.cqe import RxChecksum
from gpunetio.formats.device_structs import DEV_CQ
from gpunetio.formats.eth_device import DEV_ETH_RXQ, PACKET_ATTR
from gpunetio.formats.wqe import MIN_STRIDE_LOG, MIN_STRIDES_LOG, STRIDING_WQE
from gpunetio.memory import HostMemory

WQES, STRIDES, STRIDE = 4, 16, 256
SLOTS = WQES * STRIDES
DELIVERED = "rx_frame_delivered"


class Cyclic:
    """A cyclic striding queue that gets all frames, and the structure that kernels take."""

    def __init__(self, make: Maker):
        self.make = make
        self.cq, self.buffer = Cq(make, SLOTS.bit_length() - 1), Buffer(make, SLOTS * STRIDE)
        ring = {
            "wq_type": WqType.CYCLIC_STRIDING, "log_wqe_num_of_strides": 4 - MIN_STRIDES_LOG & 0xF,
            "log_wqe_stride_size": 8 - MIN_STRIDE_LOG,
        }
        self.rq = Rq(make, self.cq, log=2, wqe=STRIDING_WQE, wq=ring)
        for _ in range(WQES):
            nbytes = STRIDES * STRIDE
            self.rq.post(self.buffer.at(self.rq.posted * nbytes, nbytes))
        self.domain = make.domain()
        self.tir = make.direct(self.domain.number, self.rq.made.number)
        lead(make.ctx, self.tir.number, tag=77)
        self.structure = HostMemory(DEV_ETH_RXQ.size)
        q = DEV_ETH_RXQ.at(self.structure.array)
        q["packet_address"], q["dbrec"] = self.buffer.memory.address, self.rq.memory.address + self.rq.record_at
        q["packet_mask"], q["stride_shift"], q["strides_shift"], q["wqe_num"] = SLOTS - 1, 8, 4, WQES
        q["striding"], q["lkey"], q["tells_cq"] = 1, self.buffer.region.lkey, 1
        c = DEV_CQ.at(self.structure.array, DEV_ETH_RXQ.cq)
        c["cqe_daddr"], c["cqe_num"], c["cqe_mask"] = self.cq.memory.address, SLOTS, SLOTS - 1
        c["dbrec"], c["cqe_size"] = self.cq.memory.address + self.cq.record_at, 64

    def close(self) -> None:
        remove_rules(self.make.ctx)
        for made in (self.tir, self.domain, self.rq.made, self.cq.made):
            made.close()


@pytest.mark.host_memory
@pytest.mark.soft_nic
@pytest.mark.parametrize("scope", [device.THREAD, device.BLOCK], ids=["thread", "block"])
def test_many_laps(scope):
    """More frames than the ring has places, in bursts: bytes, lengths, tags and checks of each."""
    draw = random.Random(3)
    laps = 10 * SLOTS
    frames = [
        bytes(Ether() / IP(dst="10.0.0.1") / UDP(dport=n & 0xFFFF) / draw.randbytes(draw.randrange(200)))
        for n in range(laps)
    ]
    with opened() as ctx, Gpu("host") as gpu, gpu.alloc(laps * 64) as target, gpu.alloc(laps * 32) as attrs:
        queue = Cyclic(Maker(ctx))
        done = 0
        while done < laps:
            burst = min(draw.randrange(1, SLOTS + 1 - STRIDES), laps - done)
            assert take(ctx, frames[done : done + burst]) == [DELIVERED] * burst
            with gpu.alloc(64, MemType.CPU_GPU) as out:
                launch = receive_all[1, 4 if scope == device.BLOCK else 1, gpu](
                    queue.structure.address, burst, burst, scope, attrs.address + 32 * done,
                    target.address + 64 * done, out,
                )
                assert launch.wait(110)
                assert out.array.view(np.int64)[:2].tolist() == [burst, burst]
            done += burst
        found = attrs.array[: 32 * laps].view(PACKET_ATTR.dtype)
        assert found["bytes"].tolist() == [len(frame) for frame in frames]
        assert set(found["flow_tag"].tolist()) == {77}
        assert set(found["checks"].tolist()) == {int(RxChecksum.L2_OK | RxChecksum.L3_OK | RxChecksum.L4_OK)}
        assert (np.diff(found["timestamp_ns"]) >= 0).all()
        for n, frame in enumerate(frames):
            assert target.array[64 * n : 64 * n + min(64, len(frame))].tobytes() == frame[:64]
        queue.close()
