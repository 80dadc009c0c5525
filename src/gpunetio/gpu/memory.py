"""Memory of a GPU handle: the three types of `doca_gpu_mem_alloc`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arguments import whole
from ..closing import Closing
from ..dropped import Closable, Droppable, Dropped
from ..enums import MemType
from ..errors import BadStateError, InvalidValueError, TimedOutError
from ..interrupts import deferred
from ..jit.code import Launch
from ..jit.launch import CODE
from ..memory import BytesLike
from .backend import Backend

logger: logging.Logger = logging.getLogger("gpunetio.kernel")

LAUNCH_TIMEOUT = 60.0  # seconds: the longest that closing waits for kernels
PATIENCE = 1.0  # seconds of waiting after which the log says for which kernel

# Launches that the log has named, and launches for which a wait has failed: nothing waits for the latter again.
_named: WeakSet[Launch] = WeakSet()
_given_up: WeakSet[Launch] = WeakSet()


class RunningLaunches:
    """Kernels that were given an object. The object must not be closed while they run."""

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self._lock = threading.Lock()

    def add(self, launch: Launch) -> None:
        """Record a kernel launch of any thread, and forget launches that have ended."""
        with self._lock:
            self._launches = [other for other in self._launches if not other.ended] + [launch]

    @property
    def running(self) -> bool:
        """Return whether any of these kernels still runs."""
        return any(not launch.ended for launch in self._launches)

    def check_none(self, what: str) -> None:
        """Raise BadStateError if any of these kernels still runs."""
        if self.running:
            raise BadStateError(f"{what} while a kernel uses it: let the kernel end first")

    def wait(self, timeout: float, what: str) -> None:
        """Wait until all kernels have ended. TimedOutError after `timeout` seconds.

        Each launch is waited for only once. If that wait fails or is interrupted, the wait for the next object that the
        launch uses fails immediately. A `with` statement over several objects would otherwise wait for each of them.
        """
        begin, running = time.monotonic(), []
        try:
            while running := [launch for launch in self._launches if not launch.ended]:
                waited = time.monotonic() - begin
                _check_patience(running, waited, timeout, what)
                time.sleep(100e-6)
        except BaseException:
            _given_up.update(running)
            raise


def _check_patience(running: list[Launch], waited: float, timeout: float, what: str) -> None:
    for launch in running:
        if waited > PATIENCE and launch not in _named:
            _named.add(launch)
            logger.warning("%s is being closed, and waits for %s; Ctrl+C ends the wait", what, launch)
        if waited > timeout or launch in _given_up:
            after = f" after {timeout:g} s" if waited > timeout else ", and an earlier wait for it has failed"
            raise TimedOutError(
                f"{what} cannot be closed: {launch} still uses it{after}; let the kernel end, for example by a word "
                "that it polls, and close again"
            )


class Part(Closable, Protocol):
    """An object that was made from a `Gpu`."""

    def wait_idle(self) -> None:
        """Wait until no kernel uses the object. TimedOutError if a kernel does not end."""
        ...


class Allocator(Protocol):
    """The GPU handle that memory belongs to."""

    backend: Backend
    dropped: Dropped[Part]

    @property
    def opened_here(self) -> bool:
        """Return whether this process has opened the GPU."""
        ...

    def forget_memory(self, memory: GpuMemory) -> None:
        """Forget memory that has closed."""
        ...


class GpuMemory(Closing, Droppable):
    """`nbytes` bytes of zeroed memory at `device_address`.

    CPU_GPU memory is pinned host memory that the GPU also reaches, and `array` is its NumPy view. GPU memory has no CPU
    mapping: `read` and `write` copy. On the host target, all types are host memory.
    """

    device_address: int
    nbytes: int
    kind: MemType
    _open = False

    def __init__(
        self, gpu: Allocator, device_address: int, nbytes: int, kind: MemType, array: np.ndarray | None,
        owner: object,
    ):
        self._gpu, self._backend = gpu, gpu.backend
        self.device_address, self.nbytes, self.kind = device_address, nbytes, kind
        self._array, self._owner = array, owner
        self._launches = RunningLaunches()
        self._open = True

    @property
    def open_here(self) -> bool:
        """Return whether the memory is open, and was allocated by this process."""
        return self._open and self._gpu.opened_here

    def when_dropped(self) -> None:
        self._gpu.dropped.note(self)

    @property
    def address(self) -> int:
        """Return the address for a NIC."""
        return self.device_address

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called."""
        return not self._open

    @property
    def allocation(self) -> object:
        """Return what keeps the memory allocated. A region holds it as well: a NIC never writes to freed memory."""
        return self._owner

    @property
    def is_cuda(self) -> bool:
        """Return whether CUDA allocated the memory."""
        return self._backend.has_memory

    @property
    def array(self) -> NDArray[np.uint8]:
        """Return a NumPy byte view. BadStateError for memory without a CPU mapping."""
        self._check()
        if self._array is None:
            raise BadStateError(f"{self.kind.name} memory has no CPU mapping: use read(), write(), or MemType.CPU_GPU")
        return self._array

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if not self.is_cuda:
            raise AttributeError("this memory is host memory: use .array")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.device_address, False), "version": 3}

    def as_array(self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> Any:
        """Return the memory from its first byte on as an array for kernels, without a copy.

        On the host target, this is a NumPy array. On a GPU, it is an object with `__cuda_array_interface__`, which CuPy
        and PyTorch also take.
        """
        kind = np.dtype(dtype)
        lengths = tuple(whole("shape", length) for length in ((shape,) if isinstance(shape, int) else shape))
        if kind.hasobject or any(length < 0 for length in lengths):
            raise InvalidValueError(f"memory is no array of shape {lengths} of {kind}")
        self._check(0, math.prod(lengths) * kind.itemsize)
        found = _Array(self, lengths, kind)
        return found if CODE[self._backend.target].reaches_gpu_memory else np.asarray(_HostArray(found))

    def write(self, data: BytesLike, offset: int = 0) -> None:
        """Copy `data` (buffer protocol) to byte offset `offset`."""
        try:
            source = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError):
            raise InvalidValueError(f"data is of type {type(data).__name__}: it must be contiguous bytes") from None
        self._check(offset, source.nbytes)
        if self._array is not None:
            self._array[offset : offset + source.nbytes] = source
        else:
            self._backend.copy(self.device_address + offset, int(source.ctypes.data), source.nbytes)

    def read(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Return a copy of `nbytes` from byte offset `offset`, or of all bytes from there."""
        count = self.nbytes - whole("offset", offset) if nbytes is None else whole("nbytes", nbytes)
        self._check(offset, count)
        if self._array is not None:
            return self._array[offset : offset + count].copy()
        target = np.empty(count, np.uint8)
        self._backend.copy(int(target.ctypes.data), self.device_address + offset, count)
        return target

    def close(self) -> None:
        """Free the memory (`doca_gpu_mem_free`) now or when the last memory region over it is closed. Idempotent.

        Wait for kernels that were given the memory. TimedOutError if a kernel does not end. CUDA memory is freed only
        when no kernel runs: until then it stays allocated and serves the next request of the same size.
        """
        if self._open:
            self.wait_idle()
            with deferred():
                self._open = False
                self._array = self._owner = None
                self._gpu.forget_memory(self)

    def wait_idle(self) -> None:
        """Wait until no kernel that was given the memory runs. TimedOutError if a kernel does not end."""
        self._launches.wait(LAUNCH_TIMEOUT, "this GPU memory")

    def used_by(self, launch: Launch) -> None:
        """Keep the memory open while `launch`, which has it as an argument, runs."""
        self._launches.add(launch)

    def _check(self, offset: int = 0, nbytes: int = 0) -> None:
        if not self._open:
            raise BadStateError("this GPU memory is closed")
        if whole("offset", offset) < 0 or whole("nbytes", nbytes) < 0 or offset + nbytes > self.nbytes:
            raise InvalidValueError(f"[{offset}, +{nbytes}) is outside the memory's {self.nbytes} bytes")

    def __repr__(self) -> str:
        state = f"at {self.device_address:#x}" if self._open else "closed"
        return f"<{self.nbytes} bytes of {self.kind.name} memory of GPU {self._backend.name}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise BadStateError("GPU memory cannot be pickled: its address means nothing in another process")


class _Array:
    """Memory of a GPU as an array. The memory stays open while a kernel that was given the array runs."""

    def __init__(self, memory: GpuMemory, shape: tuple[int, ...], dtype: np.dtype):
        self._memory, self._shape, self._dtype = memory, shape, dtype
        self.allocation = memory.allocation

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if self._memory.closed:
            raise BadStateError("the GPU memory of this array is closed")
        return self.described()

    def described(self) -> dict[str, object]:
        """Return the array's description for NumPy's and CUDA's array interfaces."""
        place = (self._memory.device_address, False)
        return {"shape": self._shape, "typestr": self._dtype.str, "data": place, "version": 3}

    def used_by(self, launch: Launch) -> None:
        """Keep the memory open while `launch` runs."""
        self._memory.used_by(launch)

    def __repr__(self) -> str:
        return f"<array of shape {self._shape} of {self._dtype} in {self._memory!r}>"


class _HostArray:
    """An object that NumPy makes an array of. It keeps the memory allocated."""

    def __init__(self, array: _Array):
        self._array = array
        self.__array_interface__ = array.described()
