"""Watch a process that prints lines of JSON, with a deadline for each step, so that a hang there does not spread.

A line `{"begin": STEP}` begins a step. All other lines with a JSON object are the process's results.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ..machine.process import start, stop

MOST_BYTES = 1 << 20  # of output
MOST_SECONDS = 600.0  # for all steps
_SHOWN = 200  # characters of its last words


def watch(
    command: Sequence[str], deadline_of: Callable[[str], float], environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Run a process. Return `said`, its objects in order, and `ended`: "", or how it failed.

    `deadline_of` returns the seconds for a step, and for "" the seconds before the first step.
    """
    with tempfile.TemporaryFile() as complaints:
        process = start(command, environment, stdout=subprocess.PIPE, stderr=complaints)
        assert process.stdout is not None
        try:
            said, trouble = _listen(process, deadline_of)
        finally:
            stop(process)
            process.stdout.close()
        ended = trouble or _how_it_ended(process.returncode)
        if ended and not trouble and (words := _last_words(complaints)):
            ended += f": {words}"
    return {"said": said, "ended": ended}


def _listen(
    process: subprocess.Popen[bytes], deadline_of: Callable[[str], float]
) -> tuple[list[dict[str, object]], str]:
    """Collect its objects. Also return why it must be killed, or "" if it has ended."""
    assert process.stdout is not None
    out = process.stdout.fileno()
    ready = select.poll()
    ready.register(out, select.POLLIN)
    said: list[dict[str, object]] = []
    rest, nbytes, seconds = b"", 0, deadline_of("")
    begun = time.monotonic()
    last, end = begun + MOST_SECONDS, begun + seconds
    while ready.poll(max(0.0, min(end, last) - time.monotonic()) * 1000):
        chunk = os.read(out, 1 << 16)
        if not chunk:
            return said, _wait(process, end, seconds)
        nbytes += len(chunk)
        if nbytes > MOST_BYTES:
            return said, f"it printed more than {MOST_BYTES >> 20} MiB"
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(None, map(_object, lines)):
            said.append(line)
            if isinstance(step := line.get("begin"), str):
                seconds = deadline_of(step)
                end = time.monotonic() + seconds
    return said, f"no answer within {seconds if end <= last else MOST_SECONDS:g} s"


def _object(line: bytes) -> dict[str, object] | None:
    """Parse a JSON object; return None for anything else that a process prints."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _wait(process: subprocess.Popen[bytes], end: float, seconds: float) -> str:
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s"
    return ""


def _how_it_ended(status: int | None) -> str:
    if not status:
        return ""
    if status > 0:
        return f"exit status {status}"
    number = -status
    name = signal.Signals(number).name if number in list(signal.Signals) else "unknown"
    return f"ended by signal {number} ({name})"


def _last_words(complaints: IO[bytes]) -> str:
    """Return the last line of its standard error."""
    size = complaints.seek(0, os.SEEK_END)
    complaints.seek(max(0, size - (1 << 12)))
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:_SHOWN] if lines else ""
