"""Kernels on a GPU. They run concurrently, as kernels on host threads do."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from ..errors import DriverError, NotSupportedError
from ..service import take_no_signals
from .code import Arguments, Code, Place
from .frozen import Watch, check_foreign
from .room import check_room

logger: logging.Logger = logging.getLogger("gpunetio.kernel")

_SETTINGS = {
    # With lazy loading, the first launch of a kernel waits until all running kernels have ended.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share these connections. With CUDA's default of 8, a ninth kernel may wait until the first has ended.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_STAY = contextlib.nullcontext()
_LOOK = 200e-6  # seconds between two looks at the kernels that run


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


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a function of CUDA's runtime has returned beside its status. DriverError if that is not 0."""
    error, *values = result
    if int(error) != 0:
        _, text = cuda_runtime().cudaGetErrorString(error)
        raise DriverError(f"{what}: {text.decode()} (CUDA error {int(error)})", status=int(error))
    return values[0] if len(values) == 1 else values


def new_stream() -> Any:
    """Return a new stream of the current device. The default stream, and so other libraries, does not wait for it."""
    rt = cuda_runtime()
    return checked(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking), "cudaStreamCreateWithFlags")


@functools.cache
def cuda_available() -> bool:
    """Return whether Numba can launch on a GPU here."""
    set_up_cuda()
    try:
        from numba import cuda

        return bool(cuda.is_available())
    except ImportError:
        return False


@dataclass(frozen=True)
class _Stream:
    """A stream, and the event that marks the end of its last kernel. Launches reuse them, for both cost much to make.

    The event is Numba's, and so is the stream. The default stream does not wait for it: a kernel may run for as long as
    it waits for a peer, while PyTorch, which uses that stream, goes on.
    """

    handle: Any
    event: Any

    @staticmethod
    def make() -> _Stream:
        """Return a new one, of the current device."""
        from numba import cuda

        return _Stream(cuda.external_stream(int(new_stream())), cuda.event(timing=False))

    def wait_for_default_stream(self) -> None:
        """Let what follows see the results of work that is in the default stream by now, such as CuPy's."""
        self.event.record()
        self.event.wait(self.handle)


@functools.cache
def _idle_streams(ordinal: int) -> list[_Stream]:
    """Return the streams of a device on which no kernel runs. Appending and popping are atomic."""
    return []


class CudaCode(Code):
    """A kernel for CUDA. Numba compiles it, and the device functions that it calls, at the first launch."""

    reaches_gpu_memory = True

    def __init__(self, function: Callable[..., None]):
        super().__init__(function)
        self._watch = Watch(function)
        self._compiled: tuple[str, Any] | None = None

    @property
    def compiled(self) -> Any:
        """Return Numba's dispatcher, for the values that the kernel freezes now."""
        frozen = self._watch.now()
        found = self._compiled
        if found is None or found[0] != frozen.digest:
            from numba import cuda

            from . import cuda_functions

            cuda_functions.install()
            check_foreign(frozen)
            found = self._compiled = frozen.digest, cuda.jit(self.function)
        return found[1]

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
        self._label = f"kernel {self._name}[{grid}, {block}] on GPU {ordinal}"
        self._error: Exception | None = None
        self._ended = False
        self._given_back = threading.Lock()  # taken by the first thread that sees the end, for good
        self._idle = _idle_streams(ordinal)
        _watcher.start()  # before the kernel: the system may have no room for a thread
        is_here = cuda_runtime().cudaGetDevice()[1] == ordinal  # usually; changing the context costs some µs
        with _STAY if is_here else cuda.gpus[ordinal]:
            try:
                self._stream = self._idle.pop()
            except IndexError:
                self._stream = _Stream.make()
            self._stream.wait_for_default_stream()
            compiled[grid, block, self._stream.handle](*args)
            self._stream.event.record(self._stream.handle)
        _watcher.watch(_Watched(self, ordinal, ended))

    def _failure(self) -> str:
        return (
            f"a kernel has failed, and with it the CUDA context: {self._error}; look for the invalid access with "
            "compute-sanitizer, and start a new process"
        )

    def __str__(self) -> str:
        return self._label

    def __repr__(self) -> str:
        return f"<launch of {self._name} on a GPU, {'ended' if self.ended else 'running'}>"

    @property
    def ended(self) -> bool:
        """Return whether the kernel has ended. An event that reports an error counts as ended: a kernel has failed.

        Several threads may ask at once, and finalizers, so nobody waits for a lock. The first that sees the end notes
        it before it gives the stream back. So an answer is about another launch only if the end is noted by then, and
        that counts.
        """
        if self._ended:
            return True
        try:
            ended = bool(self._stream.event.query())
        except Exception as error:  # a class of Numba's
            ended = True
            if not self._ended:
                self._error = error
        if ended:
            self._ended = True
            if self._given_back.acquire(blocking=False) and self._error is None:
                self._idle.append(self._stream)
        return self._ended

    def log_failure(self) -> None:
        """Log that the kernel has failed, if it has."""
        if self._error is not None:
            logger.error("kernel %s: %s", self._name, self._failure())

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


@dataclass(frozen=True)
class _Watched:
    """A launch on the device `ordinal`, and what is called when it has ended."""

    launch: CudaLaunch
    ordinal: int
    ended: Callable[[], None]

    def look(self) -> bool:
        """Return whether the launch runs. If it does not any more, tell that."""
        cuda_runtime().cudaSetDevice(self.ordinal)  # for observers that call CUDA, which would open the first device
        if not self.launch.ended:
            return True
        self.launch.log_failure()
        self.ended()
        return False


class _Watcher:
    """The thread that sees kernels end, and tells it. It sleeps while none runs.

    There is one for all launches: to start a thread took longer than the rest of a launch.
    """

    def __init__(self) -> None:
        self._new: SimpleQueue[_Watched] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self._started:
            with self._starting:
                if not self._started:
                    threading.Thread(target=self._watch, name="gpunetio launches", daemon=True).start()
                    self._started = True

    def watch(self, watched: _Watched) -> None:
        """Watch a launch."""
        self._new.put(watched)

    def _watch(self) -> None:
        take_no_signals()
        running: list[_Watched] = []
        while True:
            if not running:
                running.append(self._new.get())
            while not self._new.empty():
                running.append(self._new.get())
            running = [watched for watched in running if self._look(watched)]
            time.sleep(_LOOK)

    def _look(self, watched: _Watched) -> bool:
        try:
            return watched.look()
        except BaseException:  # of an observer; it is reported as if it had ended a thread, and the others go on
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            return False


_watcher = _Watcher()


def _after_fork() -> None:
    """Forget the thread in a forked child, which does not have it, and the launches, which are the parent's."""
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_after_fork)
