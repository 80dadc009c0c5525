"""Two-sided traffic of kernels on one software NIC: queues, shared receive queues, places of messages."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from device_programs import Call, Started, run, start
from gpunetio import CqOverrun, ExportedQp, Gpu, GpuMemory, MemType, QpType, verbs
from gpunetio.enums import SrqType

NBYTES = 1 << 20
SLOT = 512  # bytes of a message's place


@dataclass
class Post:
    """A software NIC with memory to send from, `here`, and to receive into, `there`."""

    gpu: Gpu
    ctx: verbs.Context
    pd: verbs.PD
    here: GpuMemory
    there: GpuMemory
    here_mr: verbs.MR
    there_mr: verbs.MR
    exported: list[ExportedQp] = field(default_factory=list)

    @property
    def nic(self) -> Any:
        return self.ctx.provider.nic  # type: ignore[attr-defined]

    def queue(self, receives: int = 16, cqe: int = 0, timeout: float = 20.0, **attr: Any) -> ExportedQp:
        """A queue pair with `receives` receives, or with an `srq`, whose receive CQ has `cqe` entries and may overrun
        unless that was given."""
        pd, ctx = self.pd, self.ctx
        overrun = CqOverrun.DISABLE if cqe else CqOverrun.ENABLE
        srq = attr.get("srq")
        qp = pd.create_qp(
            sq_wr=64,
            send_cq=ctx.create_cq(64, overrun=CqOverrun.ENABLE, external_datapath=True),
            rq_wr=0 if srq else receives,
            receive_cq=ctx.create_cq(
                cqe or 1 << (max(4, srq.entries if srq else receives) - 1).bit_length(), overrun=overrun,
                external_datapath=True,
            ),
            external_datapath=True,
            **attr,
        )
        self.exported.append(self.gpu.export_qp(qp, timeout=timeout))
        return self.exported[-1]

    def pair(self, receives: int = 16, qp_type: QpType = QpType.RC, **attr: Any) -> tuple[ExportedQp, ExportedQp]:
        """A sender, and a receiver with these attributes."""
        a, b = self.queue(1, qp_type=qp_type, timeout=attr.get("timeout", 20.0)), self.queue(
            receives, qp_type=qp_type, **attr
        )
        self.connect(a, b)
        return a, b

    @staticmethod
    def connect(a: ExportedQp, b: ExportedQp) -> None:
        a.connect(b, rnr_retry=7, min_rnr_timer=1)

    def srq(self, entries: int) -> verbs.SRQ:
        return self.pd.create_srq(entries, srq_type=SrqType.CONTIGUOUS, external_datapath=True)

    def sending(self, qp: ExportedQp, number: int, nbytes: int, **more: Any) -> Call:
        """A call that sends message `number`."""
        return {
            "what": "send", "qp": qp, "laddr": self.here.address + SLOT * number, "lkey": self.here_mr.lkey,
            "nbytes": nbytes, **more,
        }

    def receiving(self, qp: ExportedQp, number: int, nbytes: int = SLOT, **more: Any) -> Call:
        """A call that posts a receive to place `number`."""
        return {
            "what": "recv", "qp": qp, "laddr": self.there.address + SLOT * number, "lkey": self.there_mr.lkey,
            "nbytes": nbytes, **more,
        }

    def run(self, program: list[list[Call]], grid: int = 1, **common: Any) -> list[list[int]]:
        return run(self.gpu, program, grid, **common).tolist()

    def alone(self, *calls: Call, **common: Any) -> list[int]:
        """The results of one thread's calls."""
        return [row[0] for row in self.run([[call] for call in calls], **common)]

    def start(self, *calls: Call, **common: Any) -> Started:
        return start(self.gpu, [[call] for call in calls], **common)

    def message(self, number: int, nbytes: int) -> np.ndarray:
        return self.here.array[SLOT * number : SLOT * number + nbytes]

    def place(self, number: int, nbytes: int = SLOT) -> np.ndarray:
        return self.there.array[SLOT * number : SLOT * number + nbytes]


def opened(gpu: Gpu) -> Iterator[Post]:
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        here, there = gpu.alloc(NBYTES, MemType.CPU_GPU), gpu.alloc(NBYTES, MemType.CPU_GPU)
        here.array[:] = np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)
        post = Post(gpu, ctx, pd, here, there, pd.register(here), pd.register(there))
        yield post
        for exported in post.exported:
            exported.close()
