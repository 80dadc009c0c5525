"""Memory for Ethernet queues: rings, doorbell records and packets, in host or GPU memory."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

from ..arguments import instance, member, within
from ..enums import Access, CqOverrun, MemRegType, MemType, RingMemory
from ..errors import DeviceFatalError, DocaError, InvalidValueError
from ..gpu import Gpu, GpuMemory
from ..gpu.device import check_queue_memory
from ..gpu.rings import Rings, ways
from ..gpu.spans import Span
from ..memory import PAGE, is_accessible, round_up
from ..verbs import CQ, MR, PD, UAR
from ..verbs.devx.ring import Ring, external_ring, internal_ring

logger: logging.Logger = logging.getLogger("gpunetio.eth")


class Places:
    """Places the rings of one queue on the GPU data path. `undo` frees them."""

    cpu_gpu: bool

    def __init__(self, gpu: Gpu, pd: PD, queue_memory: str | None, mem_reg_type: MemRegType, undo: ExitStack):
        check_queue_memory(queue_memory or "auto")
        where = gpu.queue_memory if queue_memory in (None, "auto") else queue_memory
        self.cpu_gpu = where == "cpu_gpu"
        self._gpu, self._ctx, self._undo = gpu, pd.ctx, undo
        kind = member("mem_reg_type", mem_reg_type, MemRegType)
        self._rings = Rings(gpu, pd.ctx, ways(gpu, pd.ctx, self.cpu_gpu, kind), undo)

    def cq(self, what: str, entries: int, overrun: CqOverrun, uar: UAR | None = None) -> CQ:
        """Create a CQ for kernels to read."""
        place = self._rings.cq(what, entries)
        cq = self._ctx.create_cq(entries, overrun=overrun, external_datapath=True, external_uar=uar, **place)
        self._undo.callback(cq.close)
        return cq

    def ring(self, what: str, nbytes: int, record_in_host: bool) -> Ring:
        """Create a ring of `nbytes` with a doorbell record, which is in host memory if the CPU updates it."""
        if self._rings.made_by_verbs:
            return internal_ring(self._ctx, self._undo, nbytes)
        return external_ring(*self._rings.places(what, nbytes, record_in_host), nbytes)

    def span(self, ring: Ring, nbytes: int) -> Span:
        """Return a ring as a span, which the host can write and kernels can reach."""
        return Span(self._gpu.backend, ring.address, nbytes, ring.lies_in)

    def record(self, ring: Ring, at: int, nbytes: int) -> Span:
        """Return part of a ring's doorbell record as a span."""
        return Span(self._gpu.backend, ring.dbr_address + at, nbytes, ring.dbr_lies_in)


class PacketBuffer:
    """Memory for packets: its region, and the address of the first packet for the NIC and for kernels.

    `memory` is None if the caller gave a region.
    """

    region: MR
    memory: GpuMemory | None
    address: int
    device_address: int

    def __init__(
        self, gpu: Gpu, pd: PD, nbytes: int, given: MR | GpuMemory | None, offset: int, kind: MemType | None,
        undo: ExitStack,
    ):
        self.memory = None
        if isinstance(given, MR):
            self.region = check_buffer(pd, given, offset, nbytes)
            self.address = given.iova + offset
            self.device_address = _mapped(gpu, given, offset, nbytes, undo)
            return
        if given is None:
            offset, given = 0, gpu.alloc(round_up(nbytes, PAGE), _kind(gpu, pd, kind))
            undo.callback(given.close)
        elif not isinstance(given, GpuMemory):
            raise InvalidValueError(f"buffer = {given!r}: it must be memory of this Gpu, or a region (MR)")
        region = _region_of(gpu, pd, given)
        undo.callback(region.close)
        self.region, self.memory = check_buffer(pd, region, offset, nbytes), given
        self.address, self.device_address = region.iova + offset, given.device_address + offset


def _mapped(gpu: Gpu, region: MR, offset: int, nbytes: int, undo: ExitStack) -> int:
    """Return the kernels' address of a place in the user's region.

    Memory that the CPU cannot reach is GPU memory, and its keys use its own addresses.
    """
    here = region.address + offset
    if is_accessible(here, nbytes, True):
        return Span(gpu.backend, here, nbytes, RingMemory.HOST).map(undo)
    if not gpu.backend.has_memory:
        raise InvalidValueError(f"buffer = {region} is GPU memory, which host threads do not reach")
    return region.iova + offset


def check_buffer(pd: PD, buffer: MR, offset: int, nbytes: int) -> MR:
    """Return the user's region, checked to hold `nbytes` of packets at `offset`. InvalidValueError if it cannot."""
    if instance("buffer", buffer, MR).pd is not pd:
        raise InvalidValueError(f"buffer = {buffer} belongs to {buffer.pd}: register the memory in {pd}")
    if Access.LOCAL_WRITE not in buffer.access:
        raise InvalidValueError(f"buffer = {buffer} lacks LOCAL_WRITE: the device must write packets there")
    if within("offset", offset, 0, buffer.nbytes) + nbytes > buffer.nbytes:
        raise InvalidValueError(
            f"buffer = {buffer}: the queue needs {nbytes} bytes from offset {offset} on; estimate_buffer() returns "
            "the size"
        )
    return buffer


def _kind(gpu: Gpu, pd: PD, asked: MemType | None) -> MemType:
    """Return the kind of new packet memory: by default GPU memory if the NIC reaches that, else CPU_GPU."""
    if asked is not None:
        return member("memory", asked, MemType)
    near = gpu.queue_memory != "cpu_gpu" and pd.ctx.provider.reaches_gpu_memory
    return MemType.GPU if near else MemType.CPU_GPU


def _region_of(gpu: Gpu, pd: PD, memory: GpuMemory) -> MR:
    """Register memory: GPU memory through a dmabuf if possible, any other memory by its address."""
    if memory.kind is MemType.GPU and pd.ctx.provider.reaches_gpu_memory and gpu.backend.has_memory:
        try:
            fd = gpu.dmabuf_fd(memory)
            try:
                return pd.register_dmabuf(fd, memory.nbytes, iova=memory.address)
            finally:
                os.close(fd)
        except DeviceFatalError:
            raise
        except DocaError as error:
            logger.info("%s: packets in GPU memory are registered by their address (%s)", pd.ctx.name, error)
    return pd.register(memory)
