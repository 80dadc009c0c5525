"""Launch kernels on a GPU. They run concurrently, as kernels on host threads do."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import DriverError, InvalidValueError, NotSupportedError
from ..service import take_no_signals
from .arguments import kind_and_words
from .code import Arguments, Code, Place
from .cubin import Image, body_of, digest_of, image_of, threads_of
from .kinds import words_of
from .room import check_room
from .roots import exception_of, values_of
from .targets import FAILED_SYMBOL

logger: logging.Logger = logging.getLogger("gpunetio.kernel")

_SETTINGS = {
    # With lazy loading, the first launch of a kernel waits until all running kernels have ended.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share these connections. With CUDA's default of 8, a ninth kernel may wait until the first has ended.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_C_TYPES: dict[str, Any] = {"i64": ctypes.c_int64, "double": ctypes.c_double, "float": ctypes.c_float}
_LOOK = 200e-6  # seconds between two looks at the running kernels


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
    """Return the results of a function of CUDA's runtime without its status. DriverError if the status is not 0."""
    error, *values = result
    if int(error) != 0:
        _, text = cuda_runtime().cudaGetErrorString(error)
        raise DriverError(f"{what}: {text.decode()} (CUDA error {int(error)})", status=int(error))
    return values[0] if len(values) == 1 else values


@contextlib.contextmanager
def _current(ordinal: int) -> Iterator[None]:
    """Make a device current for the thread in the block. Usually it already is, and changing it costs some µs."""
    rt = cuda_runtime()
    before = checked(rt.cudaGetDevice(), "cudaGetDevice")
    if before != ordinal:
        checked(rt.cudaSetDevice(ordinal), "cudaSetDevice")
    try:
        yield
    finally:
        if before != ordinal:
            rt.cudaSetDevice(before)


def new_stream() -> Any:
    """Return a new non-blocking stream of the current device: the default stream, which other libraries use, does not
    wait for it."""
    rt = cuda_runtime()
    return checked(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking), "cudaStreamCreateWithFlags")


@functools.cache
def cuda_available() -> bool:
    """Return whether kernels can be launched on a GPU here."""
    try:
        error, count = cuda_runtime().cudaGetDeviceCount()
    except (NotSupportedError, RuntimeError):  # no bindings, or no driver
        return False
    return int(error) == 0 and count > 0


@dataclass(frozen=True)
class _Stream:
    """A stream, and the event that marks the end of its last kernel. Both are expensive to create, so launches reuse
    them.

    The default stream does not wait for this stream. So PyTorch, which uses the default stream, keeps running while a
    kernel waits for a peer.
    """

    handle: Any
    event: Any

    @staticmethod
    def make() -> _Stream:
        """Return a new stream of the current device."""
        rt = cuda_runtime()
        event = checked(rt.cudaEventCreateWithFlags(rt.cudaEventDisableTiming), "cudaEventCreateWithFlags")
        return _Stream(new_stream(), event)

    def record(self, stream: Any) -> None:
        """Record the event in a stream: it occurs when everything that is in the stream now has ended."""
        checked(cuda_runtime().cudaEventRecord(self.event, stream), "cudaEventRecord")

    def wait_for_default_stream(self) -> None:
        """Let later work see the results of work that is in the default stream now, such as CuPy's."""
        self.record(0)
        checked(cuda_runtime().cudaStreamWaitEvent(self.handle, self.event, 0), "cudaStreamWaitEvent")

    @property
    def ended(self) -> bool:
        """Return whether the event has occurred. DriverError if a kernel has failed."""
        rt = cuda_runtime()
        (error,) = rt.cudaEventQuery(self.event)
        if error == rt.cudaError_t.cudaErrorNotReady:
            return False
        checked((error,), "cudaEventQuery")
        return True


@functools.cache
def _idle_streams(ordinal: int) -> list[_Stream]:
    """Return the idle streams of a device. Appending and popping are atomic."""
    return []


class LoadedKernel:
    """A kernel that is loaded on a GPU, the current device."""

    def __init__(self, image: Image):
        driver = cuda_driver_bindings()
        self._failures = image.failures
        self._module = _driver(driver.cuModuleLoadData(image.code), "cuModuleLoadData")
        self._function = _driver(driver.cuModuleGetFunction(self._module, image.symbol.encode()), "cuModuleGetFunction")
        self._failed, self._failed_bytes = 0, 0
        if image.failures:
            found = driver.cuModuleGetGlobal(self._module, FAILED_SYMBOL.encode())
            self._failed, self._failed_bytes = _driver(found, "cuModuleGetGlobal")

    def launch(self, grid: int, block: int, stream: Any, words: tuple[Any, ...], kinds: tuple[Any, ...]) -> None:
        """Launch the kernel. `words` are its arguments, of the ctypes types `kinds`."""
        driver, handle = cuda_driver_bindings(), int(stream)
        if self._failures:
            _driver(driver.cuMemsetD8Async(self._failed, 0, self._failed_bytes, handle), "cuMemsetD8Async")
        launched = driver.cuLaunchKernel(self._function, grid, 1, 1, block, 1, 1, 0, handle, (words, kinds), 0)
        _driver(launched, "cuLaunchKernel")

    def failure(self, stream: Any) -> Exception | None:
        """Return the exception that a thread of the last launch has raised. That launch has ended."""
        if not self._failures:
            return None
        number = ctypes.c_int64()
        driver = cuda_driver_bindings()
        read = driver.cuMemcpyDtoHAsync(ctypes.addressof(number), self._failed, self._failed_bytes, int(stream))
        _driver(read, "cuMemcpyDtoHAsync")
        _driver(driver.cuStreamSynchronize(int(stream)), "cuStreamSynchronize")
        return exception_of(self._failures[number.value - 1]) if number.value else None


@functools.cache
def cuda_driver_bindings() -> Any:
    """Return the bindings of CUDA's driver."""
    cuda_runtime()
    from cuda.bindings import driver  # type: ignore[attr-defined]

    return driver


def _driver(result: tuple[Any, ...], what: str) -> Any:
    """Return the results of a function of CUDA's driver without its status. DriverError if the status is not 0."""
    error, *values = result
    if int(error) != 0:
        _, text = cuda_driver_bindings().cuGetErrorString(error)
        raise DriverError(f"{what}: {(text or b'?').decode()} (CUDA error {int(error)})", status=int(error))
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def capability_of(ordinal: int) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    rt = cuda_runtime()
    which = rt.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor, rt.cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor
    major, minor = (checked(rt.cudaDeviceGetAttribute(one, ordinal), "cudaDeviceGetAttribute") for one in which)
    return major, minor


class CudaCode(Code):
    """A kernel for CUDA. It is compiled, with everything that it calls, at the first launch."""

    reaches_gpu_memory = True

    def __init__(self, function: Callable[..., None]):
        super().__init__(function)
        self._loaded: dict[Any, LoadedKernel] = {}
        self._loading = threading.Lock()

    def prepare(self, args: Arguments, threads: int) -> Any:
        """Return the arguments: a launch does not wait for running kernels."""
        return args

    def check_room(self, grid: int, place: Place) -> None:
        check_room(self.name, grid, place.ordinal)

    def loaded(self, kinds: tuple[Any, ...], block: int, ordinal: int) -> LoadedKernel:
        """Return the kernel for arguments of these types, loaded on a GPU, the current device."""
        threads = threads_of(block)
        key = digest_of(self.function), kinds, threads, ordinal  # type: ignore[arg-type]
        found = self._loaded.get(key)
        if found is None:
            with self._loading:
                found = self._loaded.get(key)
                if found is None:
                    function: Any = self.function
                    image = image_of(function, kinds, capability_of(ordinal), threads=threads)
                    found = self._loaded[key] = LoadedKernel(image)
        return found

    def launch(self, prepared: Any, grid: int, block: int, place: Place, ended: Callable[[], None]) -> CudaLaunch:
        args, kinds, words = prepared, [], []
        body = body_of(self.function)  # type: ignore[arg-type]
        for name, arg in zip(body.signature.parameters, values_of(body, args), strict=True):
            what = f"{self.name}: argument {name}"
            _check_reachable(what, arg)
            kind, passed = kind_and_words(what, arg)
            kinds.append(kind)
            words += passed
        load = functools.partial(self._load, args, tuple(kinds), block, place.ordinal)
        types = tuple(_C_TYPES[word] for kind in kinds for word in words_of(kind))
        return CudaLaunch(self.name, load, (tuple(words), types), grid, block, place.ordinal, ended)

    def _load(self, args: Arguments, kinds: tuple[Any, ...], block: int, ordinal: int) -> LoadedKernel:
        with self.compiling(args):
            return self.loaded(kinds, block, ordinal)


def _check_reachable(what: str, arg: object) -> None:
    """Raise InvalidValueError for an array that a GPU does not reach."""
    if not isinstance(arg, np.ndarray):
        return
    rt = cuda_runtime()
    attributes = checked(rt.cudaPointerGetAttributes(int(arg.ctypes.data)), "cudaPointerGetAttributes")
    if attributes.type == rt.cudaMemoryType.cudaMemoryTypeUnregistered:
        raise InvalidValueError(
            f"{what} is an array in memory of the host, which the GPU does not reach: allocate it with gpu.alloc(), or "
            "pass an array of CuPy or PyTorch"
        )


class CudaLaunch:
    """A kernel that runs on a GPU, in its own stream. `wait(timeout)` returns whether it has ended.

    A failure is logged, and `wait` and `done` raise it.
    """

    def __init__(
        self, name: str, load: Callable[[], LoadedKernel], arguments: tuple[tuple[Any, ...], tuple[Any, ...]],
        grid: int, block: int, ordinal: int, ended: Callable[[], None],
    ):
        self._name = name
        self._label = f"kernel {self._name}[{grid}, {block}] on GPU {ordinal}"
        self._error: Exception | None = None  # of the driver
        self._raised: Exception | None = None  # by a thread
        self._ended = False
        self._given_back = threading.Lock()  # taken by the first thread that sees the end, and never released
        self._idle = _idle_streams(ordinal)
        _watcher.start()  # before the kernel, because the system may have no room for a thread
        with _current(ordinal):
            self._loaded = load()
            try:
                self._stream = self._idle.pop()
            except IndexError:
                self._stream = _Stream.make()
            self._stream.wait_for_default_stream()
            self._loaded.launch(grid, block, self._stream.handle, *arguments)
            self._stream.record(self._stream.handle)
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

        Several threads and finalizers may call this at once, so no caller waits for a lock. The first caller that sees
        the end records it before it gives the stream back. So if a query is answered for a later launch in the stream,
        the end of this one is already recorded, and the record is returned.
        """
        if self._ended:
            return True
        try:
            ended = self._stream.ended
            if ended and not self._ended:
                self._raised = self._loaded.failure(self._stream.handle)
        except DriverError as error:
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
        if (raised := self._raised) is not None:
            logger.error("kernel %s: a thread has raised %s: %s", self._name, type(raised).__name__, raised)

    @property
    def done(self) -> bool:
        """Return whether the kernel has ended. DriverError if this kernel or an earlier one has failed."""
        ended = self.ended
        if ended and self._error is not None:
            raise DriverError(self._failure()) from self._error
        if ended and self._raised is not None:
            raise self._raised
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
    """A launch on the device `ordinal`, and the function to call when it has ended."""

    launch: CudaLaunch
    ordinal: int
    ended: Callable[[], None]

    def look(self) -> bool:
        """Return whether the launch is running. If it has ended, report that."""
        cuda_runtime().cudaSetDevice(self.ordinal)  # observers that call CUDA would otherwise open the first device
        if not self.launch.ended:
            return True
        self.launch.log_failure()
        self.ended()
        return False


class Watcher:
    """The thread that notices and reports the ends of kernels. It sleeps while none runs.

    One thread serves all launches: starting a thread would take longer than the rest of a launch.
    """

    def __init__(self) -> None:
        self._new: SimpleQueue[_Watched] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Start the thread, unless it is already running."""
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
        except BaseException:  # raised by an observer: report it as an exception of a thread, and go on
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            return False


_watcher = Watcher()


def _after_fork() -> None:
    """In a forked child, forget the thread, which does not exist there, and the launches, which are the parent's."""
    global _watcher
    _watcher = Watcher()


os.register_at_fork(after_in_child=_after_fork)
