"""Child processes with a deadline: what hangs in a driver hangs there, and not here."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

_GRACE = 1.0  # seconds for a killed process to be gone


def output(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """What a command prints, and its exit status; TimeoutError if it does not end within `seconds`."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ if environment is None else environment,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        _end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Without waiting for one that signals do not reach, as it sleeps in the kernel."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
