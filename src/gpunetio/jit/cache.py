"""Where compiled code is kept: one folder, a file for each root, under a name that contains all that decides about it.

A file that is damaged, not trusted or cannot be read counts as missing. If the folder cannot be written to, nothing is
saved. Each of these is logged once. Of several processes that need a file at the same time, one compiles.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import DocaError
from ..kept import DamagedError, read_kept, turn_to_make, users_folder, write_kept
from ..trusted import make_trusted_folder

logger: logging.Logger = logging.getLogger("gpunetio.compile")

FOLDER = "GPUNETIO_CACHE_DIR"
_CURE = f"set {FOLDER} to a folder of yours that only you may write"

# These errors are not the cache's fault. Compiling instead would hide the cause.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_KEPT = 2000  # files; of more, the oldest go


@functools.cache  # log each message once
def _tell(message: str) -> None:
    logger.warning(message)


def folder() -> Path | None:
    """Return the folder of compiled code; None if this user has none."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    base = users_folder()
    return None if base is None else base / "code"


def _writable() -> Path | None:
    """Return the folder, made if it is missing; None if it is not trusted or cannot be made."""
    path = folder()
    try:
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "this user has no home folder")
        make_trusted_folder(path, cure=_CURE)
    except (OSError, DocaError) as error:
        _raise_if_of_the_process(error)
        _tell(
            f"compiled code cannot be kept ({_words(error)}): every process compiles again, a software NIC for some "
            f"seconds; {_CURE}"
        )
        return None
    return path


def load(name: str) -> bytes | None:
    """Return what is kept under a name; None if nothing is."""
    path = folder()
    return None if path is None else load_from(path, name)


def load_from(path: Path, name: str) -> bytes | None:
    """Return what a folder keeps under a name; None if nothing."""
    try:
        return read_kept(path / name, cure=_CURE)
    except (FileNotFoundError, NotADirectoryError):  # which `save` reports
        return None
    except (OSError, DocaError, DamagedError) as error:
        _raise_if_of_the_process(error)
        replaced = " and replaced" if path == folder() else ""  # what came with a wheel stays
        _tell(f"compiled code in {path} cannot be read ({_words(error)}): it is compiled again{replaced}")
        return None


@contextlib.contextmanager
def turn(name: str) -> Iterator[bytes | None]:
    """Keep other processes from making what has this name, and yield it if another process has made it meanwhile."""
    path = _writable()
    if path is None:
        yield None
        return
    with turn_to_make(path / name):
        yield load(name)


def save(name: str, contents: bytes) -> None:
    """Keep contents under a name, if that is possible."""
    path = _writable()
    if path is None:
        return
    try:
        write_kept(path / name, contents)
        _delete_old(path)
    except MemoryError:
        raise
    except (OSError, DocaError) as error:
        _tell(
            f"compiled code cannot be kept in {path} ({_words(error)}): every process compiles again, a software NIC "
            f"for some seconds; free space there, or {_CURE}"
        )


def _delete_old(path: Path) -> None:
    """Delete all but the newest files: each edit, and each value that a program freezes, has files of its own."""
    files = []
    for entry in os.scandir(path):
        if entry.name.startswith("."):  # a lock, or a file that is being written
            continue
        with contextlib.suppress(FileNotFoundError):  # another process deletes them, too
            files.append((entry.stat().st_mtime_ns, entry.path))
    for _, file in sorted(files)[:-_KEPT]:
        Path(file).unlink(missing_ok=True)


def _raise_if_of_the_process(error: Exception) -> None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OF_THE_PROCESS):
        raise error


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
