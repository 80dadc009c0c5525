"""Numba compiles kernels, the software NIC, and the code between a CPU and a ring.

Nothing else needs Numba, and it is loaded when the first of these is used. So hardware can be controlled where Numba is
not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import NotSupportedError


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Import compiled modules in this context. Without Numba, raise NotSupportedError, which begins with `what`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise NotSupportedError(f"{what} without Numba ({error}): pip install numba") from error
