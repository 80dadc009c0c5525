"""GPU memory that two processes of a host share: allocations of cudaMalloc, and mapped memory of cuMemCreate (VMM).

CUDA shares the former with a 64-byte handle. It shares the latter with a file descriptor, if the memory was created for
that, as in ncclMemAlloc. A range that spans several allocations or lies in a pool (cudaMallocAsync) cannot be shared.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable

from ....errors import DriverError, InvalidValueError
from ....jit.launch import running
from ...engine.hardware import SharedMapping
from ...memory.cuda_driver import Current, CudaDriver

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE, _READ_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


# --- in the process that owns the memory -----------------------------------------------------------------------------


def share(driver: CudaDriver, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
    """Share the allocation that contains a range (`Engine.share`). The caller has made a CUDA context current."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    try:
        driver.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
        if address + nbytes > start.value + size.value:
            return None
        handle = _IpcHandle()
        with contextlib.suppress(DriverError):
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), start)
            return start.value, size.value, bytes(handle).hex(), None
        return start.value, size.value, "", _descriptor(driver, start)
    except DriverError:  # memory of a pool, or memory that was not created for sharing
        return None


def _descriptor(driver: CudaDriver, start: ctypes.c_uint64) -> int:
    """Export mapped memory. Return a new file descriptor of it."""
    allocation, fd = ctypes.c_uint64(), ctypes.c_int()
    driver.call("cuMemRetainAllocationHandle", ctypes.byref(allocation), start)
    try:
        driver.call("cuMemExportToShareableHandle", ctypes.byref(fd), allocation, _DESCRIPTOR, ctypes.c_ulonglong(0))
    finally:
        driver.call("cuMemRelease", allocation)
    return fd.value


# --- in the other process --------------------------------------------------------------------------------------------

_to_unmap: list[_Memory] = []


def open_shared(
    driver: CudaDriver, current: Callable[[], Current], ordinal: int, nbytes: int, handle: object, fds: list[int]
) -> SharedMapping:
    """Map memory that another process shares (`Engine.open_shared`). `current` makes the GPU's context current."""
    with current():
        if fds:
            return _MappedMemory(driver, current, ordinal, nbytes, fds[0])
        return _IpcMemory(driver, current, nbytes, handle)


def unmap_closed() -> None:
    """Unmap memory that was closed while kernels ran."""
    while _to_unmap:
        _to_unmap.pop().unmap()


class _Memory(ABC):
    """GPU memory that another process has allocated.

    To unmap memory, CUDA waits for all running kernels, and blocks launches meanwhile, including those of slices.
    Therefore the memory stays mapped until no kernel of this process runs, or until the NIC closes.
    """

    address: int

    def __init__(self, driver: CudaDriver, current: Callable[[], Current], nbytes: int):
        self._driver, self._current, self.nbytes = driver, current, nbytes

    @abstractmethod
    def _unmap(self) -> None:
        """Unmap the memory. The caller has made the context current."""

    def unmap(self) -> None:
        with contextlib.suppress(DriverError), self._current():
            self._unmap()

    def close(self) -> None:
        """Unmap the memory, now if no kernel runs, otherwise later."""
        _to_unmap.append(self)
        if running() == 0:
            unmap_closed()


class _IpcMemory(_Memory):
    """Memory of cudaMalloc, opened by its handle."""

    def __init__(self, driver: CudaDriver, current: Callable[[], Current], nbytes: int, handle: object):
        super().__init__(driver, current, nbytes)
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        try:
            opened = _IpcHandle.from_buffer_copy(bytes.fromhex(str(handle)))
        except ValueError as error:
            raise InvalidValueError(f"{handle!r} is not the handle of a GPU's memory: {error}") from None
        try:
            driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(start), opened, _LAZY_PEER_ACCESS)
            self.address = start.value
            driver.call("cuMemGetAddressRange_v2", None, ctypes.byref(size), start)
        except DriverError as error:
            raise InvalidValueError(f"memory of another process's GPU cannot be mapped: {error}") from error
        if size.value < nbytes:
            self.close()
            raise InvalidValueError(f"the memory has {size.value} bytes, not the {nbytes} announced")

    def _unmap(self) -> None:
        self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))


class _MappedMemory(_Memory):
    """Memory of cuMemCreate, mapped as a whole. CUDA refuses to map more than its size."""

    def __init__(self, driver: CudaDriver, current: Callable[[], Current], ordinal: int, nbytes: int, fd: int):
        super().__init__(driver, current, nbytes)
        allocation, start = ctypes.c_uint64(), ctypes.c_uint64()
        size, nothing = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
        access = _Access(_ON_DEVICE, ordinal, _READ_WRITE)
        with contextlib.ExitStack() as undo:
            try:
                given = ctypes.c_void_p(fd)
                driver.call("cuMemImportFromShareableHandle", ctypes.byref(allocation), given, _DESCRIPTOR)
                undo.callback(driver.call, "cuMemRelease", allocation)
                driver.call("cuMemAddressReserve", ctypes.byref(start), size, nothing, nothing, nothing)
                undo.callback(driver.call, "cuMemAddressFree", start, size)
                driver.call("cuMemMap", start, size, nothing, allocation, nothing)
                undo.callback(driver.call, "cuMemUnmap", start, size)
                driver.call("cuMemSetAccess", start, size, ctypes.byref(access), ctypes.c_size_t(1))
            except DriverError as error:
                raise InvalidValueError(f"memory of another process's GPU cannot be mapped: {error}") from error
            self.address, self._undo = start.value, undo.pop_all()

    def _unmap(self) -> None:
        self._undo.close()
