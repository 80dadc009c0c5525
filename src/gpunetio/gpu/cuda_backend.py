"""A CUDA device, through cuda-bindings: memory, plain registration of host pages, copies beside running kernels."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from typing import Any

import numpy as np

from ..enums import MemType
from ..errors import DriverError, InitializationError, NotFoundError, NotSupportedError, TimedOutError
from ..memory import PAGE

# With lazy loading, the first launch of a kernel beside a running one waits for that one to end.
_EAGER = ("CUDA_MODULE_LOADING", "EAGER")
_COPY_TIMEOUT = 10.0


def _runtime() -> Any:
    os.environ.setdefault(*_EAGER)
    try:
        from cuda.bindings import runtime  # type: ignore[attr-defined]
    except ImportError:
        raise NotSupportedError("no CUDA here: install gpunetio[cuda], or use the host (--target cpu)") from None
    return runtime


def _check(result: tuple[Any, ...], what: str) -> Any:
    error, *values = result
    if int(error) != 0:
        _, text = _runtime().cudaGetErrorString(error)
        raise DriverError(f"{what}: {text.decode()} (CUDA error {int(error)})", status=int(error))
    return values[0] if len(values) == 1 else values


def device_count() -> int:
    """CUDA devices of this machine; 0 without a driver."""
    try:
        error, count = _runtime().cudaGetDeviceCount()
    except NotSupportedError:
        return 0
    return count if int(error) == 0 else 0


def pci_bus_id(ordinal: int) -> str:
    """PCI bus id of a device."""
    return _check(_runtime().cudaDeviceGetPCIBusId(16, ordinal), "cudaDeviceGetPCIBusId").split(b"\0")[0].decode()


def ordinal_of(bus_id: str) -> int:
    """The CUDA ordinal of a PCI bus id (`cudaDeviceGetByPCIBusId`)."""
    error, ordinal = _runtime().cudaDeviceGetByPCIBusId(bus_id.encode())
    if int(error) != 0:
        present = ", ".join(pci_bus_id(i) for i in range(device_count()))
        raise NotFoundError(f"no GPU at PCI address {bus_id!r}; there are: {present}")
    return ordinal


class _Allocation:
    """Memory of CUDA's, freed with the last reference to this."""

    def __init__(self, free: Any, base: int):
        weakref.finalize(self, free, base)


class CudaBackend:
    """What `Gpu` asks of a CUDA device."""

    target = "cuda"

    def __init__(self, ordinal: int):
        self._rt = _runtime()
        self.ordinal = ordinal
        try:
            from numba import cuda

            _check(self._rt.cudaSetDevice(ordinal), "cudaSetDevice")
            cuda.select_device(ordinal)
            self.stream = cuda.stream()
        except Exception as error:
            raise InitializationError(f"GPU {ordinal} could not be opened: {error}") from error
        self.name = pci_bus_id(ordinal)
        # Copies must not wait for kernels, which may run for ever.
        self._copies = _check(
            self._rt.cudaStreamCreateWithFlags(self._rt.cudaStreamNonBlocking), "cudaStreamCreateWithFlags"
        )
        self._pages: dict[int, int] = {}  # registered page → how many users
        self._lock = threading.Lock()

    def alloc(self, nbytes: int, alignment: int, kind: MemType) -> tuple[int, np.ndarray | None, Any]:
        """(device address, CPU view or None, what keeps it allocated)."""
        room = nbytes + max(0, alignment - 1)
        if kind is MemType.CPU_GPU:
            flags = self._rt.cudaHostAllocPortable | self._rt.cudaHostAllocMapped
            base = int(_check(self._rt.cudaHostAlloc(room, flags), "cudaHostAlloc"))
            start = base + -base % max(1, alignment)
            view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
            view[:] = 0
            return start, view, _Allocation(self._rt.cudaFreeHost, base)
        base = int(_check(self._rt.cudaMalloc(room), "cudaMalloc"))
        start = base + -base % max(1, alignment)
        _check(self._rt.cudaMemsetAsync(start, 0, nbytes, self._copies), "cudaMemsetAsync")
        self._wait_copies()
        return start, None, _Allocation(self._rt.cudaFree, base)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between any two addresses, on a stream of its own."""
        _check(self._rt.cudaSetDevice(self.ordinal), "cudaSetDevice")
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        _check(self._rt.cudaMemcpyAsync(target, source, nbytes, kind, self._copies), "cudaMemcpyAsync")
        self._wait_copies()

    def _wait_copies(self) -> None:
        end = time.monotonic() + _COPY_TIMEOUT
        not_ready = self._rt.cudaError_t.cudaErrorNotReady
        while (state := self._rt.cudaStreamQuery(self._copies))[0] == not_ready:
            if time.monotonic() > end:
                raise TimedOutError(f"a copy on GPU {self.name} did not end within {_COPY_TIMEOUT:g} s")
        _check(state, "cudaStreamQuery")

    def map(self, address: int, nbytes: int) -> int:
        """Register the pages of ordinary host memory, so that kernels reach them: their device address."""
        _check(self._rt.cudaSetDevice(self.ordinal), "cudaSetDevice")
        flags = self._rt.cudaHostRegisterPortable | self._rt.cudaHostRegisterMapped
        registered_already = self._rt.cudaError_t.cudaErrorHostMemoryAlreadyRegistered
        with self._lock:
            for page in self._span(address, nbytes):
                if page not in self._pages:
                    result = self._rt.cudaHostRegister(page, PAGE, flags)
                    if result[0] == registered_already:  # by its owner, or allocated pinned
                        self._rt.cudaGetLastError()
                        continue
                    _check(result, "cudaHostRegister")
                self._pages[page] = self._pages.get(page, 0) + 1
        return int(_check(self._rt.cudaHostGetDevicePointer(address, 0), "cudaHostGetDevicePointer"))

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`."""
        with self._lock:
            for page in self._span(address, nbytes):
                if page in self._pages:
                    self._pages[page] -= 1
                    if self._pages[page] == 0:
                        del self._pages[page]
                        _check(self._rt.cudaHostUnregister(page), "cudaHostUnregister")

    @staticmethod
    def _span(address: int, nbytes: int) -> range:
        return range(address & -PAGE, address + nbytes, PAGE)

    def close(self) -> None:
        """Release the stream."""
        _check(self._rt.cudaStreamDestroy(self._copies), "cudaStreamDestroy")
