"""Memory for the queues of `Gpu.create_qp`: GPU memory if the NIC reaches it, registered in one of these ways.

    dmabuf              GPU memory; the GPU's driver exports a dmabuf and the NIC's driver imports it
    nvidia-peermem      GPU memory by its address, which the kernel module of that name resolves for the NIC's driver
    by its address      GPU memory of a software NIC whose engine works on the GPU
    CPU_GPU memory      pinned host memory, which every NIC reaches

If one way fails, the log gives the reason and the next one is tried. A NIC that does not reach GPU memory, such as
a software NIC whose engine works on the CPU, has its rings in host memory from the start; `verbs` allocates them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import numpy as np

from ..enums import MemRegType, MemType
from ..errors import DeviceFatalError, DocaError, DriverError, NotSupportedError
from ..formats.cqe import CQE64, CQE_SIZE, INIT_OP_OWN
from ..memory import PAGE, HostMemory, round_up
from ..verbs import UMEM, Context
from .device import GpuDevice
from .memory import GpuMemory

logger: logging.Logger = logging.getLogger("gpunetio.gpu")

_RECORD = 64  # bytes reserved for a doorbell record, after its ring


def _by_dmabuf(gpu: GpuDevice, ctx: Context, memory: GpuMemory) -> UMEM:
    fd = gpu.dmabuf_fd(memory)
    try:
        return ctx.register_dmabuf_umem(fd, memory.nbytes, memory=memory)
    finally:
        os.close(fd)  # the UMEM keeps the dmabuf itself


def _by_address(gpu: GpuDevice, ctx: Context, memory: GpuMemory | HostMemory) -> UMEM:
    return ctx.register_umem(memory)


class QueueUmems(TypedDict, total=False):
    """Arguments of `create_cq` and `create_qp`: UMEMs for rings and record, and offsets there."""

    external_umem: tuple[UMEM, int]
    external_dbr_umem: tuple[UMEM, int]


_Memory = TypeVar("_Memory", GpuMemory, HostMemory)


@dataclass(frozen=True)
class _Way:
    """A kind of memory, and how it is registered with a device. `name` is DOCA's, for the log."""

    name: str
    kind: MemType
    register: Callable[[GpuDevice, Context, GpuMemory], UMEM]


_DMABUF = _Way("with dmabuf mode", MemType.GPU, _by_dmabuf)
_PEERMEM = _Way("with nvidia-peermem mode", MemType.GPU, _by_address)
_NEAR = _Way("by its address", MemType.GPU, _by_address)
_PINNED = _Way("in CPU_GPU memory", MemType.CPU_GPU, _by_address)
_WAYS = {
    MemRegType.DEFAULT: (_DMABUF, _PEERMEM, _PINNED),
    MemRegType.CUDA_DMABUF: (_DMABUF,),
    MemRegType.CUDA_PEERMEM: (_PEERMEM,),
}


def ways(gpu: GpuDevice, ctx: Context, cpu_gpu: bool, asked: MemRegType) -> tuple[_Way, ...]:
    """Return the ways to try for the rings of a queue, in order; empty if `verbs` allocates them.

    NotSupportedError when a way to register GPU memory was requested and the queue cannot be in GPU memory.
    """
    why = None
    if not gpu.backend.has_memory:
        why = f"GPU {gpu.name} has host memory only"
    elif cpu_gpu:
        why = "its queues are in CPU_GPU memory"
    elif not ctx.provider.reaches_gpu_memory:
        why = f"{ctx.name} does not reach GPU memory"
    if why is None:
        by_default = asked is MemRegType.DEFAULT and ctx.provider.software
        return (_NEAR, _PINNED) if by_default else _WAYS[asked]
    if asked is not MemRegType.DEFAULT:
        raise NotSupportedError(f"mem_reg_type {asked.name} is for queues in GPU memory, but {why}: use DEFAULT")
    return ()


class Rings:
    """The rings of one queue. The methods allocate them, and return the arguments for `verbs`.

    A way that fails once is not tried again for the queue's other rings. `undo` frees everything.
    """

    def __init__(self, gpu: GpuDevice, ctx: Context, to_try: tuple[_Way, ...], undo: ExitStack):
        self._gpu, self._ctx, self._undo = gpu, ctx, undo
        self._ways = to_try

    @property
    def made_by_verbs(self) -> bool:
        """Return whether `verbs` allocates the rings, so that there is nothing to place."""
        return not self._ways

    def cq(self, what: str, entries: int) -> QueueUmems:
        """Return the arguments of `create_cq`: a ring of `entries` invalid entries, and a record."""
        if self.made_by_verbs:
            return {}
        umem, memory = self._umem(what, entries * CQE_SIZE + _RECORD)
        ring = np.zeros((entries, CQE_SIZE), np.uint8)
        ring[:, CQE64.op_own] = INIT_OP_OWN
        memory.write(ring)
        return {"external_umem": (umem, 0), "external_dbr_umem": (umem, ring.nbytes)}

    def qp(self, what: str, nbytes: int, record_in_host: bool) -> QueueUmems:
        """Return the arguments of `create_qp`: rings of `nbytes`, and a record, in host memory if the CPU keeps it."""
        if self.made_by_verbs:
            return {}
        ring, record = self.places(what, nbytes, record_in_host)
        return {"external_umem": ring, "external_dbr_umem": record}

    def places(self, what: str, nbytes: int, record_in_host: bool) -> tuple[tuple[UMEM, int], tuple[UMEM, int]]:
        """Return the UMEM of rings of `nbytes`, and that of a record, each with an offset."""
        at = round_up(nbytes, _RECORD)
        umem, _ = self._umem(what, at + _RECORD)
        record = umem, at
        if record_in_host:
            page = HostMemory(PAGE)
            record = self._register(page, _by_address), 0
        return (umem, 0), record

    def _umem(self, what: str, nbytes: int) -> tuple[UMEM, GpuMemory]:
        """Return a zeroed UMEM of at least `nbytes`, and its memory."""
        nbytes, of = round_up(nbytes, PAGE), f"for {self._ctx.name} on GPU {self._gpu.name}"
        while True:
            way, *others = self._ways
            try:
                memory = self._gpu.alloc(nbytes, way.kind)
                umem = self._register(memory, way.register)
            except DeviceFatalError:
                raise
            except DocaError as error:
                if not others:
                    raise _refused(what, way, error) from error
                self._ways = tuple(others)
                # The error as text: a stored log record would otherwise keep the memory alive.
                logger.warning("Cannot map %s %s %s (%s): trying %s", what, of, way.name, str(error), others[0].name)
            else:
                logger.info("Mapping %s (%d bytes at %#x) %s %s", what, nbytes, memory.address, of, way.name)
                return umem, memory

    def _register(self, memory: _Memory, register: Callable[[GpuDevice, Context, _Memory], UMEM]) -> UMEM:
        """Return a UMEM of this memory. Closing the UMEM frees the memory."""
        with ExitStack() as failed:
            failed.callback(memory.close)
            umem = register(self._gpu, self._ctx, memory)
            failed.pop_all()

        def give_back() -> None:
            umem.close()
            memory.close()  # frees nothing if the device keeps the memory for a queue that it did not destroy

        self._undo.callback(give_back)
        return umem


def _refused(what: str, way: _Way, error: DocaError) -> DocaError:
    """Return the error for the caller when no way is left."""
    text = f"{what} cannot be mapped {way.name}: {error}"
    if way is not _PINNED:
        text += "; mem_reg_type DEFAULT also tries other ways"
    return DriverError(text, getattr(error, "status", 0), getattr(error, "syndrome", 0))
