"""A queue whose operations the NIC counts, for programs of device calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from device_programs import Call
from gpunetio import ExportedQp, Gpu, GpuMemory, MemType, QpGroup, verbs

PLACE = 256  # bytes of a thread
COUNTERS = 1 << 15  # where counters are; their old values go to the words from OLD on
OLD = COUNTERS + 4096
NBYTES = 1 << 16


@dataclass
class Counting:
    """A queue with its companion, which adds at a peer of its own, or in a loop to memory here."""

    gpu: Gpu
    pd: verbs.PD
    group: QpGroup
    peers: list[ExportedQp]
    here: GpuMemory
    there: GpuMemory
    here_mr: verbs.MR
    there_mr: verbs.MR

    @property
    def nic(self):
        return self.pd.ctx.provider.nic  # type: ignore[attr-defined]

    def keys(self, t: int = 0, counter: int = 0, **more: object) -> Call:
        """What a call of thread `t` needs: places of its own, and a counter."""
        at = t * PLACE
        return {
            "qp": self.group.main, "companion": self.group.companion,
            "raddr": self.there.address + at, "rkey": self.there_mr.rkey,
            "laddr": self.here.address + at, "lkey": self.here_mr.lkey,
            "sig_raddr": self.there.address + at + 128, "sig_rkey": self.there_mr.rkey,
            "sig_laddr": self.here.address + at + 136, "sig_lkey": self.here_mr.lkey,
            "counter_raddr": self.there.address + COUNTERS + 8 * counter, "counter_rkey": self.there_mr.rkey,
            "counter_laddr": self.here.address + OLD + 8 * t, "counter_lkey": self.here_mr.lkey, "counter_value": 1,
            **more,
        }

    def counter(self, number: int = 0) -> int:
        return int(self.there.array[COUNTERS:].view(np.int64)[number])

    def reset(self, *ends: ExportedQp) -> None:
        for end in ends:
            end.qp.reset()
            end.reset()

    def begin_anew(self) -> None:
        self.reset(self.group.main, self.group.companion, *self.peers)
        self.group.main.connect(self.peers[0])
        self.group.companion.connect(self.peers[1])
        random = np.random.default_rng(5)
        self.here.array[:] = random.integers(0, 256, NBYTES, np.uint8)
        self.there.array[:] = 0


@contextmanager
def opened(gpu: Gpu, depth: int, collapsed: bool) -> Iterator[Counting]:
    """A `Counting` on soft0."""
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        group = gpu.create_qp_group(pd, depth, cq_collapsed=collapsed, timeout=10.0)
        peers = [gpu.create_qp(pd, 8) for _ in range(2)]
        here, there = gpu.alloc(NBYTES, MemType.CPU_GPU), gpu.alloc(NBYTES, MemType.CPU_GPU)
        yield Counting(gpu, pd, group, peers, here, there, pd.register(here), pd.register(there))
        group.close()
        for peer in peers:
            peer.close()
