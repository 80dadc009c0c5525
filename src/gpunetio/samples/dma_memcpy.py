"""dma_memcpy: the NIC copies a text from the CPU to a GPU, and another one back.

    1. CPU data path    a task copies 1024 bytes of host memory to GPU memory
    2. GPU data path    a kernel reads the text that has arrived, enqueues a copy of its own text to host memory,
                        commits and waits
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .. import device as dev
from ..core import BufArray, MemoryMap
from ..device import kernel
from ..dma import Dma
from ..enums import MemType
from ..gpu import Gpu
from ..memory import HostMemory
from ..nic.engine.port import PortConfig
from ..verbs import open as open_device
from .until_stopped import failure

BYTES = 1024  # of a text, including the zeros after it
PAGE = 4096  # of a buffer
FROM_CPU, FROM_GPU = b"This is a sample piece of text from CPU", b"This is a sample piece of text from GPU"
PATIENCE = 30.0  # seconds for a copy

_log = logging.getLogger(__name__)
_STATUS, _SEEN = 0, 8  # of the kernel's report


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The GPU where the kernel runs, and the NIC that copies."""

    gpu: str
    device: str
    nic_port: PortConfig | None = None


@kernel
def answer(dma: dev.DevDma, on_gpu: dev.DevBufArr, on_cpu: dev.DevBufArr, text: int, nbytes: int, out: int) -> None:
    """Report the text that has arrived in the GPU's buffer, put `text` there, and have it copied to the CPU's buffer.
    """
    here = dev.buf_get(on_gpu, 0)
    dev.copy(out + _SEEN, dev.buf_addr(here), nbytes)
    dev.copy(dev.buf_addr(here), text, nbytes)
    ticket = dev.dma_memcpy(dma, here, 0, dev.buf_get(on_cpu, 0), 0, nbytes)
    if ticket >= 0:
        ticket = dev.dma_commit(dma)
    dev.st64(out + _STATUS, dev.dma_wait(dma, ticket))


def run(options: SampleOptions) -> None:
    """Copy both texts."""
    _log.info("Starting the sample")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        gpu = stack.enter_context(Gpu(options.gpu))
        pd = ctx.create_pd()
        on_cpu = HostMemory(PAGE)
        stack.callback(on_cpu.close)
        on_gpu, text = gpu.alloc(PAGE), gpu.alloc(BYTES)
        cpu_map, gpu_map = (stack.enter_context(MemoryMap(pd, memory)) for memory in (on_cpu, on_gpu))
        _by_the_cpu(on_cpu, cpu_map, gpu_map)
        text.write(_padded(FROM_GPU))
        on_cpu.array[:] = 0
        out = gpu.alloc(_SEEN + BYTES, MemType.CPU_GPU)
        with (
            Dma(pd, gpu=gpu) as dma,
            BufArray(gpu, gpu_map, 1, PAGE) as gpu_bufs,
            BufArray(gpu, cpu_map, 1, PAGE) as cpu_bufs,
        ):
            launch = answer[1, 1, gpu](dma, gpu_bufs, cpu_bufs, text, BYTES, out)
            launch.wait(2 * PATIENCE)
            status = int(out.array.view(np.int64)[_STATUS])
            if status < 0:
                raise failure(status, dma.queue.last_error())
        _log.info(
            "CUDA KERNEL INFO: The GPU destination buffer value after the memcpy: %s", _text(out.array[_SEEN:])
        )
        _log.info("CPU received message from GPU: %s", _text(on_cpu.array))
    _log.info("Sample finished successfully")


def _by_the_cpu(memory: HostMemory, source: MemoryMap, target: MemoryMap) -> None:
    memory.array[:BYTES] = _padded(FROM_CPU)
    with Dma(source.pd) as dma:
        dma.memcpy(source, target).submit().wait(PATIENCE)
    _log.info("Success, DMA memcpy job done successfully")


def _padded(text: bytes) -> np.ndarray:
    return np.frombuffer(text.ljust(BYTES, b"\0"), np.uint8)


def _text(memory: np.ndarray) -> str:
    return memory[:BYTES].tobytes().rstrip(b"\0").decode(errors="replace")
