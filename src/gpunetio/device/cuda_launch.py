"""Kernels on a GPU. Each runs beside all others, as it would on host threads."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import DriverError, NotSupportedError

logger = logging.getLogger("gpunetio.kernel")

_SETTINGS = {
    # With lazy loading, the first launch of a kernel beside a running one waits for that one to end.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share these: of 8, which is CUDA's default, a ninth kernel can wait for the end of the first.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_STAY = contextlib.nullcontext()


def set_up_cuda() -> None:
    """Before CUDA is initialised: what kernels that wait for each other need, unless the environment says otherwise."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


@functools.cache
def cuda_runtime() -> Any:
    """CUDA's runtime; NotSupportedError without its bindings."""
    set_up_cuda()
    try:
        from cuda.bindings import runtime  # type: ignore[attr-defined]
    except ImportError:
        raise NotSupportedError("no CUDA here: install gpunetio[cuda], or use the host (--target cpu)") from None
    return runtime


@functools.cache
def cuda_available() -> bool:
    """Whether Numba can launch on a GPU here."""
    set_up_cuda()
    try:
        from numba import cuda

        return bool(cuda.is_available())
    except ImportError:
        return False


@functools.cache
def _idle_streams(ordinal: int) -> list[Any]:
    """Streams of a device on which no kernel runs; appending and popping are atomic.

    They are Numba's, which CUDA orders behind what is in the default stream already: what CuPy has computed is there.
    """
    return []


class CudaLaunch:
    """A kernel running on a GPU, on a stream that it has alone; `wait(timeout)` returns whether it has ended.

    A failure is logged, and raised by whatever is asked of the launch next: `wait`, or `done`.
    """

    def __init__(
        self, compiled: Any, args: tuple[Any, ...], grid: int, block: int, ordinal: int, ended: Callable[[], None]
    ):
        from numba import cuda
        from numba.cuda.dispatcher import config  # type: ignore[attr-defined]

        # A kernel that drives a NIC is small on purpose.
        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # type: ignore[attr-defined]
        self._name = getattr(compiled, "__name__", "")
        self._error: Exception | None = None
        self._idle = _idle_streams(ordinal)
        is_here = cuda_runtime().cudaGetDevice()[1] == ordinal  # nearly always, and changing the context takes some µs
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
            f"a kernel has failed, and with it the CUDA context: {self._error}; look for the access with "
            "compute-sanitizer, and start a new process"
        )

    def __repr__(self) -> str:
        return f"<launch of {self._name} on a GPU, {'ended' if self.ended else 'running'}>"

    @property
    def ended(self) -> bool:
        """Whether the kernel has ended. So has one whose event answers with an error: a kernel has failed."""
        try:
            return bool(self._event.query())
        except Exception as error:  # a class of Numba's
            self._error = error
            return True

    @property
    def done(self) -> bool:
        """Whether the kernel has ended. DriverError when it, or one before it, has failed."""
        ended = self.ended
        if ended and self._error is not None:
            raise DriverError(self._failure()) from self._error
        return ended

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the kernel to end. DriverError when it, or one before it, has failed."""
        end = time.monotonic() + timeout
        while not self.done:
            if time.monotonic() > end:
                return False
            time.sleep(20e-6)
        return True
