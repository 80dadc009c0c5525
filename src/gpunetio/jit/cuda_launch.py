"""Kernels on a GPU. They run concurrently, as kernels on host threads do."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..errors import DriverError, NotSupportedError
from .code import Arguments, Code, Place
from .room import check_room

logger: logging.Logger = logging.getLogger("gpunetio.kernel")

_SETTINGS = {
    # With lazy loading, the first launch of a kernel waits until all running kernels have ended.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share these connections. With CUDA's default of 8, a ninth kernel may wait until the first has ended.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_STAY = contextlib.nullcontext()


def set_up_cuda() -> None:
    """Configure CUDA for kernels that wait for each other. Call this before CUDA is initialised.

    Settings in the environment take precedence.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


@functools.cache
def cuda_runtime() -> ModuleType:
    """Return CUDA's runtime. NotSupportedError if its bindings are not installed."""
    set_up_cuda()
    try:
        from cuda.bindings import runtime  # type: ignore[attr-defined]
    except ImportError:
        raise NotSupportedError("no CUDA here: install gpunetio[cuda], or use the host (--target cpu)") from None
    return runtime


@functools.cache
def cuda_available() -> bool:
    """Return whether Numba can launch on a GPU here."""
    set_up_cuda()
    try:
        from numba import cuda

        return bool(cuda.is_available())
    except ImportError:
        return False


@functools.cache
def _idle_streams(ordinal: int) -> list[Any]:
    """Return the streams of a device on which no kernel runs. Appending and popping are atomic.

    They are Numba's streams. CUDA orders them after work that is already in the default stream, so kernels see results
    of CuPy.
    """
    return []


class CudaCode(Code):
    """A kernel for CUDA. Numba compiles it, and the device functions that it calls, at the first launch."""

    reaches_gpu_memory = True

    @functools.cached_property
    def compiled(self) -> Any:
        """Return Numba's dispatcher."""
        from numba import cuda

        from . import cuda_functions

        cuda_functions.install()
        return cuda.jit(self.function)

    def prepare(self, args: Arguments, threads: int) -> None:
        """Do nothing: a launch does not wait for kernels that run."""

    def check_room(self, grid: int, place: Place) -> None:
        check_room(self.name, grid, place.ordinal)

    def launch(self, args: Arguments, grid: int, block: int, place: Place, ended: Callable[[], None]) -> CudaLaunch:
        with self.compiling(args):
            return CudaLaunch(self.compiled, args, grid, block, place.ordinal, ended)


class CudaLaunch:
    """A kernel that runs on a GPU, in a stream of its own. `wait(timeout)` returns whether it has ended.

    A failure is logged, and `wait` and `done` raise it.
    """

    def __init__(
        self, compiled: Any, args: Arguments, grid: int, block: int, ordinal: int, ended: Callable[[], None]
    ):
        from numba import cuda
        from numba.cuda.dispatcher import config  # type: ignore[attr-defined]

        # A kernel that drives a NIC is small on purpose.
        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]
        self._name = getattr(compiled, "__name__", "")
        self._error: Exception | None = None
        self._idle = _idle_streams(ordinal)
        is_here = cuda_runtime().cudaGetDevice()[1] == ordinal  # usually; changing the context costs some µs
        with _STAY if is_here else cuda.gpus[ordinal]:
            self._event = cuda.event(timing=False)
            try:
                stream = self._idle.pop()
            except IndexError:
                stream = cuda.stream()
            compiled[grid, block, stream](*args)
            self._event.record(stream)
        threading.Thread(target=self._watch, args=(stream, ordinal, ended), daemon=True).start()

    def _watch(self, stream: Any, ordinal: int, ended: Callable[[], None]) -> None:
        cuda_runtime().cudaSetDevice(ordinal)  # for observers that call CUDA, which would open the first device
        while not self.ended:
            time.sleep(200e-6)
        if self._error is None:
            self._idle.append(stream)
        else:
            logger.error("kernel %s: %s", self._name, self._failure())
        ended()

    def _failure(self) -> str:
        return (
            f"a kernel has failed, and with it the CUDA context: {self._error}; look for the invalid access with "
            "compute-sanitizer, and start a new process"
        )

    def __repr__(self) -> str:
        return f"<launch of {self._name} on a GPU, {'ended' if self.ended else 'running'}>"

    @property
    def ended(self) -> bool:
        """Return whether the kernel has ended. An event that reports an error counts as ended: a kernel has failed."""
        try:
            return bool(self._event.query())
        except Exception as error:  # a class of Numba's
            self._error = error
            return True

    @property
    def done(self) -> bool:
        """Return whether the kernel has ended. DriverError if this kernel or an earlier one has failed."""
        ended = self.ended
        if ended and self._error is not None:
            raise DriverError(self._failure()) from self._error
        return ended

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the kernel to end, and return whether it has. DriverError as in `done`."""
        end = time.monotonic() + timeout
        while not self.done:
            if time.monotonic() > end:
                return False
            time.sleep(20e-6)
        return True
