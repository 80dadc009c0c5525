"""Compiled functions with C's calling convention, for code that is not Python's to call."""

from __future__ import annotations

from .compile import DeviceFunction
from .kinds import INT
from .roots import Root, root


def c_function(function: DeviceFunction, *widths: int) -> int:
    """Return the address of a function for C. It is there as long as the process.

    `widths`: of its parameters, which are integers, in bits.
    """
    return root_of(function, *widths).address


def root_of(function: DeviceFunction, *widths: int) -> Root:
    """Return the compiled function."""
    return root(function, (INT,) * len(widths), widths)
