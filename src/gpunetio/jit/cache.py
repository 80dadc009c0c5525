"""Numba's cache of compiled functions, made optional: everything also works without it."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from glob import escape, glob
from io import BytesIO
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, InTreeCacheLocator, NullCache
from numba.core.runtime.nrt import rtsys

from ..errors import DocaError, NotPermittedError
from ..kept import DamagedError, read_kept, turn_to_make, write_kept
from ..trusted import make_trusted_folder
from . import prebuilt
from .frozen import Watch
from .stamps import is_ours

logger: logging.Logger = logging.getLogger("gpunetio.compile")

# These errors are not the cache's fault. Compiling instead would hide the cause.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_KEPT = 64  # stamps of a function of a program whose code is kept


@functools.cache  # log each message once
def _tell(message: str) -> None:
    logger.warning(message)


_CURE = "set NUMBA_CACHE_DIR to a folder of yours that only you may write"


def owner_beside(source: str, folder: Path) -> int | None:
    """Return who is trusted with compiled code in a folder, besides this user and root.

    Below the folder of the source, it is the owner of that folder: what they write there is executed anyway.
    """
    beside = os.path.dirname(os.path.abspath(source))
    return os.stat(beside).st_uid if folder.is_relative_to(beside) else None


@functools.cache
def _if_trusted(locator: Any) -> Any:
    """Return a locator of Numba's that passes over a folder which others may write."""

    class Trusted(locator):
        def ensure_cache_path(self) -> None:
            folder = Path(self.get_cache_path())
            try:
                make_trusted_folder(folder, owner_beside(self._py_file, folder), _CURE)
            except NotPermittedError as error:
                _tell(f"compiled code is neither loaded from {folder} nor saved there: {error}")
                raise
            super().ensure_cache_path()

    return Trusted


class _WheelLocator(InTreeCacheLocator):
    """The last resort: the wheel's folder. What it has is loaded, also where no folder can be written to."""

    def get_cache_path(self) -> str:
        return str(prebuilt.folder_of(self._py_file))

    @classmethod
    def from_function(cls, py_func: Callable[..., object], py_file: str) -> _WheelLocator | None:
        return cls(py_func, py_file) if prebuilt.usable() and prebuilt.folder_of(py_file) else None


class CacheImpl(CompileResultCacheImpl):
    """What the cache keeps of a compiled function."""

    _locator_classes: Any = property(
        lambda self: [*map(_if_trusted, CompileResultCacheImpl._locator_classes), _WheelLocator]
    )

    def reduce(self, cres: Any) -> Any:
        """Return what is saved: all but Numba's annotated source, which names folders of the machine that compiles."""
        return super().reduce(cres._replace(type_annotation=""))


class _File(IndexDataCacheFile):
    """Numba's files of a function's compiled code: trusted, and with checksums.

    They hold pickles, which execute code when they are loaded, and so does what is in them.
    """

    def __init__(self, folder: Path, name: str, stamp: str, source: str):
        super().__init__(folder, name, stamp)
        self._owner, self._stem = owner_beside(source, folder), Path(folder, name)

    def save(self, key: Any, data: Any) -> None:
        """Save code. The index names it only when it is there, and no other code ever has its name.

        Numba writes the index first, and names the code by a number, which that of an older source may have: another
        process then loads the old code.
        """
        found = self._load_index()
        name = f"{self._stem.name}.{secrets.token_hex(8)}.nbc"
        outdated: list[str] = []
        if key in found:
            outdated = [self._data_path(found[key])]
        elif not found:  # there is no index, or one of another source: what lies here is of nobody
            outdated = glob(f"{escape(str(self._stem))}.*.nbc")
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})
        for path in outdated:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _load_index(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            read_kept(Path(self._index_path), self._owner, _CURE)  # an error if it is not trusted, or damaged
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        return pickle.loads(read_kept(Path(self._data_path(name)), self._owner, _CURE))

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BytesIO]:
        contents = BytesIO()
        yield contents
        write_kept(Path(filepath), contents.getvalue(), self._owner)


class Cache(FunctionCache):
    """The cached compilations of a function: this machine's, and the wheel's. They are valid for a `stamp`.

    A function of a program has files of its own for each stamp, which stands for the values that the code contains:
    processes that run at the same time, such as the ranks of a job, may have different ones.

    A file that is damaged, not trusted or cannot be read counts as missing. If the folder cannot be written to, nothing
    is saved. Each of these is logged once. Of several processes that need the function at the same time, one compiles.
    """

    _impl_class: Any = CacheImpl
    _takes_turns = True

    def __init__(self, fn: Callable[..., object], stamp: str):
        super().__init__(fn)
        self._stamp, self._source = stamp, inspect.getfile(fn)
        self._ours = is_ours(fn.__code__.co_filename)
        name = self._impl.filename_base
        self._files = name if self._ours else f"{name}-{stamp[:16]}"
        self._cache_file = _File(Path(self._cache_path), self._files, stamp, self._source)
        self._turn: contextlib.ExitStack | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code compiled for the signature; or None, and begin the turn of this process to compile it."""
        found = self._load(sig, target_context)
        if found is None and self._takes_turns and self._turn is None:
            self._turn = contextlib.ExitStack()
            self._turn.enter_context(turn_to_make(Path(self._cache_file._index_path)))
            found = self._load(sig, target_context)  # another process may have compiled it meanwhile
            if found is not None:
                self.end_turn()
        return found

    def end_turn(self) -> None:
        """Let other processes compile the function, after this one has or could not. Idempotent."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.close()

    def _load(self, sig: Any, target_context: Any) -> Any:
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
        target, folder = prebuilt.usable(), prebuilt.folder_of(self._source)
        if folder is None:
            return None
        if target is None:
            prebuilt.tell_why_not()
            return None
        try:
            files = _File(folder, self._files, self._stamp, str(prebuilt.FOLDER))
            data = files.load(self._index_key(sig, target))
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
            self._delete_old()
        except NotPermittedError as error:
            _tell(f"compiled code is not saved: {error}")
        except MemoryError:
            raise
        except Exception as error:
            self._forget()  # it may be the file that could not be read
            _tell(
                f"compiled code cannot be saved in {self.cache_path} ({_words(error)}): every process compiles again, "
                "a software NIC for about half a minute; free space there, or set NUMBA_CACHE_DIR to a folder that you "
                "can write to"
            )
        finally:
            self.end_turn()

    def _delete_old(self) -> None:
        """Delete the files of all but the newest stamps. If a program freezes an address, each run has a new stamp."""
        if not self._ours:
            indexes = []
            for index in Path(self.cache_path).glob(f"{escape(self._impl.filename_base)}-*.nbi"):
                with contextlib.suppress(FileNotFoundError):  # another process deletes them, too
                    indexes.append((index.stat().st_mtime_ns, index))
            for _, index in sorted(indexes)[:-_KEPT]:
                index.unlink(missing_ok=True)
                for file in index.parent.glob(f"{escape(index.stem)}.*.nbc"):
                    file.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Delete the function's index. Without it, Numba ignores the function's files."""
        with contextlib.suppress(OSError):
            os.unlink(self._cache_file._index_path)


def cache_of(fn: Callable[..., object], stamp: str, kind: type[Cache] = Cache) -> Cache | None:
    """Return the cache of a function, or None if Numba finds no folder for it that can be written to."""
    try:
        return kind(fn, stamp)
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

    def __init__(self, fn: Callable[..., object], watch: Watch, kind: type[Cache] = Cache):
        self._fn, self._watch, self._kind = fn, watch, kind
        self._found: tuple[str, Cache | NullCache] | None = None

    @property
    def found(self) -> Cache | NullCache:
        """The cache for the values that the function freezes now, or one that keeps nothing."""
        frozen, found = self._watch.now(), self._found
        if found is None or found[0] != frozen.digest:
            kept = cache_of(self._fn, frozen.digest, self._kind) if frozen.lasting else None
            found = self._found = frozen.digest, kept or NullCache()
        return found[1]

    def end_turn(self) -> None:
        """Let other processes compile the function."""
        if self._found is not None and isinstance(cache := self._found[1], Cache):
            cache.end_turn()

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
    if isinstance(error, (DocaError, DamagedError)):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
