"""The interface of a target to a kernel: how the kernel is compiled there, and how its threads are started.

Targets are host threads (host_threads.py) and CUDA (cuda_launch.py). The table of them is `CODE` in launch.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .values import CompileError

RETURNS_NOTHING = "a kernel returns nothing; store the result in memory whose address is an argument"

Arguments = tuple[object, ...]


class Place(Protocol):
    """Where a kernel runs: a `Gpu`, or any object with these attributes."""

    @property
    def target(self) -> str:
        """Return "cuda" or "cpu"."""
        ...

    @property
    def warp(self) -> int:
        """Return the lanes of a host warp."""
        ...

    @property
    def ordinal(self) -> int:
        """Return the number of the CUDA device. Nothing reads it for "cpu"."""
        ...


class Launch(Protocol):
    """A kernel that was launched. `str()` names the kernel, its grid and block, and where it runs."""

    @property
    def ended(self) -> bool:
        """Return whether the kernel has ended, successfully or not."""
        ...

    @property
    def done(self) -> bool:
        """Return whether the kernel has ended. Raise the error if it has failed."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the kernel to end. Return whether it has. Raise the error if it failed."""
        ...


class Code(ABC):
    """A kernel as one target runs it."""

    function: Callable[..., None]
    name: str
    names: tuple[str, ...]  # of its arguments
    reaches_gpu_memory: bool  # whether CUDA arrays can be arguments

    def __init__(self, function: Callable[..., None]):
        self.function, self.name = function, function.__name__
        self.names = function.__code__.co_varnames[: function.__code__.co_argcount]

    @abstractmethod
    def prepare(self, args: Arguments, threads: int) -> Any:
        """Do the work that must not delay a launch that others wait for. Return what `launch` needs of the arguments.

        Raise the error that makes the launch impossible, if there is one.
        """

    def check_room(self, grid: int, place: Place) -> None:
        """Raise InvalidValueError if `grid` blocks may leave no room for a NIC that the kernel waits for."""
        return

    @abstractmethod
    def launch(self, prepared: Any, grid: int, block: int, place: Place, ended: Callable[[], None]) -> Launch:
        """Start the threads. The last thread to end calls `ended`. Until then, the caller keeps the arguments alive."""

    @contextlib.contextmanager
    def compiling(self, args: Arguments) -> Iterator[None]:
        """Make errors of the compiler name the kernel, and those of its arguments that are not integers."""
        try:
            yield
        except CompileError as error:
            others = [
                f"{name} of type {type(arg).__name__}"
                for name, arg in zip(self.names, args, strict=False)
                if not isinstance(arg, int)
            ]
            given = f" with {', '.join(others)}" if others else ""
            raise CompileError(f"{self.name}{given} does not compile:\n{error}") from None
