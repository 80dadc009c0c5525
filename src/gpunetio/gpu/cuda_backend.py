"""A CUDA device, through cuda-bindings: memory, registration of host pages, copies that run alongside kernels."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np

from ..enums import MemType
from ..errors import DriverError, InitializationError, NotFoundError, NotSupportedError, TimedOutError
from ..jit.cuda_launch import checked, cuda_runtime, new_stream
from ..memory import PAGE
from .backend import Backend, hidden
from .cuda_heap import Block, cuda_heap

_COPY_TIMEOUT = 10.0


def device_count() -> int:
    """Return the number of CUDA devices of this machine; 0 without a driver."""
    try:
        error, count = cuda_runtime().cudaGetDeviceCount()
    except NotSupportedError:
        return 0
    return count if int(error) == 0 else 0


def current_device() -> int:
    """Return the ordinal of the calling thread's device (`cudaGetDevice`)."""
    return int(checked(cuda_runtime().cudaGetDevice(), "cudaGetDevice"))


def pci_bus_id(ordinal: int) -> str:
    """Return the PCI bus id of a device."""
    return checked(cuda_runtime().cudaDeviceGetPCIBusId(16, ordinal), "cudaDeviceGetPCIBusId").split(b"\0")[0].decode()


def ordinal_of(bus_id: str) -> int:
    """Return the CUDA ordinal of a PCI bus id (`cudaDeviceGetByPCIBusId`)."""
    error, ordinal = cuda_runtime().cudaDeviceGetByPCIBusId(bus_id.encode())
    if int(error) != 0:
        present = ", ".join(pci_bus_id(i) for i in range(device_count()))
        raise NotFoundError(f"no GPU at PCI address {bus_id!r}; there are: {present}")
    return ordinal


class _Allocation:
    """CUDA memory, returned to the heap when the last reference to this object goes away."""

    def __init__(self, block: Block):
        weakref.finalize(self, cuda_heap.give_back, block)


class _PinnedPages:
    """Pages of host memory that are registered with CUDA. Registration holds for the whole process, for every GPU."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}  # page → number of users
        self._lock = threading.Lock()

    def add(self, rt: ModuleType, address: int, nbytes: int, io: bool) -> None:
        """Register the pages of a range, or count another user. `io`: they may be a device's registers."""
        pages: list[int] = []
        with self._lock:
            try:
                for page in _span(address, nbytes):
                    if page not in self._users and not _register(rt, page, io):
                        continue
                    self._users[page] = self._users.get(page, 0) + 1
                    pages.append(page)
            except BaseException:
                for page in pages:
                    self._leave(rt, page)
                raise

    def remove(self, rt: ModuleType, address: int, nbytes: int) -> None:
        with self._lock:
            for page in _span(address, nbytes):
                if page in self._users:
                    self._leave(rt, page)

    def _leave(self, rt: ModuleType, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            del self._users[page]
            checked(rt.cudaHostUnregister(page), "cudaHostUnregister")


_pinned = _PinnedPages()


def _span(address: int, nbytes: int) -> range:
    return range(address & -PAGE, address + nbytes, PAGE)


def _register(rt: ModuleType, page: int, io: bool) -> bool:
    """Register a page. Return False if other code has registered the page or allocated it as pinned memory.

    cudaHostRegister returns "invalid value" for memory of cudaHostAlloc, so this function queries the type first.
    """
    error, about = rt.cudaPointerGetAttributes(page)
    if int(error) != 0:
        rt.cudaGetLastError()
    elif about.type == rt.cudaMemoryType.cudaMemoryTypeHost:
        return False
    flags = rt.cudaHostRegisterPortable | rt.cudaHostRegisterMapped
    result = rt.cudaHostRegister(page, PAGE, flags)
    if result[0] == rt.cudaError_t.cudaErrorHostMemoryAlreadyRegistered:
        rt.cudaGetLastError()
        return False
    if io and int(result[0]) != 0:  # not memory
        rt.cudaGetLastError()
        result = rt.cudaHostRegister(page, PAGE, flags | rt.cudaHostRegisterIoMemory)
    if int(result[0]) != 0:
        rt.cudaGetLastError()
    checked(result, "cudaHostRegister")
    return True


class CudaBackend(Backend):
    """A CUDA device."""

    target = "cuda"
    has_memory = True
    maps_memory = False  # needs GDRCopy
    lanes: int | None = 32
    sdk = True
    name: str
    integrated: bool

    def __init__(self, ordinal: int):
        self._rt = cuda_runtime()
        self.ordinal, self.engine = ordinal, f"gpu{ordinal}"
        cuda_heap.follow_launches()
        try:
            checked(self._rt.cudaSetDevice(ordinal), "cudaSetDevice")
        except DriverError as error:
            raise InitializationError(f"GPU {ordinal} could not be opened: {error}") from error
        self.name = pci_bus_id(ordinal)
        self._copies = new_stream()  # must not wait for kernels, which may run forever
        attribute = self._rt.cudaDeviceAttr.cudaDevAttrIntegrated
        self.integrated = bool(checked(self._rt.cudaDeviceGetAttribute(attribute, ordinal), "cudaDeviceGetAttribute"))

    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, object]:
        checked(self._rt.cudaSetDevice(self.ordinal), "cudaSetDevice")
        room = nbytes + max(0, alignment - 1)
        block = cuda_heap.take((self.ordinal, kind, room)) or self._new_block(room, kind)
        owner = hidden(_Allocation(block))
        start = block.base + -block.base % max(1, alignment)
        if kind is MemType.CPU_GPU:
            view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
            view[:] = 0
            return start, view, owner
        checked(self._rt.cudaMemsetAsync(start, 0, nbytes, self._copies), "cudaMemsetAsync")
        self._wait_copies()
        return start, None, owner

    def _new_block(self, room: int, kind: MemType) -> Block:
        if kind is MemType.CPU_GPU:
            flags = self._rt.cudaHostAllocPortable | self._rt.cudaHostAllocMapped
            base, free = checked(self._rt.cudaHostAlloc(room, flags), "cudaHostAlloc"), self._rt.cudaFreeHost
        else:
            base, free = checked(self._rt.cudaMalloc(room), "cudaMalloc"), self._rt.cudaFree
        return Block(int(base), (self.ordinal, kind, room), free)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy on the stream for copies.

        CUDA refuses a range of host memory that is only partly registered, for example for a region of a NIC on a GPU.
        Such a range is copied page by page, because a page is either registered or not.
        """
        checked(self._rt.cudaSetDevice(self.ordinal), "cudaSetDevice")
        result = self._begin_copy(target, source, nbytes)
        if result[0] == self._rt.cudaError_t.cudaErrorInvalidValue:
            self._rt.cudaGetLastError()
            done = 0
            while done < nbytes:
                part = min(nbytes - done, *(PAGE - (address + done) % PAGE for address in (target, source)))
                checked(self._begin_copy(target + done, source + done, part), "cudaMemcpyAsync")
                done += part
        else:
            checked(result, "cudaMemcpyAsync")
        self._wait_copies()

    def _begin_copy(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        return self._rt.cudaMemcpyAsync(target, source, nbytes, kind, self._copies)

    def _wait_copies(self) -> None:
        end = time.monotonic() + _COPY_TIMEOUT
        not_ready = self._rt.cudaError_t.cudaErrorNotReady
        while (state := self._rt.cudaStreamQuery(self._copies))[0] == not_ready:
            if time.monotonic() > end:
                raise TimedOutError(f"a copy on GPU {self.name} did not end within {_COPY_TIMEOUT:g} s")
        checked(state, "cudaStreamQuery")

    def map(self, address: int, nbytes: int, io: bool = False) -> int:
        """Register the pages of host memory and return their device address. `io`: the address is a device register."""
        checked(self._rt.cudaSetDevice(self.ordinal), "cudaSetDevice")
        _pinned.add(self._rt, address, nbytes, io)
        with ExitStack() as undo:
            undo.callback(self.unmap, address, nbytes)
            device_address = checked(self._rt.cudaHostGetDevicePointer(address, 0), "cudaHostGetDevicePointer")
            undo.pop_all()
        return int(device_address)

    def unmap(self, address: int, nbytes: int) -> None:
        _pinned.remove(self._rt, address, nbytes)

    def count_kernel(self, change: int) -> None:
        """Do nothing."""

    def dmabuf_fd(self, address: int, nbytes: int) -> int:
        from cuda.bindings import driver  # type: ignore[attr-defined]

        kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        checked(self._rt.cudaSetDevice(self.ordinal), "cudaSetDevice")
        error, fd = driver.cuMemGetHandleForAddressRange(address, nbytes, kind, 0)
        if int(error) != 0:
            raise NotSupportedError(
                f"GPU {self.name} gives no dmabuf of {nbytes} bytes at {address:#x} ({error.name}): this needs GPU "
                "memory and the open kernel modules of its driver; register the memory itself"
            )
        return int(fd)

    def close(self) -> None:
        """Release the stream."""
        checked(self._rt.cudaStreamDestroy(self._copies), "cudaStreamDestroy")
