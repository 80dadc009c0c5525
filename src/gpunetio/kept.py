"""Files that are expensive to make, and are kept for later processes: compiled code.

Each file ends with a checksum of the rest. Loaders ignore the checksum: a pickle ends at its full stop, and the
sections of an ELF file are found by their offsets. Processes that start together make such a file only once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .log import tell_who_waits
from .trusted import CURE, read_trusted, write_trusted

logger: logging.Logger = logging.getLogger("gpunetio.compile")

PATIENCE = 600.0  # seconds; compiling the software NIC takes less, even on a slow and busy machine
_LOOK = 0.05  # seconds between two attempts to get the lock
_TOLD_AFTER = 1.0  # seconds
_CHECKSUM = 16  # bytes

_held: set[int] = set()  # descriptors of lock files
_opening = threading.RLock()  # held while a lock file is opened, and while a thread forks
_forking: list[bool] = []  # not empty while a thread forks; a fork may have begun before this module was loaded


def users_folder() -> Path | None:
    """Return the user's cache folder (XDG Base Directory Specification), or None if there is none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore it
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return Path(base, "gpunetio")


def _before_fork() -> None:
    _opening.acquire()
    _forking.append(True)


def _after_in_parent() -> None:
    if _forking:
        _forking.pop()
        _opening.release()


def _after_fork() -> None:
    """Leave the locks to the parent: a lock lasts as long as any process has the descriptor."""
    while _held:
        os.close(_held.pop())
    _after_in_parent()


# This is the last step before a fork: forks wait for a thread that compiles (compiler.py), and it opens such files.
os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_fork)


class DamagedError(ValueError):
    """A file differs from what was written."""


def _checksum(contents: bytes) -> bytes:
    return hashlib.blake2b(contents, digest_size=_CHECKSUM).digest()


def unsealed(sealed: bytes) -> bytes:
    """Return the contents without the checksum. DamagedError if it is wrong, as in a truncated or overwritten file."""
    contents, checksum = sealed[:-_CHECKSUM], sealed[-_CHECKSUM:]
    if checksum != _checksum(contents):
        raise DamagedError("it is damaged: its checksum is wrong")
    return contents


def read_kept(path: Path, owner: int | None = None, cure: str = CURE) -> bytes:
    """Return the contents of a file. DamagedError, or an error of `read_trusted`."""
    return unsealed(read_trusted(path, owner, cure))


def write_kept(path: Path, contents: bytes, owner: int | None = None) -> None:
    """Write a file with a checksum, as `write_trusted` does."""
    write_trusted(path, contents + _checksum(contents), owner)


@contextlib.contextmanager
def turn_to_make(path: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep other processes from making the file during the block. If one is making it, wait until it is done.

    A process that has waited `patience` seconds goes ahead without the lock, and so does a process that cannot lock a
    file there. The lock of a process that dies is released.
    """
    lock = path.with_name(f".{path.name}.lock")
    fd = _locked(lock, patience, path.name)
    try:
        yield
    finally:
        if fd is not None and fd in _held:  # otherwise the lock is the parent's
            with contextlib.suppress(OSError):
                os.unlink(lock)
            _close(fd)


def _locked(lock: Path, patience: float, what: str) -> int | None:
    """Return the descriptor of the locked file, or None if it cannot be locked."""
    start, told = time.monotonic(), False
    with contextlib.suppress(OSError):  # the folder is not writable, or the file system has no locks
        while (waited := time.monotonic() - start) < patience:
            if (fd := _try_to_lock(lock)) is not None:
                return fd
            if waited > _TOLD_AFTER and not told:
                told = True
                tell_who_waits(f"compiling {what} is another process's turn: waiting until it is done")
            time.sleep(_LOOK)
        logger.warning("another process has not compiled %s within %g s: this one does", what, patience)
    return None


def _try_to_lock(lock: Path) -> int | None:
    """Return the descriptor of the locked file, or None while another process has the lock."""
    with _opening:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        _held.add(fd)
    kept = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had the lock may have removed the file. Later processes lock the file that is there now.
        kept = os.path.samestat(os.fstat(fd), os.stat(lock))
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not kept:
            _close(fd)
    return fd if kept else None


def _close(fd: int) -> None:
    with _opening:
        _held.remove(fd)
        os.close(fd)
