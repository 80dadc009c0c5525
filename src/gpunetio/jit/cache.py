"""The cache of compiled code: one folder, with a file for each root, named by everything that determines the code.

A file that is damaged, not trusted or cannot be read counts as missing. If the folder cannot be written to, nothing is
saved. Each of these is logged once. If several processes need a file at the same time, one of them compiles.
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

_KEPT = 2000  # files; if there are more, the oldest are deleted


@functools.cache  # log each message once
def _tell(message: str) -> None:
    logger.warning(message)


def folder() -> Path | None:
    """Return the folder of compiled code, or None if this user has none."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    base = users_folder()
    return None if base is None else base / "code"


def _writable() -> Path | None:
    """Return the folder, and create it if it is missing. None if it is not trusted or cannot be created."""
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
    """Return the contents stored under a name, or None if there are none."""
    path = folder()
    return None if path is None else load_from(path, name)


def load_from(path: Path, name: str) -> bytes | None:
    """Return the contents that a folder has under a name, or None if there are none."""
    try:
        return read_kept(path / name, cure=_CURE)
    except (FileNotFoundError, NotADirectoryError):  # `save` reports the latter
        return None
    except (OSError, DocaError, DamagedError) as error:
        _raise_if_of_the_process(error)
        replaced = " and replaced" if path == folder() else ""  # files of a wheel stay
        _tell(f"compiled code in {path} cannot be read ({_words(error)}): it is compiled again{replaced}")
        return None


@contextlib.contextmanager
def turn(name: str) -> Iterator[bytes | None]:
    """Keep other processes from making the file of this name. Yield its contents if another process has made it."""
    path = _writable()
    if path is None:
        yield None
        return
    with turn_to_make(path / name):
        yield load(name)


def save(name: str, contents: bytes) -> None:
    """Store contents under a name, if that is possible."""
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
    """Delete all but the newest files: each edit, and each value that a program freezes, adds files."""
    files = []
    for entry in os.scandir(path):
        if entry.name.startswith("."):  # a lock, or a file that is being written
            continue
        with contextlib.suppress(FileNotFoundError):  # another process may have deleted it
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
