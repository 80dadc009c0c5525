"""Run kernels until the user stops the sample."""

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

LOOK_SECONDS = 0.1  # between checks of the kernel
END_SECONDS = 30.0  # for a kernel to end after it was told to
SIGNALS = signal.SIGINT, signal.SIGTERM


class StopWord:
    """A word in memory that host and kernel can access. The kernel ends when it is not 0."""

    memory: GpuMemory

    def __init__(self, gpu: Gpu):
        self.memory = gpu.alloc(8, MemType.CPU_GPU)

    def address_on(self, gpu: Gpu) -> GpuMemory | int:
        """Return the word as an argument of kernels on `gpu`. Kernels on host threads take its address for the CPU."""
        return self.memory if gpu.target == "cuda" else int(self.memory.array.ctypes.data)

    def set(self) -> None:
        """Tell the kernel to end."""
        self.memory.array.view(np.int64)[0] = 1

    @property
    def is_set(self) -> bool:
        """Return whether the kernel was told to end."""
        return bool(self.memory.array.view(np.int64)[0])

    def follow(self, launch: Launch, seconds: float | None = None) -> None:
        """Wait until the kernel ends: after Ctrl+C or SIGTERM, or else within `seconds`, if given."""
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
        yield  # Python delivers signals only to the main thread
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
    """Return the error for a kernel's negative status. `detail` is added to the text if it is not None."""
    what = f"the kernel ended with '{NAMES.get(status, status)}'{f': {detail}' if detail else ''}"
    return TimedOutError(what) if status == dev.ETIMEDOUT else DriverError(what)
