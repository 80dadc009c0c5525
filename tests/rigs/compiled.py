"""Observe the compiler: which roots it compiles, and which it finds in the cache, as in a new process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gpunetio.jit import cache, machine, roots
from gpunetio.jit.compile import DeviceFunction
from gpunetio.jit.kinds import INT
from gpunetio.jit.unit import Unit

PLAIN = """
from gpunetio.device import device_function

@device_function
def double(x):
    return x + x

@device_function
def square(x):
    return x * x
"""


@dataclass
class Done:
    """What was done in a block: the names of the functions that were compiled, and how many others were loaded."""

    compiled: list[str]
    loaded: int = 0


@contextmanager
def watched() -> Iterator[Done]:
    """Have no function in this process' memory, as in a new one, and note what is done."""
    done = Done([])
    with (
        mock.patch.dict(roots._roots, clear=True), mock.patch.dict(roots.stats, compiled=0, loaded=0),
        mock.patch.object(roots, "compiled", done.compiled),
    ):
        try:
            yield done
        finally:
            done.loaded = roots.stats["loaded"]


def warn_again() -> None:
    """Forget which warnings about the cache have been logged: each is logged once per process."""
    cache._tell.cache_clear()


def imported(file: Path) -> Any:
    """A module, as a new process has it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "dont_write_bytecode", new=True):
        spec.loader.exec_module(module)
    return module


def unit_of(function: DeviceFunction) -> Unit:
    """A function of integers for the host, with all that it calls, as the compiler hands it to LLVM."""
    unit = Unit(machine.host())
    unit.entry(function, "entry", (INT,) * len(function.signature.parameters))
    return unit


def reached(function: Any) -> list[DeviceFunction]:
    """The functions that the root of a function contains."""
    return [one for one, _ in unit_of(function)._functions]


def fresh(folder: Path, name: str = "double") -> Callable[[int], int]:
    """A function of `PLAIN`, in a module of the folder, as a new process has it."""
    file = folder / "plain.py"
    if not file.exists():
        file.write_text(PLAIN)
    return getattr(imported(file), name)


def optimized(function: DeviceFunction) -> str:
    """The body of a function's entry as LLVM leaves it."""
    text = str(machine.optimized(unit_of(function)).get_function("entry"))
    return text[text.index("{") :]
