"""Explain errors that are caused by limits of this process: which limit, its value, and how to raise it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from .errors import DocaError, NoMemoryError, OperatingSystemError

_MIB = 1 << 20
_BESIDE_STACKS = 16 * _MIB  # address space that the C library and Python need for threads, with some room
_STACK = 8 * _MIB  # if there is no limit


@contextlib.contextmanager
def within_limits(what: str, descriptors: int = 0) -> Iterator[None]:
    """Open `what`, which takes `descriptors` descriptors, in the block. Errors then name the limit that caused them.

    OperatingSystemError for descriptors, NoMemoryError for memory and threads.
    """
    try:
        yield
    except DocaError as told:
        # The error of a ServiceThread that has not started names the thread: name what it is for.
        if isinstance(cause := told.__cause__, RuntimeError) and (why := _why(cause, descriptors)):
            raise NoMemoryError(f"cannot open {what}: {why}") from cause
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        if (why := _why(error, descriptors)) is None:
            raise
        told = f"cannot open {what}: {why}"
        raise (OperatingSystemError if _out_of_descriptors(error) else NoMemoryError)(told) from error


def cure(error: OSError | RuntimeError) -> str | None:
    """Return the cause and cure of an error of a call or of starting a thread, or None if no limit caused it."""
    return _why(error, 0)


def check_threads(count: int, what: str) -> None:
    """Raise NoMemoryError unless the address space has room for `count` threads: the C library would abort."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    needed = count * (_STACK if stack == resource.RLIM_INFINITY else stack) + _BESIDE_STACKS
    if _address_space() + needed > limit:
        raise NoMemoryError(f"cannot start {what}: its threads take {needed // _MIB} MiB of addresses, and {_space()}")


def _out_of_descriptors(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _why(error: BaseException, descriptors: int) -> str | None:
    if _out_of_descriptors(error):
        assert isinstance(error, OSError)
        if error.errno == errno.ENFILE:
            return "the system has no free file descriptor (ENFILE): see /proc/sys/fs/file-max"
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        need = f", and {descriptors} more are needed" if descriptors else ""
        return f"no free file descriptor (EMFILE): this process may have {soft}{need}; raise that with ulimit -n"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return f"no memory (ENOMEM): {_space()}"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return f"the system starts no more threads: see ulimit -u, the limits of the container, and memory: {_space()}"
    return None


def _address_space() -> int:
    """Return how many bytes of address space this process has mapped."""
    return int(Path("/proc/thread-self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _space() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _address_space() // _MIB
    if limit == resource.RLIM_INFINITY:
        return f"this process has mapped {used} MiB; see free -m, and the limits of the container"
    return f"this process may map {limit // _MIB} MiB and has mapped {used}; raise that with ulimit -v"
