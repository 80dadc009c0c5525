"""Probe GPU memory and the doorbell: what CUDA maps for kernels, and which GPU memory the NIC accepts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...enums import MemType
from ...errors import DocaError
from ...verbs import MR, UMEM
from ..finding import Evidence, Finding, fail, ok, skip, warn
from .bench import Bench
from .explain import cuda_error

if TYPE_CHECKING:
    from ...gpu import Gpu, GpuMemory

_BYTES = 1 << 16  # a page of the GPU
_DMABUF, _PEERMEM = "dmabuf", "nvidia-peermem"


def uar(bench: Bench) -> Iterator[Finding]:
    """Register a doorbell page with cudaHostRegister, as I/O memory unless it is host memory."""
    if why := bench.without_gpu_memory() or bench.without_devx():
        yield skip(why)
        return
    if error := bench.register_error():
        known = cuda_error(error.status)
        yield warn(
            f"the CPU proxy rings, not the GPU: {known.name} ({error.status})",
            Evidence("cudaHostRegister", str(error)), Evidence("likely cause", known.cause),
            cure=known.cure, reboot=known.reboot,
        )
    else:
        yield ok(f"kernels of GPU {bench.gpu.name} ring by themselves", Evidence("cudaHostRegister", "cudaSuccess"))


@dataclass(frozen=True)
class _AtAddress:
    """Memory that a device knows only by its address, so that nvidia-peermem must resolve it."""

    address: int
    nbytes: int


def dmabuf(bench: Bench) -> Iterator[Finding]:
    """Register a memory region in GPU memory."""

    def by_dmabuf(memory: GpuMemory, fd: int) -> MR:
        return bench.pd.register_dmabuf(fd, memory.nbytes)

    def by_address(memory: GpuMemory) -> MR:
        # A software NIC must know that it is GPU memory; a card's provider would try dmabuf again.
        return bench.pd.register(memory if bench.software else _AtAddress(memory.address, memory.nbytes))

    if why := bench.without_gpu_memory() or bench.without_devx():
        yield skip(why)
        return
    gpu = bench.gpu
    way, read = _first_way(gpu, by_dmabuf, by_address)
    if way is None:
        yield fail(f"{bench.name} does not accept memory of GPU {gpu.name}", *read)
    elif bench.software:
        yield ok(f"{bench.name} moves bytes of GPU memory through the CUDA driver", *read)
    else:
        yield ok(f"{bench.name} reaches memory of GPU {gpu.name} by {way}", *read)


def umem(bench: Bench) -> Iterator[Finding]:
    """Register a UMEM in GPU memory, for queues."""

    def by_dmabuf(memory: GpuMemory, fd: int) -> UMEM:
        return bench.ctx.register_dmabuf_umem(fd, memory.nbytes, memory=memory)

    def by_address(memory: GpuMemory) -> UMEM:
        return bench.ctx.register_umem(memory)

    if why := bench.without_gpu_memory() or bench.without_devx():
        yield skip(why)
        return
    gpu = bench.gpu
    if not bench.ctx.provider.reaches_gpu_memory:
        yield skip(f"{bench.name} does not reach GPU memory: its queues are in host memory")
        return
    way, read = _first_way(gpu, by_dmabuf, by_address)
    if way is None:
        yield warn(f"queues of {bench.name} are in host memory: no UMEM in GPU memory", *read)
    else:
        yield ok(f"queues of {bench.name} are in memory of GPU {gpu.name} by {way}", *read)


def _first_way(
    gpu: Gpu, by_dmabuf: Callable[[GpuMemory, int], MR | UMEM], by_address: Callable[[GpuMemory], MR | UMEM]
) -> tuple[str | None, list[Evidence]]:
    """Register GPU memory by dmabuf or else by nvidia-peermem. Return the way, None if both fail, and the evidence."""

    def through_descriptor(memory: GpuMemory) -> MR | UMEM:
        fd = gpu.dmabuf_fd(memory)
        try:
            return by_dmabuf(memory, fd)
        finally:
            os.close(fd)

    read: list[Evidence] = []
    with gpu.alloc(_BYTES, MemType.GPU, alignment=_BYTES) as memory:
        for way, register in ((_DMABUF, through_descriptor), (_PEERMEM, by_address)):
            try:
                register(memory).close()
            except (DocaError, OSError) as error:
                read.append(Evidence(way, str(error)))
            else:
                return way, [*read, Evidence(way, f"{_BYTES} bytes registered")]
    return None, read
