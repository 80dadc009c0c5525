"""`@kernel`: one launch syntax for CUDA and for CPU threads.

    @kernel
    def work(qp, n): ...

    work[grid, block](qp, n).wait(timeout=10)        # on the first GPU, or on host threads when there is none
    work[grid, block, gpu](qp, n).wait(timeout=10)   # where `gpu` says

Kernels that have been launched run beside each other, on a GPU too: one may send what another receives.
A kernel returns nothing. Arguments are ints and arrays; an object with `device_address` (an exported queue, memory of a
`Gpu`) is passed as that address.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

from ..errors import InvalidValueError
from ..interrupts import deferred
from .compile import engine_function
from .cuda_launch import CudaLaunch, cuda_available
from .host_threads import HostLaunch

# Called with +1 when a kernel is launched and with -1 when it has ended: a software NIC then spins instead of sleeping.
observers: list[Callable[[int], None]] = []
_running = 0
_counting = threading.Lock()


def _after_fork() -> None:
    """In a forked child: kernels, and the threads behind observers, are its parent's."""
    global _running, _counting
    _running, _counting = 0, threading.Lock()
    observers.clear()


os.register_at_fork(after_in_child=_after_fork)


class Place(Protocol):
    """Where a kernel runs: a `Gpu`, or anything with these."""

    target: str  # "cuda" or "cpu"
    warp: int  # lanes of a host warp
    ordinal: int  # which CUDA device; asked only of one


def running() -> int:
    """Kernels of this process that have not ended."""
    return _running


def tell_observers(change: int) -> None:
    """A kernel has been launched (+1) or has ended (-1)."""
    global _running
    with _counting:
        _running += change
    for observer in list(observers):
        observer(change)


def _ended() -> None:
    tell_observers(-1)


class _DefaultPlace:
    """The first GPU, or host threads with one-lane warps."""

    def __init__(self) -> None:
        self.target = "cuda" if cuda_available() else "cpu"
        self.warp, self.ordinal = 1, 0


class Kernel:
    """What `@kernel` makes of a function."""

    py_func: Callable[..., None]
    name: str
    body: Any

    def __init__(self, fn: Callable[..., None]):
        functools.update_wrapper(self, fn)
        self.py_func, self.name = fn, fn.__name__
        self.body = engine_function(fn)

    def __repr__(self) -> str:
        return f"<kernel {self.name}{inspect.signature(self.py_func)}>"

    @functools.cached_property
    def cuda(self) -> Any:
        """The kernel as Numba compiles it for CUDA; device functions that it calls are compiled again."""
        from numba import cuda

        return cuda.jit(self.py_func)

    def __getitem__(self, config: tuple[Any, ...]) -> Callable[..., HostLaunch | CudaLaunch]:
        if not isinstance(config, tuple) or len(config) not in (2, 3):
            raise InvalidValueError(f"launch as {self.name}[grid, block](…) or [grid, block, gpu](…), not [{config!r}]")
        grid, block, *places = config
        place: Place = places[0] if places else _DefaultPlace()
        return functools.partial(self._launch, int(grid), int(block), place)

    def __call__(self, *args: Any) -> None:
        raise InvalidValueError(f"{self.name} is a kernel: launch it as {self.name}[grid, block](…)")

    def _launch(self, grid: int, block: int, place: Place, *args: Any) -> HostLaunch | CudaLaunch:
        plain = tuple(int(a.device_address) if hasattr(a, "device_address") else a for a in args)
        if place.target != "cuda":
            self.body.compile(tuple(self.body.typeof_pyval(a) for a in plain))  # here, and not while somebody waits
        with deferred():
            tell_observers(+1)
            try:
                if place.target == "cuda":
                    launch = CudaLaunch(self.cuda, plain, grid, block, place.ordinal, _ended)
                else:
                    launch = HostLaunch(self.body, plain, grid, block, place.warp, _ended)
            except BaseException:
                _ended()
                raise
            parts: tuple[Any, ...] = (place, *args)
            for used in parts:
                if hasattr(used, "used_by"):
                    used.used_by(launch)  # closing it waits for the kernel
        return launch


def kernel(fn: Callable[..., None]) -> Kernel:
    """Make `fn` launchable (`__global__`)."""
    return Kernel(fn)


@contextlib.contextmanager
def offline(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Compile for a GPU that is not there: Numba asks the current device when one device function calls another."""
    import numba.cuda.compiler
    import numba.cuda.dispatcher

    device = SimpleNamespace(compute_capability=compute_capability)
    with (
        mock.patch.object(numba.cuda.dispatcher, "get_current_device", return_value=device),
        mock.patch.object(numba.cuda.compiler, "get_current_device", return_value=device),
    ):
        yield
