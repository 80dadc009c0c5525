"""`@kernel`: one launch syntax for CUDA and for CPU threads.

    @kernel
    def work(qp, n): ...

    work[grid, block](qp, n).wait(timeout=10)        # on the first GPU, or on host threads if there is none
    work[grid, block, gpu](qp, n).wait(timeout=10)   # on `gpu`

Launched kernels run concurrently, also on a GPU: one may send what another receives. A kernel returns nothing.
Arguments are 64-bit integers, floats, arrays of NumPy and of GPUs, and tuples of them. An object with a
`device_address` (an exported queue, memory of a `Gpu`) is passed as that address. The launch refuses other objects.
It also compiles the kernel. Device functions take integers only, so the compiler refuses an array as an address.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import threading
from collections.abc import Callable
from typing import Any

from ..errors import InvalidValueError
from ..interrupts import deferred
from ..limits import check_threads
from .arguments import checked
from .code import Arguments, Code, Launch, Place
from .cuda_launch import CudaCode, cuda_available
from .host_threads import HostCode, HostLaunch
from .interpret import interpreted, wanted
from .signatures import signature_of

Count = int | tuple[int, ...]

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the same for host threads.
MAX_GRID = (1 << 31) - 1  # blocks
MAX_BLOCK = 1024  # threads

# Called with +1 when a kernel is launched and with -1 when it has ended. While kernels run, a software NIC spins
# instead of sleeping.
observers: list[Callable[[int], None]] = []
_running = 0
_counting = threading.Lock()


def _after_fork() -> None:
    """Forget the kernels and observers in a forked child: kernels and the threads of observers stay in the parent."""
    global _running, _counting
    _running, _counting = 0, threading.Lock()
    observers.clear()


os.register_at_fork(after_in_child=_after_fork)


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


class _DefaultPlace:
    """The first GPU, or host threads with one-lane warps."""

    def __init__(self) -> None:
        self.target = "cuda" if cuda_available() else "cpu"
        self.warp, self.ordinal = 1, 0


class _Host:
    """Host threads with one-lane warps."""

    target, warp, ordinal = "cpu", 1, 0


_HOST: Any = _Host()
CODE: dict[str, type[Code]] = {"cpu": HostCode, "cuda": CudaCode}  # by target


class InterpretedCode(HostCode):
    """A kernel as plain Python, on host threads: `pdb`, `print` and coverage work in it (interpret.py)."""

    def prepare(self, args: Arguments, threads: int) -> Any:
        check_threads(threads, f"{self.name} of {threads} threads")
        return args

    def launch(self, prepared: Any, grid: int, block: int, place: Place, ended: Callable[[], None]) -> HostLaunch:
        body = functools.partial(interpreted(self.body.py_func), *prepared)
        return HostLaunch(functools.update_wrapper(body, self.function), (), grid, block, place.warp, ended)


class Interpreted:
    """A kernel that is launched as plain Python on the host: `kernel.interpret[grid, block, place](…)`."""

    def __init__(self, kernel: Kernel):
        self._kernel = Kernel(kernel.py_func)
        self._kernel.code = {"cpu": InterpretedCode(kernel.py_func)}

    def __getitem__(self, config: Any) -> Callable[..., Launch]:
        """Return a function that launches the kernel, as `Kernel.__getitem__` does. The default place is the host."""
        if isinstance(config, tuple) and len(config) == 2:
            config = (*config, _HOST)
        return self._kernel[config]


class Kernel:
    """A function that `@kernel` has made launchable, as `kernel[grid, block, place](…)`."""

    py_func: Any  # a function, which pyright would take for a method
    name: str
    code: dict[str, Code]

    def __init__(self, fn: Callable[..., None]):
        functools.update_wrapper(self, fn)
        self.py_func, self.name = fn, fn.__name__
        self._names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        self._takes_any = bool(fn.__code__.co_flags & inspect.CO_VARARGS)
        self.code = {target: code(fn) for target, code in CODE.items()}

    @property
    def interpret(self) -> Interpreted:
        """Return the kernel as plain Python, for the host."""
        return Interpreted(self)

    def __repr__(self) -> str:
        return f"<kernel {self.name}{signature_of(self.py_func)}>"

    def __getitem__(self, config: tuple[Count, Count] | tuple[Count, Count, Place]) -> Callable[..., Launch]:
        if not isinstance(config, tuple) or len(config) not in (2, 3):
            raise self._wrong(f"not [{config!r}]")
        grid = self._count("grid", config[0], MAX_GRID)
        block = self._count("block", config[1], MAX_BLOCK)
        place: Place = config[2] if len(config) == 3 else _DefaultPlace()
        if not isinstance(getattr(place, "target", None), str):
            raise self._wrong(f"and a {type(place).__name__} is no place where kernels run: pass a Gpu or a Dpa")
        return functools.partial(self._launch, grid, block, place)

    def _wrong(self, why: str) -> InvalidValueError:
        return InvalidValueError(f"launch as {self.name}[grid, block](…) or [grid, block, gpu](…), {why}")

    def _count(self, what: str, given: Any, most: int) -> int:
        """Return the blocks of a grid or the threads of a block: an integer, or a tuple as in CUDA."""
        try:
            count, *others = map(operator.index, given if isinstance(given, tuple) else (given,))
        except (TypeError, ValueError):
            raise self._wrong(f"where {what} is a whole number, not {given!r}") from None
        if any(other != 1 for other in others):
            raise InvalidValueError(
                f"cannot launch {self.name} with {what} {given}: it has one dimension; give the total number"
            )
        if not 1 <= count <= most:
            raise InvalidValueError(f"cannot launch {self.name} with {what} {count}: it is 1 to {most}")
        return count

    def __call__(self, *args: object) -> None:
        raise InvalidValueError(f"{self.name} is a kernel: launch it as {self.name}[grid, block](…)")

    def _check_count(self, given: int) -> None:
        most, least = len(self._names), len(self._names) - len(self.py_func.__defaults__ or ())
        if not least <= given <= most and not self._takes_any:
            takes = f"{most}" if least == most else f"{least} to {most}"
            raise InvalidValueError(f"{self.name} takes {takes} arguments ({', '.join(self._names)}), not {given}")

    def compile_for_the_host(self) -> None:
        """Compile for host threads, with an integer for each argument, so that no launch needs to."""
        self.code["cpu"].prepare((0,) * len(self._names), threads=1)

    def _launch(self, grid: int, block: int, place: Place, *args: object) -> Launch:
        self._check_count(len(args))
        if wanted() and type(self.code.get(place.target)) is HostCode:
            return self.interpret[grid, block, place](*args)
        if (code := self.code.get(place.target)) is None:
            raise InvalidValueError(f"{self.name} cannot run on target {place.target!r}: use {' or '.join(self.code)}")
        plain = checked(self.name, self._names, args, code.reaches_gpu_memory)
        checks = [check for used in args if (check := getattr(used, "check_launch", None))]
        for check in checks:
            check()
        if checks:  # checks of queues
            code.check_room(grid, place)
        prepared = code.prepare(plain, grid * block)
        count_there = getattr(place, "count_kernel", None)

        held = [place, *args, plain]  # kept until the kernel has ended, even if the caller drops them

        def count(change: int) -> None:
            if change < 0:
                held.clear()
            if count_there:
                count_there(change)
            tell_observers(change)

        with deferred():
            count(+1)
            try:
                launch = code.launch(prepared, grid, block, place, functools.partial(count, -1))
            except BaseException:
                count(-1)
                raise
            for used in (place, *args):
                if used_by := getattr(used, "used_by", None):
                    used_by(launch)  # closing it waits for the kernel
        return launch


def kernel(fn: Callable[..., None]) -> Kernel:
    """Make `fn` launchable (`__global__`).

    `fn[grid, block, gpu](…)` returns a launch immediately. On a GPU, the kernel starts after the work that is in CUDA's
    default stream at that time. Nothing in that stream waits for the kernel; call `wait` of the launch for that.
    """
    return Kernel(fn)
