"""The C function by which a thread of the program makes turns in the place of an engine's thread (loop.py)."""

from __future__ import annotations

import functools

from numba import types

from ..jit.c_function import c_function
from .loop import help_out


def _c_help_out(nic, posted):
    help_out(nic, posted)


_function = functools.cache(lambda: c_function(_c_help_out, (types.int64, types.int64), help_out))


def address() -> int:
    """Return the address of `void help_out(int64_t nic, int64_t posted)`, which is there as long as the process."""
    return int(_function().address)
