"""The CUDA driver, through ctypes: whose memory an address is, and what a mover needs of a GPU.

Only symbols of libcuda that have kept their form since CUDA 11 are used. The primary context is the one that the
runtime, Numba, CuPy and PyTorch use, so that their memory is ours to copy.
"""

from __future__ import annotations

import ctypes
import functools
import time
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import DriverError, InitializationError
from .movers import DEVICE, MEMORY_TYPE, RANGE_SIZE, RANGE_START

_IS_MANAGED, _DEVICE_ORDINAL = 8, 9  # CUpointer_attribute
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: kernels of the default stream may run for ever
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
    """What a mover is given of a device. Events are created; `close` waits for the stream and frees everything."""

    calls: Calls
    context: int
    stream: int

    def create_event(self) -> int:
        """A new event."""
        ...

    def alloc_pinned(self, nbytes: int) -> int:
        """The address of new pinned memory, which belongs to the device's handle."""
        ...

    def close(self) -> None:
        """Wait until the stream is idle, with a deadline, and free everything."""
        ...


class DeviceDriver(Protocol):
    """Finds and opens devices with memory that a CPU cannot touch."""

    def locate(self, address: int, nbytes: int) -> int | None:
        """The ordinal of the device in whose memory all of a range lies, or None."""
        ...

    def open(self, ordinal: int) -> CopyDevice:
        """Open a device for copies; the caller closes it."""
        ...

    def error_name(self, code: int) -> str:
        """The name of a CUresult."""
        ...


@functools.cache
def cuda_driver() -> CudaDriver | None:
    """The driver of this machine, or None where there is none, or no GPU."""
    try:
        return CudaDriver()
    except (OSError, DriverError):
        return None


class CudaDriver:
    """A `DeviceDriver`: libcuda."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver; DriverError unless it succeeds."""
        code = getattr(self._lib, name)(*args)
        if code != 0:
            raise DriverError(f"{name}: {self.error_name(code)} (CUDA error {code})", status=code)

    def error_name(self, code: int) -> str:
        """See `DeviceDriver`."""
        name = ctypes.c_char_p()
        if self._lib.cuGetErrorName(code, ctypes.byref(name)) != 0 or name.value is None:
            return "unknown error"
        return name.value.decode()

    def address_of(self, name: str) -> int:
        """Where a function of the driver is."""
        return ctypes.cast(getattr(self._lib, name), ctypes.c_void_p).value or 0

    def locate(self, address: int, nbytes: int) -> int | None:
        """See `DeviceDriver`. A range may span allocations, as those of growing arenas do.

        Managed memory counts as the CPU's, which reaches it.
        """
        end = address + nbytes
        found: int | None = None
        while address < end:
            kind, managed, ordinal, start, size = self._attributes(address)
            if kind != DEVICE or managed or found not in (None, ordinal):
                return None
            if size == 0:  # the driver does not say where this memory ends: the last byte has to do
                start, size = address, max(1, end - address - 1)
            if not start <= address < start + size:
                return None
            found, address = ordinal, start + size
        return found

    def _attributes(self, address: int) -> tuple[int, ...]:
        """Type, whether it is managed, device, and start and size of the allocation; zeros if it is not CUDA's."""
        names = (MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, RANGE_START, RANGE_SIZE)
        answers = (ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int(), ctypes.c_uint64(), ctypes.c_uint64())
        pointers = (ctypes.c_void_p * len(names))(*(ctypes.addressof(answer) for answer in answers))
        code = self._lib.cuPointerGetAttributes(
            len(names), (ctypes.c_uint * len(names))(*names), pointers, ctypes.c_uint64(address)
        )
        return tuple(answer.value if code == 0 else 0 for answer in answers)

    def open(self, ordinal: int) -> CudaCopyDevice:
        """See `DeviceDriver`."""
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
            with _Current(driver, context):
                driver.call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        except BaseException:
            driver.call("cuDevicePrimaryCtxRelease_v2", self._device)
            raise
        self.context, self.stream = context.value or 0, self._stream.value or 0
        self.calls = Calls(*map(driver.address_of, (
            "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync",
            "cuEventRecord", "cuEventQuery", "cuPointerGetAttributes", "cuCtxSetCurrent",
        )))  # fmt: skip

    def create_event(self) -> int:
        """See `CopyDevice`."""
        event = ctypes.c_void_p()
        with _Current(self._driver, self._context):
            self._driver.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        self._events.append(event)
        return event.value or 0

    def alloc_pinned(self, nbytes: int) -> int:
        """See `CopyDevice`."""
        memory = ctypes.c_void_p()
        with _Current(self._driver, self._context):
            self._driver.call("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(nbytes), _PORTABLE)
        self._pinned.append(memory)
        return memory.value or 0

    def close(self) -> None:
        """See `CopyDevice`. What a GPU that hangs or a driver that has gone will not take back stays allocated."""
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


class _Current:
    """A context that is this thread's for a while."""

    def __init__(self, driver: CudaDriver, context: ctypes.c_void_p):
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *exc: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
