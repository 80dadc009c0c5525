"""Programs that are asked something. They may hang, in a driver even for ever: each has a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

LARGEST = 1 << 20  # bytes of output that are kept
_GRACE = 2.0  # seconds after which a process that was killed is left to the kernel


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it has printed until then."""

    status: int | None  # None: it was stopped at its deadline
    out: bytes
    err: bytes

    @property
    def last_words(self) -> str:
        """The last line of its errors, or else of its output."""
        lines = (self.err or self.out).decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def run(command: Sequence[str], deadline: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Wait for a program, at most `deadline` seconds. OSError when it cannot be started.

    It prints to files: a pipe would stay open in what the program leaves running.
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
    """In a session of its own, so that it can be stopped with all that it has started."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill it if it still runs, with all of its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def _written(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(LARGEST)
