"""The NIC and the GPU of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..enums import MemType
from ..gpu import Gpu, GpuMemory
from ..verbs import PD, Context
from .settings import Settings


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """Let threads that start in this block run on all cores of the process's first thread.

    NCCL pins its threads to cores near their GPU, and threads that they start inherit that.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Device:
    """An open NIC, a protection domain, and the GPU whose kernels use the NIC.

    `word_memory` is the kind of memory for words that the NIC adds to: signals and counters. A NIC that does not reach
    GPU memory makes no atomics there, so these words are then in host memory that the GPU sees.
    """

    ctx: Context
    gpu: Gpu
    pd: PD
    word_memory: MemType | None

    def __init__(self, settings: Settings):
        with ExitStack() as undo, _on_all_cores():
            self.ctx = undo.enter_context(settings.open_device())
            self.gpu = undo.enter_context(Gpu(settings.which_gpu()))
            self.pd = self.ctx.create_pd()
            provider = self.ctx.provider
            if provider.software:
                from ..providers.soft import SoftProvider

                if isinstance(provider, SoftProvider):
                    provider.nic.expect_polling()
            self.word_memory = None if provider.reaches_gpu_memory else MemType.CPU_GPU
            self._undo = undo.pop_all()

    def constant(self, data: bytes, undo: ExitStack) -> GpuMemory:
        """Return memory for kernels to read, with this content. Closing `undo` frees it."""
        memory = self.gpu.alloc(max(1, len(data)))
        undo.callback(memory.close)
        if data:
            memory.write(data)
        return memory

    def close(self) -> None:
        """Close the GPU, the NIC and everything made from them. Idempotent."""
        self._undo.close()
