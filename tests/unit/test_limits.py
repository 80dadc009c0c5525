"""Limits of the process: the one that is in the way is named, and nothing is half made."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpunetio import Gpu, verbs
from gpunetio.cli.failures import explained
from gpunetio.errors import NoMemoryError, OperatingSystemError
from gpunetio.limits import within_limits
from gpunetio.memory import live
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.nic import descriptors_of

DESCRIPTORS = descriptors_of(PortConfig())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[int]:
    """The limit that leaves so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    holes = [os.dup(2) for _ in range(limit - descriptors())]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + count, hard))
    try:
        yield limit + count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)


def test_what_a_nic_takes():
    before = descriptors()
    with verbs.open("soft0"):
        assert descriptors() - before == DESCRIPTORS


def test_no_descriptors_for_a_nic():
    """Wherever they run out, the error says so, and the next try with enough of them succeeds."""
    with verbs.open("soft1") as other:
        with verbs.open("soft0"):  # what stays is there: the end of a wire, what is loaded once
            pass
        before, memory, threads = descriptors(), len(live()), threading.active_count()
        for count in range(DESCRIPTORS):
            with free_descriptors(count) as limit, pytest.raises(OperatingSystemError) as caught:
                verbs.open("soft0")
            told = str(caught.value)
            assert told.startswith("cannot open ")
            assert f"no free file descriptor (EMFILE): this process may have {limit}, and " in told
            assert told.endswith(" more are needed; raise that with ulimit -n")
            assert (descriptors(), len(live()), threading.active_count()) == (before, memory, threads)
        with free_descriptors(DESCRIPTORS), verbs.open("soft0") as ctx:
            assert len(ctx.provider.nic.links.peers()) == 1  # type: ignore[attr-defined]
        other.query_device()
        assert descriptors() == before


def test_closing_takes_no_descriptor():
    """What closing compiles or loads is there before: no KeyError behind a descriptor that is missing."""
    before = descriptors()
    ctx = verbs.open("soft0")
    with free_descriptors(0):
        ctx.close()
    assert descriptors() == before


def test_no_descriptor_for_a_proxy():
    words = "cannot open a proxy service: no free file descriptor"
    with Gpu("host") as gpu, free_descriptors(0), pytest.raises(OperatingSystemError, match=words):
        gpu.create_service()


OPENING = """
import resource
import threading
import gpunetio
import gpunetio.providers.soft
from gpunetio.nic.host.engine import compile_engine

compile_engine()
threading.stack_size({stack} << 20)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + ({room} << 20), resource.RLIM_INFINITY))
try:
    gpunetio.open("soft0")
except gpunetio.DocaError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("room", "stack", "why"), [(2, 1, "no memory (ENOMEM): "), (500, 1000, "the system starts no more threads: ")]
)
def test_no_address_space(room, stack, why):
    """In MiB: all that may be mapped, and what the stack of each thread takes of it."""
    program = OPENING.replace("{room}", str(room)).replace("{stack}", str(stack))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"NoMemoryError cannot open soft0: {why}")
    assert ran.stdout.endswith("; raise that with ulimit -v\n")
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), OperatingSystemError, ", and 3 more are needed; raise"),
        (OSError(errno.ENFILE, "Too many"), OperatingSystemError, "the system has no free file descriptor (ENFILE)"),
        (OSError(errno.ENOMEM, "Cannot"), NoMemoryError, "no memory (ENOMEM): this process "),
        (MemoryError(), NoMemoryError, "no memory (ENOMEM): this process "),
        (RuntimeError("can't start new thread"), NoMemoryError, "the system starts no more threads: see ulimit -u"),
    ],
)
def test_words(error, kind, words):
    with pytest.raises(kind) as caught, within_limits("it", 3):
        raise error
    assert str(caught.value).startswith("cannot open it: ")
    assert words in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("other"), ValueError("7")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, within_limits("it", 3):
        raise error
    assert caught.value is error


def test_commands_say_what_helps():
    error = OSError(errno.EMFILE, "Too many open files", "/proc/self/maps")
    assert explained(error).startswith("/proc/self/maps: no free file descriptor (EMFILE): this process may have ")
    assert explained(OSError(errno.EIO, "Input/output error")) == "Input/output error"
