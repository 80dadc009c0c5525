"""Numba's cache of compiled functions, made optional: everything also works without it."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, InTreeCacheLocator, NullCache
from numba.core.runtime.nrt import rtsys

from . import prebuilt
from .stamps import is_ours

logger: logging.Logger = logging.getLogger("gpunetio.compile")

# These errors are not the cache's fault. Compiling instead would hide the cause.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@functools.cache  # log each message once
def _tell(message: str) -> None:
    logger.warning(message)


class _WheelLocator(InTreeCacheLocator):
    """The last resort: the wheel's folder. What it has is loaded, also where no folder can be written to."""

    def get_cache_path(self) -> str:
        return str(prebuilt.folder_of(self._py_file))

    @classmethod
    def from_function(cls, py_func: Callable[..., object], py_file: str) -> _WheelLocator | None:
        return cls(py_func, py_file) if prebuilt.usable() and prebuilt.folder_of(py_file) else None


class CacheImpl(CompileResultCacheImpl):
    """What the cache keeps of a compiled function."""

    _locator_classes: Any = property(lambda self: [*CompileResultCacheImpl._locator_classes, _WheelLocator])

    def reduce(self, cres: Any) -> Any:
        """Return what is saved: all but Numba's annotated source, which names folders of the machine that compiles."""
        return super().reduce(cres._replace(type_annotation=""))


class Cache(FunctionCache):
    """The cached compilations of a function: this machine's, and the wheel's. They are valid for a `stamp`.

    A file that is damaged or cannot be read counts as missing. If the folder cannot be written to, nothing is saved.
    Each of these is logged once.
    """

    _impl_class: Any = CacheImpl

    def __init__(self, fn: Callable[..., object], stamp: str):
        super().__init__(fn)
        self._cache_file._source_stamp = self._stamp = stamp
        self._ours = is_ours(fn.__code__.co_filename)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code compiled for the signature, or None."""
        try:
            if self._ours:
                # Numba would first load all that it knows of arrays, lists, and strings, none of which is in there.
                rtsys.initialize(target_context)
                found = self._load_overload(sig, target_context)
            else:
                found = super().load_overload(sig, target_context)
        except Exception as error:  # unpickling half a file may raise anything
            _raise_if_of_the_process(error)
            _tell(
                f"compiled code in {self.cache_path} cannot be read ({_words(error)}): it is compiled again and "
                "replaced; if this message comes back, delete the files *.nbi and *.nbc there"
            )
            self._forget()
            found = None
        return self._load_from_wheel(sig, target_context) if found is None else found

    def _load_from_wheel(self, sig: Any, target_context: Any) -> Any:
        target = prebuilt.usable()
        folder = prebuilt.folder_of(inspect.getfile(self._py_func))
        if target is None or folder is None:
            return None
        try:
            data = IndexDataCacheFile(folder, self._impl.filename_base, self._stamp).load(self._index_key(sig, target))
            return None if data is None else self._impl.rebuild(target_context, data)
        except Exception as error:
            _raise_if_of_the_process(error)
            _tell(
                f"the wheel's compiled code in {folder} cannot be read ({_words(error)}): it is compiled for this "
                "machine; install the wheel again"
            )
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
                "a software NIC for about half a minute; free space there, or set NUMBA_CACHE_DIR to a folder that you "
                "can write to"
            )

    def _forget(self) -> None:
        """Delete the function's index. Without it, Numba ignores the function's files."""
        with contextlib.suppress(OSError):
            os.unlink(self._cache_file._index_path)


def cache_of(fn: Callable[..., object], stamp: str) -> Cache | None:
    """Return the cache of a function, or None if Numba finds no folder for it that can be written to."""
    try:
        return Cache(fn, stamp)
    except (RuntimeError, OSError) as error:
        _raise_if_of_the_process(error)
        folder = os.path.dirname(fn.__code__.co_filename)
        _tell(
            f"compiled code of {folder} cannot be saved: neither a folder there nor the user's cache can be written "
            "to; every process compiles again, a software NIC for about half a minute; set NUMBA_CACHE_DIR to a folder "
            "that you can write to"
        )
        return None


class LazyCache:
    """The cache of a function, which is looked for when it is asked: most functions are parts, and never ask."""

    def __init__(self, fn: Callable[..., object], stamp: str):
        self._fn, self._stamp = fn, stamp

    @functools.cached_property
    def found(self) -> Cache | NullCache:
        """The cache, or one that keeps nothing."""
        return cache_of(self._fn, self._stamp) or NullCache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.found, name)


def keeps_nothing(cache: Any) -> bool:
    """Whether what a dispatcher has for a cache is none."""
    return isinstance(cache.found if isinstance(cache, LazyCache) else cache, NullCache)


def _raise_if_of_the_process(error: Exception) -> None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OF_THE_PROCESS):
        raise error


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
