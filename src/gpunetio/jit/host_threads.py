"""Kernels on CPU threads: a CUDA thread is an OS thread that runs compiled code without the GIL.

Each thread has a record of int64 words in pthread-specific data, which `ops.thread_idx()` and similar functions read.
Each warp and each block has a barrier.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from llvmlite import binding

from ..errors import DriverError, InvalidValueError, NoMemoryError
from ..limits import check_threads, cure
from ..service import take_no_signals
from .code import RETURNS_NOTHING, Arguments, Code, Place
from .compile import DeviceFunction
from .ops import GROUP_WORDS, THREAD_KEY_SYMBOL
from .ops.threads import GROUP_SHARED
from .roots import Root, kinds_and_words, root, values_of
from .shared import ALIGNMENT, forget
from .wild_addresses import RECORD_WORDS, STATE_WORD, survived

logger: logging.Logger = logging.getLogger("gpunetio.kernel")

MAX_WARP = 32
_LOOK = 0.05  # seconds

_libc = ctypes.CDLL(None, use_errno=True)
_key = ctypes.c_uint()
if _libc.pthread_key_create(ctypes.byref(_key), None):
    raise OSError("pthread_key_create failed: this process has used up its thread-specific keys")
binding.add_symbol(THREAD_KEY_SYMBOL, ctypes.addressof(_key))
_libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]


def _groups(count: int, size: int) -> np.ndarray:
    groups = np.zeros((count, GROUP_WORDS), np.int64)
    groups[:, 2] = size
    return groups


class HostCode(Code):
    """A kernel for host threads. `prepare` compiles it."""

    reaches_gpu_memory = False
    body: DeviceFunction

    def __init__(self, function: Callable[..., None]):
        super().__init__(function)
        self.body = DeviceFunction(function, inlined=False)  # type: ignore[arg-type]
        self.body.is_kernel = True

    def root(self, args: Arguments) -> tuple[Root, list[Any]]:
        """Return the kernel compiled for arguments of these types, and the arguments as words of C."""
        kinds, words = kinds_and_words(self.body, values_of(self.body, args))
        with self.compiling(args):
            made = root(self.body, kinds)
        if made.returns:
            raise InvalidValueError(f"{self.name} returns a value: {RETURNS_NOTHING}")
        return made, words

    def prepare(self, args: Arguments, threads: int) -> Any:
        """Compile before others wait for the kernel, and check that `threads` threads can run."""
        prepared = self.root(args)
        check_threads(threads, f"{self.name} of {threads} threads")
        return prepared

    def launch(self, prepared: Any, grid: int, block: int, place: Place, ended: Callable[[], None]) -> HostLaunch:
        made, words = prepared
        body = functools.update_wrapper(functools.partial(made.run, words), self.function)
        return HostLaunch(body, (), grid, block, place.warp, ended, made.shared_bytes)


def _place_of(body: Callable[..., object]) -> str:
    """Return where a function is defined."""
    code = getattr(body, "__wrapped__", body).__code__
    return f"{code.co_filename}, line {code.co_firstlineno}"


class HostLaunch:
    """A kernel that runs on host threads. `wait(timeout)` returns whether it has ended.

    An exception of a thread is logged, and `wait` and `done` raise it.
    """

    ended: bool

    def __init__(
        self,
        body: Callable[..., object],
        args: Arguments,
        grid: int,
        block: int,
        warp: int = 1,
        ended: Callable[[], None] = lambda: None,
        shared_bytes: int = 0,
    ):
        if grid < 1 or block < 1 or not 1 <= warp <= MAX_WARP or block % warp:
            raise InvalidValueError(
                f"cannot launch {grid} blocks of {block} threads in warps of {warp}: "
                f"counts must be positive, and a warp must have at most {MAX_WARP} lanes and divide the block"
            )
        warps = block // warp
        self._blocks, self._warps = _groups(grid, block), _groups(grid * warps, warp)
        # One cache line more, because arrays have the alignment that they have on a GPU.
        self._shared = np.zeros((grid, shared_bytes + ALIGNMENT * (shared_bytes > 0)), np.uint8)
        for b in range(grid if shared_bytes else 0):
            start = self._shared[b].ctypes.data
            self._blocks[b][GROUP_SHARED] = start + -start % ALIGNMENT
        self._records = np.zeros((grid * block, RECORD_WORDS), np.int64)
        self._body, self._name, self._size = body, getattr(body, "__name__", ""), (grid, block)
        self._error: BaseException | None = None
        self._raised_at: TracebackType | None = None
        self._ended, self._left, self._lock = ended, grid * block, threading.Lock()
        # A plain flag, not the threads' own state (service.py), and no Event: an interrupt could leave its lock held.
        self.ended = False
        self._over = threading.Lock()  # the last thread releases it
        self._over.acquire()
        threads = []
        for b in range(grid):
            for t in range(block):
                record = self._records[b * block + t]
                warp_group = self._warps[b * warps + t // warp]
                groups = warp_group.ctypes.data, self._blocks[b].ctypes.data
                record[:STATE_WORD] = t, b, block, grid, t % warp, warp, *groups
                threads.append(
                    threading.Thread(target=self._run, args=(body, args, int(record.ctypes.data)), daemon=True)
                )
        self._start(threads)

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        """Start the threads. If the system has no room for all, the launch fails when the started ones have ended."""
        for started, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:
                self._fail(NoMemoryError(f"thread {started} of {len(threads)} did not start: {cure(error)}"))
                self._end(len(threads) - started)
                return

    def _run(self, body: Callable[..., object], args: Arguments, record: int) -> None:
        take_no_signals()
        _libc.pthread_setspecific(_key.value, record)
        try:
            with survived(record, functools.partial(self._faulted, record)):
                body(*args)
        except BaseException as error:
            self._fail(error)
        finally:
            self._end(1)

    def _end(self, count: int) -> None:
        """Note that `count` threads have ended. With the last one, the launch has ended."""
        with self._lock:
            self._left -= count
            last = self._left == 0
        if last:
            for group in self._blocks:  # if the kernel was interpreted
                forget(int(group.ctypes.data))
            try:
                self._ended()
            finally:
                self.ended = True
                self._over.release()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first = self._error is None
            if first:
                self._error, self._raised_at = error, error.__traceback__
        if first:  # the others will report the same
            logger.error("kernel %s: a thread has raised %s: %s", self._name, type(error).__name__, error)

    def _faulted(self, record: int, address: int | None) -> None:
        thread, block = ctypes.cast(record, ctypes.POINTER(ctypes.c_int64))[:2]
        where = "an address that no memory can have"
        if address is not None:
            where = f"{address:#x}, where it has no memory, or no right to it"
        self._fail(DriverError(
            f"{self}: thread {thread} of block {block} accessed {where}. Check the addresses that {self._name} "
            f"({_place_of(self._body)}) gets and computes, and close the queues that it has used"
        ))
        self._end(1)

    def __str__(self) -> str:
        return f"kernel {self._name}[{', '.join(map(str, self._size))}] on the host"

    def __repr__(self) -> str:
        return f"<launch of {self._name} on {len(self._records)} host threads, {'ended' if self.ended else 'running'}>"

    @property
    def done(self) -> bool:
        """Return whether every thread has ended. Raise the first exception of a thread."""
        if self.ended and self._error is not None:
            raise self._error.with_traceback(self._raised_at)  # otherwise each raise would add frames to the last one's
        return self.ended

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for every thread to end, and return whether they have.

        Raise like `done`; after `timeout` seconds, also if a thread has raised and others have not ended.
        """
        end = time.monotonic() + timeout
        while not self.ended and (left := end - time.monotonic()) > 0:
            self._over.acquire(timeout=min(left, _LOOK))  # one waiter gets the lock; others poll `ended`
        if not self.ended and self._error is not None:  # the other threads may wait for the one that has failed
            raise self._error.with_traceback(self._raised_at)
        return self.done
