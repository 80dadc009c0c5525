"""Two queues with kernels at work, shared by the tests of the device library and of `gpu`."""

from dataclasses import dataclass

import numpy as np

from gpunetio import ExportedQp, Gpu, GpuMemory, MemType, verbs
from gpunetio.jit.launch import Kernel
from gpunetio.nic.nic import SoftNic


@dataclass
class Pair:
    """Two connected queues of one software NIC, exported to a place where kernels run, and memory at both ends."""

    ctx: verbs.Context
    gpu: Gpu
    pd: verbs.PD
    a: ExportedQp
    b: ExportedQp
    here: GpuMemory
    there: GpuMemory
    here_mr: verbs.MR
    there_mr: verbs.MR

    @property
    def nic(self) -> SoftNic:
        """The software NIC behind the context."""
        return self.ctx.provider.nic  # type: ignore[attr-defined]

    def run(self, kernel: Kernel, *args: object, grid: int = 1, block: int = 1, timeout: float = 60) -> np.ndarray:
        """Launch `kernel(qp, raddr, rkey, laddr, lkey, *args, out)`: the int64s that it left at `out`, one a thread."""
        with self.gpu.alloc(8 * grid * block, MemType.CPU_GPU) as out:
            out.array[:] = 0xEE
            launch = kernel[grid, block, self.gpu](
                self.a, self.there.address, self.there_mr.rkey, self.here.address, self.here_mr.lkey, *args, out
            )
            assert launch.wait(timeout), f"the kernel did not end within {timeout} s: {self.a.indices()}"
            return out.array.view(np.int64).copy()


def run_on(gpu: Gpu, kernel: Kernel, *args: object, count: int, grid: int = 1, block: int = 1) -> list[int]:
    """Launch `kernel(*args, out)` on zeroed memory: the first `count` int64s at `out`."""
    with gpu.alloc(max(8 * count, 4096), MemType.CPU_GPU) as out:
        assert kernel[grid, block, gpu](*args, out).wait(60), "the kernel did not end"
        return out.array.view(np.int64)[:count].tolist()


NBYTES = 1 << 20


def make_pair(ctx: verbs.Context, gpu: Gpu, depth: int = 64, timeout: float = 10.0) -> Pair:
    """A `Pair` on `ctx` and `gpu`; `here` is random, `there` zero."""
    pd = ctx.create_pd()
    a, b = gpu.create_qp(pd, depth, timeout=timeout), gpu.create_qp(pd, depth, timeout=timeout)
    a.connect(b, ack_timeout=8, retry_cnt=2, rnr_retry=2)
    here, there = gpu.alloc(NBYTES, MemType.CPU_GPU), gpu.alloc(NBYTES, MemType.CPU_GPU)
    here.array[:] = np.random.default_rng(7).integers(0, 256, NBYTES, np.uint8)
    return Pair(ctx, gpu, pd, a, b, here, there, pd.register(here), pd.register(there))
