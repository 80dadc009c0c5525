"""Numba's cache of compiled functions, made optional: everything also works without it."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache

logger = logging.getLogger("gpunetio.compile")

# These errors are not the cache's fault. Compiling instead would hide the cause.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@functools.cache  # log each message once
def _tell(message: str) -> None:
    logger.warning(message)


class Cache(FunctionCache):
    """The cached compilations of a function. They are valid while its `stamp` stays the same.

    A file that is damaged or cannot be read counts as missing. If the folder cannot be written to, nothing is saved.
    Each of these is logged once.
    """

    def __init__(self, fn: Callable[..., Any], stamp: str):
        super().__init__(fn)
        self._cache_file._source_stamp = stamp

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code compiled for the signature, or None."""
        try:
            return super().load_overload(sig, target_context)
        except MemoryError:
            raise
        except Exception as error:  # unpickling half a file may raise anything
            if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
                raise
            _tell(
                f"compiled code in {self.cache_path} cannot be read ({_words(error)}): it is compiled again and "
                "replaced; if this message comes back, delete the files *.nbi and *.nbc there"
            )
            self._forget()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the compiled code, if that is possible."""
        try:
            super().save_overload(sig, data)
        except MemoryError:
            raise
        except Exception as error:
            self._forget()  # it may name a file that was not written, and an older file may have that name
            _tell(
                f"compiled code cannot be saved in {self.cache_path} ({_words(error)}): every process compiles again, "
                "which takes minutes; free space there, or set NUMBA_CACHE_DIR to a folder that you can write to"
            )

    def _forget(self) -> None:
        """Delete the function's index. Without it, Numba ignores the function's files."""
        with contextlib.suppress(OSError):
            os.unlink(self._cache_file._index_path)


def cache_of(fn: Callable[..., Any], stamp: str) -> Cache | None:
    """Return the cache of a function, or None if Numba finds no folder for it that can be written to."""
    try:
        return Cache(fn, stamp)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
            raise
        folder = os.path.dirname(fn.__code__.co_filename)
        _tell(
            f"compiled code of {folder} cannot be saved: neither a folder there nor the user's cache can be written "
            "to; every process compiles again, which takes minutes; set NUMBA_CACHE_DIR to a folder that you can write "
            "to"
        )
        return None


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
