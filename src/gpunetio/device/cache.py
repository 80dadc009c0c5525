"""Numba's cache of compiled functions, as something that everything works without."""

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

# The cache is not at fault for these, and compiling instead would hide the reason.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@functools.cache  # once for each message
def _tell(message: str) -> None:
    logger.warning(message)


class Cache(FunctionCache):
    """The cached compilations of a function, valid as long as its `stamp` is.

    A file that cannot be read, or makes no sense, is as good as none. A folder that cannot be written to is left alone.
    The log says either once.
    """

    def __init__(self, fn: Callable[..., Any], stamp: str):
        super().__init__(fn)
        self._cache_file._source_stamp = stamp

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for the signature, or None."""
        try:
            return super().load_overload(sig, target_context)
        except MemoryError:
            raise
        except Exception as error:  # whatever unpickling half a file comes to
            if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
                raise
            _tell(
                f"compiled code in {self.cache_path} cannot be read ({_words(error)}): what is compiled anew takes its "
                "place; if this is said again, delete the files *.nbi and *.nbc there"
            )
            self._forget()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, if that is possible."""
        try:
            super().save_overload(sig, data)
        except MemoryError:
            raise
        except Exception as error:
            self._forget()  # it may name a file that was not written, in whose place an older one may be
            _tell(
                f"compiled code cannot be kept in {self.cache_path} ({_words(error)}): every process compiles anew, "
                "which takes minutes; make room there, or set NUMBA_CACHE_DIR to a folder that you can write to"
            )

    def _forget(self) -> None:
        """Without an index the function's files are not looked at."""
        with contextlib.suppress(OSError):
            os.unlink(self._cache_file._index_path)


def cache_of(fn: Callable[..., Any], stamp: str) -> Cache | None:
    """The cache of a function; None where Numba finds no folder for it that can be written to."""
    try:
        return Cache(fn, stamp)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
            raise
        folder = os.path.dirname(fn.__code__.co_filename)
        _tell(
            f"compiled code of {folder} cannot be kept: neither a folder there nor the user's cache can be written to; "
            "every process compiles anew, which takes minutes; set NUMBA_CACHE_DIR to a folder that you can write to"
        )
        return None


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
