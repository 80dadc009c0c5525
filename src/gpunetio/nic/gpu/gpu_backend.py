"""A GPU that makes a NIC's turns: the kernel of slices, its streams, and the memory that the GPU can access.

The GPU accesses its own memory, that of GPUs to which it has peer access, and host memory that is registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

import numpy as np

from ...errors import DriverError, InitializationError, NotFoundError, NotSupportedError
from ...jit.cubin import cubin
from ...jit.cuda_launch import set_up_cuda
from ...jit.room import need
from ...memory import HostMemory
from ..control.regions.gpu_sharing import open_shared, share, unmap_closed
from ..engine.hardware import CUDA, SharedMapping
from ..memory.cuda_driver import Current, CudaDriver, cuda_driver
from ..state.board import BOARD
from ..state.slices import SLICES
from .pinned import Pinned
from .slice_kernel import OPTIONS, PREFERRED, THREADS, gpunetio_slice
from .slices import SLICE_NS

# CUdevice_attribute: MULTIPROCESSOR_COUNT, COMPUTE_CAPABILITY_MAJOR, _MINOR, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_SMS, _MAJOR, _MINOR, _SAME_ADDRESSES = 16, 75, 76, 91
_SHARED_OF_BLOCK = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
# CUfunction_attribute: SHARED_SIZE_BYTES, which is fixed, and MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED, _MOST_SHARED = 1, 8
_LINE = 128
_CALLS = {"launch": "cuLaunchKernelEx", "enter": "cuCtxSetCurrent", "query": "cuStreamQuery"}  # by field of SLICES
_ENABLED_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    )


class _Device:
    """A GPU of this process: its primary context, and the kernel of slices in it. They stay until the process ends."""

    def __init__(self, driver: CudaDriver, ordinal: int):
        self.driver, self.ordinal = driver, ordinal
        device, context = ctypes.c_int(), ctypes.c_void_p()
        count = driver.count()
        if ordinal >= count:
            raise NotFoundError(f"no GPU {ordinal} for the NIC's engine; there are {count}, counted from 0")
        driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device
        if not self._attribute(_SAME_ADDRESSES):
            raise NotSupportedError(
                f"GPU {ordinal} gives registered host memory other addresses: it cannot make a NIC's turns"
            )
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.context = context
        self.peers = frozenset(other for other in range(count) if other != ordinal and self._reach(other))
        self.sms = self._attribute(_SMS)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self.current():
            image = cubin(gpunetio_slice, (self._attribute(_MAJOR), self._attribute(_MINOR)), OPTIONS, PREFERRED)
            driver.call("cuModuleLoadData", ctypes.byref(module), image)
            driver.call("cuModuleGetFunction", ctypes.byref(function), module, gpunetio_slice.__name__.encode())
            fixed = ctypes.c_int()
            driver.call("cuFuncGetAttribute", ctypes.byref(fixed), _SHARED, function)
            self.shared_bytes = (self._attribute(_SHARED_OF_BLOCK) - fixed.value) & -_LINE
            driver.call("cuFuncSetAttribute", function, _MOST_SHARED, self.shared_bytes)
        self.function = function.value or 0

    def _reach(self, ordinal: int) -> bool:
        """Enable access to the memory of another GPU, over NVLink or PCIe. Return whether that is possible."""
        device, context, can = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self.driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.driver.call("cuDeviceCanAccessPeer", ctypes.byref(can), self._device, device)
        if not can.value:
            return False
        self.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            with self.current():
                self.driver.call("cuCtxEnablePeerAccess", context, 0)
        except DriverError as error:
            if error.status != _ENABLED_ALREADY:
                raise
        return True

    def current(self) -> Current:
        """Return a context manager that makes the context current on this thread."""
        return Current(self.driver, self.context)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value


@functools.cache
def _device(ordinal: int) -> _Device:
    set_up_cuda()
    driver = cuda_driver()
    if driver is None:
        raise NotSupportedError("engine = 'gpu': this machine has no CUDA driver, or no GPU; use engine 'cpu'")
    try:
        return _Device(driver, ordinal)
    except DriverError as error:
        raise InitializationError(f"GPU {ordinal} cannot make a NIC's turns: {error}") from error


@functools.cache
def _pinned() -> Pinned:
    device = _device(0)
    return Pinned(device.driver, device.current)


class GpuSliceBackend:
    """A GPU where a NIC makes its turns."""

    def __init__(self, ordinal: int, copiers: int):
        self._device, self._copiers = _device(ordinal), copiers
        self._driver = self._device.driver
        self._memory: list[HostMemory] = []
        self._kept: list[object] = []  # what launches point to
        self._streams: list[ctypes.c_void_p] = []
        self._allocated: list[int] = []
        self._needed = 0
        _pinned().open()
        try:
            with self._device.current():
                self._allocations = self._new_stream(0)  # on which memory is freed without waiting for kernels
        except BaseException:
            _pinned().close()
            raise

    def _new_stream(self, priority: int) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._driver.call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, priority)
        self._streams.append(stream)
        return stream

    def contains(self, address: int, nbytes: int) -> bool:
        ordinal = self._driver.locate(address, nbytes)
        return ordinal == self._device.ordinal or ordinal in self._device.peers

    def is_near(self, address: int, nbytes: int) -> bool:
        return self._driver.locate(address, nbytes) == self._device.ordinal

    sharing = CUDA

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
        with self._device.current():
            return share(self._driver, address, nbytes)

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> SharedMapping:
        return open_shared(self._driver, self._device.current, self._device.ordinal, nbytes, handle, fds)

    def add(self, record: np.void, address: int) -> None:
        with self._device.current():
            least, greatest = ctypes.c_int(), ctypes.c_int()
            self._driver.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            stream = self._new_stream(greatest.value)  # so that a slice runs before waiting blocks of other kernels
        memory = HostMemory(SLICES.size)
        self._memory.append(memory)
        config = _LaunchConfig(1 + self._copiers, 1, 1, THREADS, 1, 1, 0, stream, None, 0)
        board = self._alloc(BOARD.size) if self._copiers else 0
        arguments = (ctypes.c_int64 * 2)(address, board)
        first = ctypes.addressof(arguments)
        parameters = (ctypes.c_void_p * 3)(first, first + 8, memory.address + SLICES.number)
        self._kept += [config, arguments, parameters]
        (row,) = memory.view(SLICES.dtype)
        for field, function in _CALLS.items():
            row[field] = self._driver.address_of(function)
        row["config"], row["parameters"] = ctypes.addressof(config), ctypes.addressof(parameters)
        row["shared"] = ctypes.addressof(config) + _LaunchConfig.shared.offset
        row["function"], row["context"], row["stream"] = self._device.function, self._device.context.value, stream.value
        record["slices"], record["slice_ns"], record["shared"] = memory.address, SLICE_NS, 1
        record["shared_bytes"] = self._device.shared_bytes
        record["board"] = board
        self._need(1)

    def _need(self, change: int) -> None:
        """Change the number of SMs that this NIC needs, one per worker. Nothing waits for copiers."""
        need(self._device.ordinal, self._device.sms, change)
        self._needed += change

    def doorbell_lines(self, lines: HostMemory) -> int:
        return self._alloc(2 * lines.nbytes)

    def _alloc(self, nbytes: int) -> int:
        """Return the address of zeroed memory of the GPU, until `close`."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        with self._device.current():
            self._driver.call("cuMemAllocAsync", ctypes.byref(address), size, self._allocations)
            self._allocated.append(address.value)
            self._driver.call("cuMemsetD8Async", address, 0, size, self._allocations)
            self._driver.call("cuStreamSynchronize", self._allocations)
        return address.value

    def map(self, address: int, nbytes: int) -> None:
        _pinned().add(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        _pinned().remove(address, nbytes)

    def why_failed(self, record: np.void) -> str:
        for memory in self._memory:
            if memory.address == record["slices"] and (code := int(memory.view(SLICES.dtype)[0]["failure"])):
                return f"GPU {self._device.ordinal} has failed with {self._driver.error_name(code)} (CUDA error {code})"
        return ""

    def close(self) -> None:
        self._need(-self._needed)
        unmap_closed()
        with contextlib.suppress(DriverError), self._device.current():  # after a kernel has failed, every call fails
            for stream in self._streams:  # warps of the last slices may still be running
                self._driver.call("cuStreamSynchronize", stream)
            for address in self._allocated:
                self._driver.call("cuMemFreeAsync", ctypes.c_uint64(address), self._allocations)
            for stream in self._streams:
                self._driver.call("cuStreamDestroy_v2", stream)
        for memory in self._memory:
            memory.close()
        _pinned().close()
