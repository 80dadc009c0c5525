"""Run `gpunetio` commands in separate processes."""

import contextlib
import pty
import re
import subprocess
import sys
import threading

import pytest

LIMIT = 60  # seconds for anything
COMMAND = ("-m", "gpunetio")


def new_terminal() -> tuple[int, int]:
    """Return both ends of a new pseudo-terminal: what reads, and what a command writes to."""
    try:
        return pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal here, as where /dev/pts is not mounted: {error}")


class Tool:
    """A running `gpunetio` command, its output as it comes."""

    limit = LIMIT  # for a line

    def __init__(self, *args, program=COMMAND, start=subprocess.Popen):
        self.process = start(
            [sys.executable, "-u", *program, *map(str, args)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []

    def until(self, text):
        """Read stdout until a line has this in it."""
        watchdog = threading.Timer(self.limit, self.process.kill)
        watchdog.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                if text in line:
                    return line
        finally:
            watchdog.cancel()
        raise AssertionError(f"{text!r} did not come: {self.lines} {self.process.stderr.read()}")

    def end(self):
        """Wait for the end: exit status, all of stdout, stderr but for what a cold cache makes it say."""
        out, err = self.process.communicate(timeout=LIMIT)
        err = re.sub(r"^gpunetio: compiling .*\n", "", err, flags=re.MULTILINE)
        return self.process.returncode, "".join(f"{line}\n" for line in self.lines) + out, err

    def signal(self, number):
        self.process.send_signal(number)


@contextlib.contextmanager
def running(*tools):
    try:
        yield tools
    finally:
        for tool in tools:
            tool.process.kill()
            if not tool.process.stdout.closed:
                tool.process.communicate()


def error_line(err):
    """The one line of an error that says what happened, after what the NIC says."""
    last = err.splitlines()[-1]
    assert last.startswith("gpunetio: error: ")
    assert err.count("gpunetio: error:") == 1
    assert "Traceback" not in err
    return last
