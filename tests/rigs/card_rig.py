"""A card that a test simulates: it takes queues in GPU memory, as a ConnectX does, and completes what the test says.

Its commands and doorbell pages are those of `FakeProvider`. CQEs are made by literal byte offsets, so that they agree
with the specification and not with our tables.
"""

import ctypes
import os
import weakref
from collections import Counter
from typing import Any

import numpy as np

from fake_device import FakeProvider
from fake_gpu import FakeMemory
from gpunetio import Gpu
from gpunetio.enums import Access, MemType
from gpunetio.errors import DriverError, NotSupportedError
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.memory import is_accessible
from gpunetio.providers.provider import MrKeys
from gpunetio.verbs import CQ

REQ, RESP_SEND, REQ_ERR = 0, 2, 13


class Card(FakeProvider):
    """`dmabufs` has the sizes of the UMEMs that were registered by descriptor.

    More to refuse: "UMEM of GPU", "UMEM of host", "reg_dmabuf_umem", "MR of GPU", "reg_dmabuf_mr".
    """

    name = "card0"
    reaches_gpu_memory = True

    def __init__(self):
        super().__init__()
        self.no_dbr_ext = True
        self.dmabufs: list[int] = []

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> MrKeys:
        assert not cuda, "a card would try a dmabuf by itself"
        if not is_accessible(address, nbytes, True):
            self._check("MR of GPU")
        return super().reg_mr(pdn, address, nbytes, iova, access, cuda)

    def reg_dmabuf_mr(self, pdn: int, fd: int, offset: int, nbytes: int, iova: int, access: Access) -> MrKeys:
        self._check("reg_dmabuf_mr")
        os.fstat(fd)
        return super().reg_mr(pdn, offset, nbytes, iova, access, False)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        self._check("UMEM of host" if is_accessible(address, nbytes, True) else "UMEM of GPU")
        return super().reg_umem(address, nbytes, access)

    def reg_dmabuf_umem(self, fd: int, offset: int, nbytes: int, access: Access) -> int:
        self._check("reg_dmabuf_umem")
        os.fstat(fd)  # raises if it is not open
        assert (offset, access) == (0, Access.LOCAL_WRITE)
        self.dmabufs.append(nbytes)
        return self._new("umem")

    def dereg_umem(self, umem_id: int) -> None:
        self._check("dereg_umem")
        super().dereg_umem(umem_id)


class FakeCuda(HostBackend):
    """A CUDA device whose memory the CPU cannot touch at its addresses; kernels do not run there.

    With `maps_memory` it has GDRCopy. `refused` may have "dmabuf", "register", and "alloc GPU" and the like. `live`
    counts allocations by kind, `mapped` users of registered ranges.
    """

    target, name, ordinal = "cuda", "fa:00.0", 0
    has_memory, maps_memory, lanes = True, False, 32

    def __init__(self):
        self.refused: set[str] = set()
        self.live: Counter[str] = Counter()
        self.mapped: Counter[int] = Counter()
        self._regions: list[FakeMemory] = []

    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, Any]:
        if f"alloc {kind.name}" in self.refused:
            raise DriverError("cudaMalloc: out of memory (CUDA error 2)", status=2)
        self.live[kind.name] += 1
        if kind is MemType.CPU_GPU:
            address, array, owner = super().alloc(nbytes, alignment, kind)
        else:
            owner, array = FakeMemory(nbytes + alignment), None
            self._regions.append(owner)
            start = -owner.address % alignment
            address = owner.address + start
            if kind is MemType.GPU_CPU:
                array = owner.array[start : start + nbytes]
        held = _Owner(owner)
        weakref.finalize(held, self.live.subtract, [kind.name])
        return address, array, held

    def visible(self, address: int, nbytes: int) -> int:
        """Where a copy finds a range."""
        for region in self._regions:
            if region.address <= address and address + nbytes <= region.address + region.nbytes:
                return region.visible + address - region.address
        assert is_accessible(address, nbytes, False), f"{nbytes} bytes at {address:#x} are nobody's"
        return address

    def copy(self, target: int, source: int, nbytes: int) -> None:
        super().copy(self.visible(target, nbytes), self.visible(source, nbytes), nbytes)

    def map(self, address: int, nbytes: int, io: bool = False) -> int:
        if io and "register" in self.refused:
            raise DriverError("cudaHostRegister: operation not permitted (CUDA error 800)", status=800)
        assert is_accessible(address, nbytes, False), "GPU memory is not registered with CUDA"
        self.mapped[address] += 1
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        self.mapped[address] -= 1

    def dmabuf_fd(self, address: int, nbytes: int) -> int:
        if "dmabuf" in self.refused:
            raise NotSupportedError(f"GPU {self.name} gives no dmabuf (CUDA_ERROR_NOT_SUPPORTED)")
        return os.memfd_create("dmabuf")


class _Owner:
    """What keeps an allocation."""

    def __init__(self, memory: Any):
        self.memory = memory


# --- what the card does ----------------------------------------------------------------------------------------------


def peek(gpu: Gpu, address: int, nbytes: int) -> bytes:
    """What lies at an address that kernels know."""
    if is_accessible(address, nbytes, False):
        return ctypes.string_at(address, nbytes)
    target = np.empty(nbytes, np.uint8)
    gpu.backend.copy(int(target.ctypes.data), address, nbytes)
    return target.tobytes()


def poke(gpu: Gpu, address: int, data: bytes) -> None:
    """Write there."""
    if is_accessible(address, len(data), True):
        ctypes.memmove(address, data, len(data))
    else:
        source = np.frombuffer(data, np.uint8)
        gpu.backend.copy(address, int(source.ctypes.data), len(data))


def complete(
    gpu: Gpu, cq: CQ, number: int, *, counter: int | None = None, opcode: int = REQ, nbytes: int = 0,
    syndrome: int = 0, vendor: int = 0,
) -> None:
    """Write CQE `number` of a CQ, that of WQE `counter`, or of the same number; its last word comes last."""
    cqe = bytearray(64)
    cqe[44:48] = nbytes.to_bytes(4, "big")
    if opcode == REQ_ERR:
        cqe[54:56] = vendor, syndrome
    cqe[60:62] = ((number if counter is None else counter) & 0xFFFF).to_bytes(2, "big")
    cqe[63] = opcode << 4 | (number // cq.entries & 1)
    at = cq.ring_address + 64 * (0 if cq.collapsed else number % cq.entries)
    poke(gpu, at, bytes(cqe[:60]))
    poke(gpu, at + 60, bytes(cqe[60:]))
