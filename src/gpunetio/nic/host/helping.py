"""The C function with which an application thread makes turns in place of the engine's thread (loop.py)."""

from __future__ import annotations

import functools

from ...jit.c_function import c_function
from .loop import help_out


@functools.cache
def address() -> int:
    """Return the address of `void help_out(int64_t nic, int64_t posted)`, which is valid until the process ends."""
    return c_function(help_out, 64, 64)
