"""Compiled functions with C's calling convention, which native code can call."""

from __future__ import annotations

from .compile import DeviceFunction
from .kinds import INT
from .roots import Root, root


def c_function(function: DeviceFunction, *widths: int) -> int:
    """Return the address of a function for C, which is valid as long as the process lives.

    `widths`: the sizes of its integer parameters in bits.
    """
    return root_of(function, *widths).address


def root_of(function: DeviceFunction, *widths: int) -> Root:
    """Return the compiled function."""
    return root(function, (INT,) * len(widths), widths)
