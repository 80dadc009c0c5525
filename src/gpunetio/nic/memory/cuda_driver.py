"""The CUDA driver, through ctypes: it says which GPU's memory an address is in, and opens GPUs for streams.

This uses only symbols of libcuda whose signatures have not changed since CUDA 11. It uses the primary context, as
CUDA's runtime, CuPy and PyTorch do, so that it can copy their memory.
"""

from __future__ import annotations

import ctypes
import functools
import time
from dataclasses import dataclass
from typing import Protocol

from ...errors import DriverError, InitializationError
from .streams import DEVICE, HOST, MEMORY_TYPE, RANGE_SIZE, RANGE_START

_IS_MANAGED, _DEVICE_ORDINAL = 8, 9  # CUpointer_attribute
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no wait for the default stream, whose kernels may run for ever
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_NOT_READY = 600
_CLOSE_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class Calls:
    """Addresses of C functions with the signatures of cuMemcpyHtoDAsync, cuMemcpyDtoHAsync, cuMemcpyDtoDAsync,
    cuMemcpyAsync, cuEventRecord, cuEventQuery, cuPointerGetAttributes and cuCtxSetCurrent."""

    copy_in: int
    copy_out: int
    copy_within: int
    copy_between: int
    record: int
    query: int
    attributes: int
    enter: int


class CopyDevice(Protocol):
    """A device as a DMA stream uses it: a stream, events and pinned memory."""

    calls: Calls
    context: int
    stream: int

    def create_event(self) -> int:
        """Create an event, which belongs to the device's handle, and return it."""
        ...

    def alloc_pinned(self, nbytes: int) -> int:
        """Return the address of new pinned memory, which belongs to the device's handle."""
        ...

    def close(self) -> None:
        """Wait until the stream is idle, with a deadline, and free everything."""
        ...


class DeviceDriver(Protocol):
    """A driver that finds and opens devices with memory that a CPU cannot touch."""

    def locate(self, address: int, nbytes: int) -> int | None:
        """Return the ordinal of the device whose memory contains the whole range, or None."""
        ...

    def open(self, ordinal: int) -> CopyDevice:
        """Open a device for copies; the caller closes it."""
        ...

    def error_name(self, code: int) -> str:
        """Return the name of a CUresult."""
        ...


@functools.cache
def cuda_driver() -> CudaDriver | None:
    """Return the driver of this machine, or None if it has no driver or no GPU."""
    try:
        return CudaDriver()
    except (OSError, DriverError):
        return None


class CudaDriver:
    """The `DeviceDriver` of libcuda."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *args: object) -> None:
        """Call a function of the driver. DriverError unless it succeeds."""
        code = getattr(self._lib, name)(*args)
        if code != 0:
            raise DriverError(f"{name}: {self.error_name(code)} (CUDA error {code})", status=code)

    def error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        if self._lib.cuGetErrorName(code, ctypes.byref(name)) != 0 or name.value is None:
            return "unknown error"
        return name.value.decode()

    def count(self) -> int:
        """Return how many GPUs there are."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def address_of(self, name: str) -> int:
        """Return the address of a function of the driver."""
        return ctypes.cast(getattr(self._lib, name), ctypes.c_void_p).value or 0

    def locate(self, address: int, nbytes: int) -> int | None:
        """Return the device's ordinal, or None. A range may span allocations, as in growing arenas.

        Managed memory counts as host memory, because the CPU can touch it.
        """
        end = address + nbytes
        found: int | None = None
        while address < end:
            kind, managed, ordinal, start, size = self._attributes(address)
            if kind != DEVICE or managed or found not in (None, ordinal):
                return None
            if size == 0:  # the driver does not say where this memory ends: check only the last byte
                start, size = address, max(1, end - address - 1)
            if not start <= address < start + size:
                return None
            found, address = ordinal, start + size
        return found

    def is_pinned(self, address: int) -> bool:
        """Return whether CUDA reaches host memory at an address already."""
        return self._attributes(address)[0] == HOST

    def _attributes(self, address: int) -> tuple[int, ...]:
        """Return memory type, managed flag, device, and start and size of the allocation; zeros if it is not CUDA's."""
        names = (MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, RANGE_START, RANGE_SIZE)
        answers = (ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int(), ctypes.c_uint64(), ctypes.c_uint64())
        pointers = (ctypes.c_void_p * len(names))(*(ctypes.addressof(answer) for answer in answers))
        code = self._lib.cuPointerGetAttributes(
            len(names), (ctypes.c_uint * len(names))(*names), pointers, ctypes.c_uint64(address)
        )
        return tuple(answer.value if code == 0 else 0 for answer in answers)

    def open(self, ordinal: int) -> CudaCopyDevice:
        try:
            return CudaCopyDevice(self, ordinal)
        except DriverError as error:
            raise InitializationError(f"GPU {ordinal} cannot be used for copies: {error}") from error


class CudaCopyDevice:
    """A `CopyDevice`: a non-blocking stream of a GPU, events, and pinned memory."""

    context: int
    stream: int
    calls: Calls

    def __init__(self, driver: CudaDriver, ordinal: int):
        self._driver = driver
        self._device = ctypes.c_int()
        self._events: list[ctypes.c_void_p] = []
        self._pinned: list[ctypes.c_void_p] = []
        self._stream = ctypes.c_void_p()
        driver.call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        try:
            with Current(driver, context):
                driver.call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        except BaseException:
            driver.call("cuDevicePrimaryCtxRelease_v2", self._device)
            raise
        self.context, self.stream = context.value or 0, self._stream.value or 0
        self.calls = Calls(*map(driver.address_of, (
            "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync",
            "cuEventRecord", "cuEventQuery", "cuPointerGetAttributes", "cuCtxSetCurrent",
        )))

    def create_event(self) -> int:
        event = ctypes.c_void_p()
        with Current(self._driver, self._context):
            self._driver.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        self._events.append(event)
        return event.value or 0

    def alloc_pinned(self, nbytes: int) -> int:
        memory = ctypes.c_void_p()
        with Current(self._driver, self._context):
            self._driver.call("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(nbytes), _PORTABLE)
        self._pinned.append(memory)
        return memory.value or 0

    def close(self) -> None:
        """Wait for the stream and free everything. What a hung GPU or an unloaded driver holds stays allocated."""
        lib = self._driver._lib
        if lib.cuCtxPushCurrent_v2(self._context) != 0:
            return
        end = time.monotonic() + _CLOSE_TIMEOUT
        while (code := lib.cuStreamQuery(self._stream)) == _NOT_READY and time.monotonic() < end:
            time.sleep(50e-6)
        if code != _NOT_READY:
            for memory in self._pinned:
                lib.cuMemFreeHost(memory)
            for event in self._events:
                lib.cuEventDestroy_v2(event)
            lib.cuStreamDestroy_v2(self._stream)
        lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        lib.cuDevicePrimaryCtxRelease_v2(self._device)


class Current:
    """A context manager that makes a CUDA context current on this thread."""

    def __init__(self, driver: CudaDriver, context: ctypes.c_void_p):
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *exc: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
