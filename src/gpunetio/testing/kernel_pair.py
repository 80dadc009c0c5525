"""Two connected queue pairs that kernels drive, with memory at both ends."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ..enums import MemType
from ..errors import TimedOutError
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..jit.launch import Kernel
from ..verbs import MR, Context
from ..verbs.qp import ConnectOptions


@dataclass
class KernelPair:
    """Two queue pairs of kernels, `near` and `far`, connected to each other; `source` and `target` are their memory.

    Kernels access the memory directly, the CPU as `.array`. Each end's is registered with its own NIC. `deadline` is
    the most seconds that a wait of a kernel, or for a kernel, may take.
    """

    gpu: Gpu
    near: ExportedQp
    far: ExportedQp
    source: GpuMemory
    target: GpuMemory
    source_mr: MR
    target_mr: MR
    deadline: float

    @property
    def arguments(self) -> tuple[ExportedQp, int, int, int, int]:
        """Return the arguments of a kernel that puts from `source` to `target`: qp, raddr, rkey, laddr, lkey."""
        return self.near, self.target.address, self.target_mr.rkey, self.source.address, self.source_mr.lkey

    def run(self, kernel: Kernel, *arguments: object, grid: int = 1, block: int = 1) -> None:
        """Launch a kernel on the GPU and wait for its end.

        TimedOutError if it does not end within the deadline.
        """
        if not kernel[grid, block, self.gpu](*arguments).wait(self.deadline):
            raise TimedOutError(
                f"kernel {kernel.name} did not end within {self.deadline:g} s: its queue pair has the indices "
                f"{self.near.indices()} and the last error {self.near.last_error()}; allow more time by "
                "@pytest.mark.deadline(SECONDS) or --gpunetio-deadline"
            )


def open_pair(
    stack: ExitStack, gpu: Gpu, near: Context, far: Context, nbytes: int, deadline: float, options: ConnectOptions
) -> KernelPair:
    """Return a pair on two NICs. `stack` closes it."""

    def end(nic: Context) -> tuple[ExportedQp, GpuMemory, MR]:
        pd = nic.create_pd()
        memory = stack.enter_context(gpu.alloc(nbytes, MemType.CPU_GPU))
        region = stack.enter_context(pd.register(memory))
        return stack.enter_context(gpu.create_qp(pd, receives=64, timeout=deadline)), memory, region

    (here, source, source_mr), (there, target, target_mr) = end(near), end(far)
    here.connect(there, **options)
    return KernelPair(gpu, here, there, source, target, source_mr, target_mr, deadline)
