"""The queues of the application: their numbers for flow rules, their sizes, and the memory of their kernels."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

import numpy as np

from .. import device as dev
from ..enums import MemType
from ..eth import CyclicRxq, query_caps
from ..formats.layout import Entry
from ..formats.packet import ETHERNET, VLAN_TAG
from ..gpu import Gpu, GpuMemory, Semaphore
from ..verbs import PD
from .counts import ICMP_COUNTS, ITEMS, TCP_COUNTS, UDP_COUNTS, WORK

MAX_QUEUES = 4  # of UDP and of TCP each; there is one of ICMP
TXQ_DEPTH = 4096


class Protocol(Enum):
    """The packets of a receive queue: the first number of its queues for flow rules, and what its kernel counts."""

    first_id: int
    counts: Entry

    UDP  = 0, UDP_COUNTS
    TCP  = 4, TCP_COUNTS
    ICMP = 16, ICMP_COUNTS

    def __init__(self, first_id: int, counts: Entry):
        self.first_id, self.counts = first_id, counts


CPU_FIRST_ID = 12  # the number of the CPU's first queue. The original's queues 8 to 11 are not needed here


def queue_name(protocol: Protocol, number: int) -> str:
    """Return the name of a receive queue and its kernel in messages."""
    return f"{protocol.name} queue {number}"


@dataclass(frozen=True)
class Shape:
    """A queue of `packets` of `packet_bytes`, and its kernel of `threads`, which takes up to `burst` packets per turn.

    `patience_ns` is how long a turn waits for the first packet, and `scope` which threads receive together.
    """

    packets: int
    packet_bytes: int
    burst: int
    patience_ns: int
    threads: int
    scope: int


_BULK_ON_GPU = Shape(65536, 8192, 4096, 1_000_000, 512, dev.BLOCK)
_BULK_ON_HOST = Shape(4096, 8192, 256, 20_000_000, 1, dev.THREAD)
SHAPES = {
    "cuda": {
        Protocol.UDP: _BULK_ON_GPU, Protocol.TCP: _BULK_ON_GPU,
        Protocol.ICMP: Shape(16384, 512, 64, 50_000, 32, dev.WARP),
    },
    # A kernel thread of the host is an OS thread. Eight rings of the original's size would take 4 GiB of host memory.
    # Threads sleep until a packet comes, so they can wait for long.
    "cpu": {
        Protocol.UDP: _BULK_ON_HOST, Protocol.TCP: _BULK_ON_HOST,
        Protocol.ICMP: Shape(1024, 512, 64, 20_000_000, 1, dev.THREAD),
    },
}


class ReceiveQueue:
    """A receive queue and the memory of its kernel. `undo` closes it.

    `semaphore`   carries the kernel's counts to the CPU
    `sums`        what the kernel has counted and not yet published
    `work`        WORK: the state of the kernel
    """

    protocol: Protocol
    number: int
    shape: Shape
    rxq: CyclicRxq
    semaphore: Semaphore
    attrs: GpuMemory
    sums: GpuMemory
    work: GpuMemory

    def __init__(self, gpu: Gpu, pd: PD, protocol: Protocol, number: int, undo: ExitStack):
        shape = SHAPES[gpu.target][protocol]
        longest = query_caps(pd.ctx).mtu + ETHERNET.size + VLAN_TAG.size
        self.protocol, self.number, self.shape = protocol, number, shape
        self.rxq = undo.enter_context(CyclicRxq(
            gpu, pd, shape.packets, min(shape.packet_bytes, max(longest, 64)), queue_id=protocol.first_id + number
        ))
        counts = protocol.counts
        self.semaphore = gpu.create_semaphore(ITEMS, info=counts.dtype)
        undo.enter_context(self.semaphore)
        self.attrs = undo.enter_context(gpu.alloc(shape.burst * dev.ATTR_BYTES))
        self.sums = undo.enter_context(gpu.alloc(counts.size))
        self.work = undo.enter_context(gpu.alloc(WORK.size, MemType.CPU_GPU))
        for memory in (self.sums, self.work):
            memory.write(np.zeros(memory.nbytes, np.uint8))

    def __str__(self) -> str:
        return queue_name(self.protocol, self.number)

    @property
    def packets(self) -> int:
        """Return how many packets the kernel has received."""
        return int(WORK.at(self.work.array)["packets"])

    @property
    def arguments(self) -> tuple[object, ...]:
        """Return the arguments that every receive kernel takes after `stop`."""
        shape = self.shape
        return (
            self.rxq, self.semaphore, self.attrs, self.sums, self.work, shape.burst, shape.patience_ns, shape.scope
        )
