"""`@kernel`: one launch syntax for CUDA and for CPU threads.

    @kernel
    def work(qp, n): ...

    work[grid, block](qp, n).wait(timeout=10)        # on the first GPU, or on host threads if there is none
    work[grid, block, gpu](qp, n).wait(timeout=10)   # on `gpu`

Launched kernels run concurrently, also on a GPU: one may send what another receives. A kernel returns nothing.
Arguments are 64-bit integers, and other types that Numba takes: floats, NumPy arrays and tuples. An object with
`device_address` (an exported queue, memory of a `Gpu`) is passed as that address. The launch refuses other objects.
It also compiles the kernel. Device functions take integers only, so an array in place of an address is refused, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

from ..errors import InvalidValueError
from ..interrupts import deferred
from ..limits import check_threads
from .arguments import checked
from .compile import engine_function
from .cuda_launch import CudaLaunch, cuda_available
from .host_threads import HostLaunch

logger = logging.getLogger("gpunetio.launch")

# Called with +1 when a kernel is launched and with -1 when it has ended. While kernels run, a software NIC spins and
# does not sleep.
observers: list[Callable[[int], None]] = []
_running = 0
_counting = threading.Lock()


def _after_fork() -> None:
    """Forget the kernels and observers in a forked child: kernels and the threads of observers stay in the parent."""
    global _running, _counting
    _running, _counting = 0, threading.Lock()
    observers.clear()


os.register_at_fork(after_in_child=_after_fork)


class Place(Protocol):
    """Where a kernel runs: a `Gpu`, or any object with these attributes."""

    target: str  # "cuda" or "cpu"
    warp: int  # lanes of a host warp
    ordinal: int  # number of the CUDA device; read only for "cuda"


def running() -> int:
    """Return the number of kernels of this process that have not ended."""
    return _running


def tell_observers(change: int) -> None:
    """Tell the observers that a kernel was launched (+1) or has ended (-1)."""
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
    """A function that `@kernel` has made launchable, as `kernel[grid, block, place](…)`."""

    py_func: Callable[..., None]
    name: str
    body: Any

    def __init__(self, fn: Callable[..., None]):
        functools.update_wrapper(self, fn)
        self.py_func, self.name = fn, fn.__name__
        code = fn.__code__
        self._names = code.co_varnames[: code.co_argcount]
        self._takes_any = bool(code.co_flags & inspect.CO_VARARGS)
        self._compiled: set[tuple[Any, ...]] = set()
        self.body = engine_function(fn)

    def __repr__(self) -> str:
        return f"<kernel {self.name}{inspect.signature(self.py_func)}>"

    @functools.cached_property
    def cuda(self) -> Any:
        """Return the kernel for CUDA. Numba compiles the device functions that it calls again."""
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

    def _check_count(self, given: int) -> None:
        most, least = len(self._names), len(self._names) - len(self.py_func.__defaults__ or ())
        if not least <= given <= most and not self._takes_any:
            takes = f"{most}" if least == most else f"{least} to {most}"
            raise InvalidValueError(f"{self.name} takes {takes} arguments ({', '.join(self._names)}), not {given}")

    def _compile(self, args: tuple[Any, ...]) -> None:
        """Compile for the host, unless that is done, so that the launch itself reports wrong arguments."""
        kinds = tuple(self.body.typeof_pyval(arg) for arg in args)
        if kinds not in self._compiled:
            with self._in_words(args):
                self.body.compile(tuple(self.body.units.fold_argument_types(kinds, {})[1]))
            self._compiled.add(kinds)

    def compile_for_the_host(self) -> None:
        """Compile for host threads, with an integer for each argument, so that no launch has to."""
        self._compile((0,) * len(self._names))

    @contextlib.contextmanager
    def _in_words(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Turn a compiler error into InvalidValueError if arguments that are not integers may have caused it."""
        try:
            yield
        except Exception as error:
            others = [
                f"{name} of type {type(arg).__name__}"
                for name, arg in zip(self._names, args, strict=False)
                if not isinstance(arg, int)
            ]
            if isinstance(error, InvalidValueError):  # from `need_integers`; Numba prepends its own text
                given = f" with {', '.join(others)}" if others else ""
                raise InvalidValueError(f"{self.name}{given}: {str(error).splitlines()[-1]}") from None
            if type(error).__name__ != "TypingError" or not others:  # Numba has another such class for CUDA
                raise
            logger.debug("%s: %s", self.name, error)
            raise InvalidValueError(
                f"{self.name} cannot be compiled with {', '.join(others)}: Numba does not support what the kernel does "
                "with it; pass an integer, as addresses, keys and counts are (see Numba's message with "
                "DOCA_GPUNETIO_LOG=7)"
            ) from None

    def _launch(self, grid: int, block: int, place: Place, *args: Any) -> HostLaunch | CudaLaunch:
        self._check_count(len(args))
        plain = checked(self.name, self._names, args, place.target)
        for used in args:
            if hasattr(used, "check_launch"):
                used.check_launch()
        if place.target != "cuda":
            self._compile(plain)  # now, not while somebody waits for the kernel
            check_threads(grid * block, f"{self.name} of {grid} x {block} threads")
        with deferred():
            tell_observers(+1)
            try:
                if place.target == "cuda":
                    with self._in_words(plain):
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
    """Compile for an absent GPU: Numba asks the current device when one device function calls another."""
    from numba.cuda import compiler, dispatcher  # both import the function by its name

    device = SimpleNamespace(compute_capability=compute_capability)
    modules: tuple[Any, ...] = compiler, dispatcher
    replaced = [(module, module.get_current_device) for module in modules]
    for module, _ in replaced:
        module.get_current_device = lambda: device
    try:
        yield
    finally:
        for module, original in replaced:
            module.get_current_device = original
