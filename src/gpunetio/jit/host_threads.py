"""Kernels on CPU threads: a CUDA thread is an OS thread that runs compiled code without the GIL.

Each thread has a record of int64 words in pthread-specific data, which `ops.thread_idx()` and its relatives read. Each
warp and each block has a barrier.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding
from numba import types
from numba.core.compiler_lock import global_compiler_lock

from ..errors import DriverError, InvalidValueError, NoMemoryError
from ..limits import check_threads, cure
from ..service import take_no_signals
from .code import RETURNS_NOTHING, Arguments, Code, Place
from .compile import engine_function
from .frozen import Watch
from .ops import GROUP_WORDS, THREAD_KEY_SYMBOL
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


class _Made(NamedTuple):
    """A kernel's dispatcher of Numba, the digest of what it has frozen, and the types that it is compiled for."""

    digest: str
    body: Any
    compiled: set[Arguments]


class HostCode(Code):
    """A kernel for host threads. `prepare` compiles it."""

    reaches_gpu_memory = False
    def __init__(self, function: Callable[..., None]):
        super().__init__(function)
        self._watch = Watch(function)
        self._made = _Made("", None, set())  # nothing yet

    @property
    def body(self) -> Any:
        """Return Numba's dispatcher, or None before the first launch."""
        return self._made.body

    def prepare(self, args: Arguments, threads: int) -> None:
        """Compile now, not while somebody waits for the kernel, and check that so many threads can run."""
        made = self._made_for(self._watch.now().digest)
        kinds = tuple(made.body.typeof_pyval(arg) for arg in args)
        if kinds not in made.compiled:
            with self.compiling(args):
                signature = tuple(made.body.units.fold_argument_types(kinds, {})[1])
                made.body.compile(signature)
            if (returned := made.body.overloads[signature].signature.return_type) != types.none:
                raise InvalidValueError(f"{self.name} returns a value ({returned}): {RETURNS_NOTHING}")
            made.compiled.add(kinds)
        check_threads(threads, f"{self.name} of {threads} threads")

    def _made_for(self, digest: str) -> _Made:
        if self._made.digest != digest:
            with global_compiler_lock:  # of several threads that launch it first, one makes it
                if self._made.digest != digest:
                    self._made = _Made(digest, engine_function(self.function), set())
        return self._made

    def launch(self, args: Arguments, grid: int, block: int, place: Place, ended: Callable[[], None]) -> HostLaunch:
        return HostLaunch(self.body, args, grid, block, place.warp, ended)


def _place_of(body: Callable[..., object]) -> str:
    """Return where a function is defined."""
    code = getattr(body, "py_func", body).__code__
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
    ):
        if grid < 1 or block < 1 or not 1 <= warp <= MAX_WARP or block % warp:
            raise InvalidValueError(
                f"cannot launch {grid} blocks of {block} threads in warps of {warp}: "
                f"counts must be positive, and a warp must have at most {MAX_WARP} lanes and divide the block"
            )
        warps = block // warp
        self._blocks, self._warps = _groups(grid, block), _groups(grid * warps, warp)
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
        """Start the threads. If the system has no room for all of them, the launch fails when the others have ended."""
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
        """Note that so many threads have ended. With the last one, the launch has."""
        with self._lock:
            self._left -= count
            last = self._left == 0
        if last:
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
        ))  # fmt: skip
        self._end(1)

    def __str__(self) -> str:
        return f"kernel {self._name}[{', '.join(map(str, self._size))}] on the host"

    def __repr__(self) -> str:
        return f"<launch of {self._name} on {len(self._records)} host threads, {'ended' if self.ended else 'running'}>"

    @property
    def done(self) -> bool:
        """Return whether every thread has ended. Raises the first exception of a thread."""
        if self.ended and self._error is not None:
            raise self._error.with_traceback(self._raised_at)  # or each raise would add its frames to the last one's
        return self.ended

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for every thread to end, and return whether they have. Raises like
        `done`, and after `timeout` seconds also if a thread has raised and others have not ended."""
        end = time.monotonic() + timeout
        while not self.ended and (left := end - time.monotonic()) > 0:
            self._over.acquire(timeout=min(left, _LOOK))  # one waiter gets the lock; others poll `ended`
        if not self.ended and self._error is not None:  # the other threads may wait for the one that has failed
            raise self._error.with_traceback(self._raised_at)
        return self.done
