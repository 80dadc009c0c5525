"""One end of a benchmark in this process: queue pairs, data, and the words that count messages."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..enums import Access, MemType
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..jit.cuda_launch import capability_of
from ..verbs import MR, PD, Context
from . import launches
from .ends import End
from .kernels.parts import MOST_THREADS
from .options import Options
from .words import Order, Words

_WORDS = MOST_THREADS + 1  # the last one for no-op messages
_RIGHTS = Access.all() | Access.RELAXED_ORDERING  # as perftest registers memory


def _before_hopper(gpu: Gpu) -> bool:
    """Return whether a GPU may see a completion before the data that the NIC wrote into its memory."""
    return gpu.target == "cuda" and capability_of(gpu.ordinal) < (9, 0)


@dataclass(frozen=True)
class Shown:
    """The description of this end's memory for the other end: data and words."""

    address: int
    rkey: int
    words_address: int = 0
    words_rkey: int = 0


class Side:
    """The client or the server, with buffers of `room` bytes. `stack` closes what it opens.

    `qps`, `companions`  the queue pairs, and the companions that count their completions, if any
    `data`               what is sent, or where data arrive
    `back`               where the client of a latency test gets them back
    """

    client: bool
    options: Options
    data: GpuMemory
    data_mr: MR
    back: GpuMemory
    back_mr: MR
    words: GpuMemory
    words_mr: MR

    def __init__(self, ctx: Context, gpu: Gpu, options: Options, client: bool, room: int, stack: ExitStack):
        self.client, self.options = client, options
        self._gpu, self._stack = gpu, stack
        pd = ctx.create_pd()
        self.qps: list[ExportedQp] = []
        self.companions: list[ExportedQp] = []
        for _ in range(options.qps):
            self._add_queue(pd)
        self.data, self.data_mr = self._buffer(pd, room, options.payload_memory)
        self.back, self.back_mr = self.data, self.data_mr
        if options.benchmark.latency and client:
            self.back, self.back_mr = self._buffer(pd, room, options.payload_memory)
        self.words, self.words_mr = self._buffer(pd, 2 * 8 * _WORDS, MemType.CPU_GPU)

    def _buffer(self, pd: PD, nbytes: int, kind: MemType) -> tuple[GpuMemory, MR]:
        memory = self._gpu.alloc(nbytes, kind)
        return memory, pd.register(memory, _RIGHTS)

    def _add_queue(self, pd: PD) -> None:
        options, gpu = self.options, self._gpu
        benchmark, depth = options.benchmark, options.slots(gpu.target)
        handler, mode, timeout = options.nic_handler, options.send_dbr_mode, launches.WAIT_SECONDS
        if benchmark.companion:
            group = gpu.create_qp_group(pd, depth, nic_handler=handler, send_dbr_mode=mode, timeout=timeout)
            self._keep(self.qps, group.main)
            self._keep(self.companions, group.companion)
        else:
            self._keep(self.qps, gpu.create_qp(
                pd, depth, receives=depth if benchmark.two_sided else 0, cq_collapsed=benchmark.collapsed,
                cqe_inline=options.inline, nic_handler=handler, send_dbr_mode=mode, timeout=timeout,
            ))

    def _keep(self, queues: list[ExportedQp], queue: ExportedQp) -> None:
        self._stack.callback(queue.close)  # must happen before the memory named by its WQEs is freed
        queues.append(queue)

    @property
    def queues(self) -> list[ExportedQp]:
        """Return all queue pairs, in the order in which those of two ends are connected."""
        return [*self.qps, *self.companions]

    @property
    def inbox(self) -> GpuMemory:
        """Return the memory where the other end's messages arrive."""
        return self.back

    @property
    def shown(self) -> Shown:
        """Return the description of this end's memory."""
        return Shown(self.back.device_address, self.back_mr.rkey, self.words.device_address, self.words_mr.rkey)

    def rows(self, far: Shown, marks: GpuMemory | None, notes: GpuMemory) -> list[End]:
        """Return one row per queue, which describes this end to kernels."""
        words = self.words.device_address
        return [
            End(
                qp=queue.device_address,
                companion=self.companions[i].device_address if self.companions else 0,
                client=int(self.client),
                laddr=self.data.device_address, lkey=self.data_mr.lkey,
                raddr=far.address, rkey=far.rkey,
                inbox=self.inbox.device_address,
                flags=words + 8 * i, far_flags=far.words_address, far_rkey=far.words_rkey,
                old=words + 8 * _WORDS, words_lkey=self.words_mr.lkey,
                marks=marks.device_address if marks else 0, notes=notes.device_address,
                receives=queue.qp.rq_entries, inline=int(self.options.inline),
                dump=self.data.device_address if self._dumps else 0,
            )
            for i, queue in enumerate(self.qps)
        ]

    @property
    def _dumps(self) -> bool:
        """Return whether data read into this end's memory may arrive after their completion."""
        options = self.options
        return options.benchmark.reads and options.payload_memory is MemType.GPU and _before_hopper(self._gpu)

    def counts(self, notes: np.ndarray) -> list[Words | Order]:
        """Return the words of this end that show which messages arrived.

        `notes` is what a receiving kernel recorded.
        """
        benchmark, who = self.options.benchmark, "client" if self.client else "server"
        flags, old = (part[:MOST_THREADS] for part in self.words.array.view(np.int64)[: 2 * _WORDS].reshape(2, _WORDS))
        if benchmark.two_sided:
            return [Words("the client's credit", flags, 0, every_launch=True)] if self.client else [Order(notes)]
        if not benchmark.counts:
            return []
        arrived = Words(f"the {who}'s flag", flags, 0, told=not benchmark.latency)
        sent = Words(f"the {who}'s old value of flag", old, -1)
        if benchmark.latency:
            return [arrived, sent]
        return [sent] if self.client else [arrived]
