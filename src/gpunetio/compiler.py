"""The compiler, Numba: what runs in kernels, in the software NIC and between a CPU and a ring is made by it.

Nothing else needs it, and it is loaded when the first of these is used. So hardware can be controlled where it is not
installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import NotSupportedError


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Around imports of compiled modules: NotSupportedError says what cannot be had when there is no compiler."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise NotSupportedError(f"{what} without Numba ({error}): pip install numba") from error
