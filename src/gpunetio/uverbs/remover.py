"""Remove the folder of `gpunetio run` when nothing uses it any more. This module runs as a process of its own.

`gpunetio run` becomes the program that it runs, so it cannot clean up itself; nor could a parent that is killed. This
module imports only the standard library: Python runs it as a file, without site-packages.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PERIOD, _LOOKS = 0.5, 3  # seconds between two looks, and how many looks in a row must find no user
_PATIENCE = 60.0


def remove_after_this_process(folder: Path, variable: str) -> None:
    """Start a process that removes a folder once nothing uses it.

    That is when this process and all processes that have the folder in the environment variable have ended. The new
    process is no child of this one, whose program may wait for all of its children, and it holds no descriptor.
    """
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, f"{variable}={folder}", str(folder)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        cwd="/", env=_needed_by_python(), start_new_session=True, check=True, timeout=_PATIENCE,
    )


def _needed_by_python() -> dict[str, str]:
    """Return the part of the environment without which Python may not start. The rest is meant for the program."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _wait_for(process: int) -> None:
    """Return when a process has ended."""
    try:
        watched = os.pidfd_open(process)
    except OSError:  # Linux before 5.3
        while Path(f"/proc/{process}").exists():
            time.sleep(_PERIOD)
    else:
        select.select([watched], [], [])


def _is_used(setting: bytes) -> bool:
    """Return whether a process of this user was started with a setting in its environment, as a daemon may be."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if setting in environment.read_bytes().split(b"\0"):
                return True
    return False


def _main(setting: str, folder: str) -> None:
    watched = os.getppid()  # it waits for us, so its number is not reused
    if os.fork():
        return
    for number in signal.SIGTERM, signal.SIGHUP:  # service managers send these to everything at once (systemd.kill(5))
        signal.signal(number, signal.SIG_IGN)
    _wait_for(watched)
    unused = 0
    while unused < _LOOKS:  # a process that starts a program has no environment for a moment (execve(2))
        unused = 0 if _is_used(os.fsencode(setting)) else unused + 1
        time.sleep(_PERIOD)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
