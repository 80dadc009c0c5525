"""Run programs with a deadline. A program may hang, in a driver even for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

LARGEST = 1 << 20  # bytes of output to keep
_GRACE = 2.0  # seconds to wait for a killed process before leaving it to the kernel


@dataclass(frozen=True)
class Ended:
    """The exit status and the output of a program."""

    status: int | None  # None: killed at the deadline
    out: bytes
    err: bytes

    @property
    def last_words(self) -> str:
        """The last line of its standard error, or else of its output."""
        lines = (self.err or self.out).decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def run(command: Sequence[str], deadline: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a program for at most `deadline` seconds. Raises OSError if it cannot be started.

    It prints to files: processes that it leaves running would keep a pipe open.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(command, environment, stdout=out, stderr=err)
        try:
            status = process.wait(deadline)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process)
        return Ended(status, _written(out), _written(err))


def start(
    command: Sequence[str], environment: Mapping[str, str] | None, stdout: int | IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that it can be killed together with its children."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, together with its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def _written(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(LARGEST)
