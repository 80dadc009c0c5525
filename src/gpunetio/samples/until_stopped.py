"""Kernels that run until somebody stops the sample."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from .. import device as dev
from ..device.status import NAMES
from ..enums import MemType
from ..errors import DocaError, DriverError, TimedOutError
from ..gpu import Gpu, GpuMemory
from ..jit.code import Launch

LOOK_SECONDS = 0.1  # between looks at the kernel
END_SECONDS = 30.0  # for a kernel to end after it was told to
SIGNALS = signal.SIGINT, signal.SIGTERM


class StopWord:
    """A word in memory that host and kernel reach, and that ends the kernel when it is not 0."""

    memory: GpuMemory

    def __init__(self, gpu: Gpu):
        self.memory = gpu.alloc(8, MemType.CPU_GPU)

    def address_on(self, gpu: Gpu) -> GpuMemory | int:
        """Return what kernels take: those on threads of the host, beside a GPU, where the CPU has the word."""
        return self.memory if gpu.target == "cuda" else int(self.memory.array.ctypes.data)

    def set(self) -> None:
        """Tell the kernel to end."""
        self.memory.array.view(np.int64)[0] = 1

    @property
    def is_set(self) -> bool:
        """Return whether the kernel was told to end."""
        return bool(self.memory.array.view(np.int64)[0])

    def follow(self, launch: Launch, seconds: float | None = None) -> None:
        """Wait until the kernel ends, which it does after Ctrl+C or SIGTERM; otherwise within `seconds`, if given."""
        with on_signals(self.set):
            waited = stopped = 0.0
            while not launch.wait(LOOK_SECONDS):
                waited += LOOK_SECONDS
                if self.is_set:
                    stopped += LOOK_SECONDS
                elif seconds is not None and waited >= seconds:
                    self.set()
                if stopped > END_SECONDS:
                    raise TimedOutError(f"the kernel did not end within {END_SECONDS:g} s after it was told to")


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl+C and SIGTERM call `stop`, instead of ending the program."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python has signals only there
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        stop()

    before = [(number, signal.signal(number, handler)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler_before in before:
            signal.signal(number, handler_before)


def failure(status: int, detail: object) -> DocaError:
    """Return the error for a kernel that has ended with a negative status. `detail` says more, if it is not None."""
    what = f"the kernel ended with '{NAMES.get(status, status)}'{f': {detail}' if detail else ''}"
    return TimedOutError(what) if status == dev.ETIMEDOUT else DriverError(what)
