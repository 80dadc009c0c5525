"""A guest whose second NIC has a Unix socket as its cable, and programs of ours at the other end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import guest as harness

HERE = Path(__file__).parent
BOOT, END = 120.0, 60.0  # seconds
OURS, GUESTS = "10.78.0.1", "10.78.0.2"
PINGS = 2000
FIRST_ANSWER = f"""
ip link set eth1 up
ip addr add {GUESTS}/24 dev eth1
tries=0
until ping -c 1 -W 1 {OURS} >/dev/null; do
    tries=$((tries + 1))
    [ $tries -lt 200 ] || exit 3
done
ip neigh flush dev eth1
"""
FLOOD = f"""
ping -f -q -c {PINGS} -W 10 {OURS} || exit 4
ping -q -c 5 -i 0.2 -s 1472 {OURS} || exit 5
ip neigh show dev eth1
"""


class Machines:
    """A guest whose second NIC has a socket as its cable, and programs beside it, in its namespace."""

    def __init__(self, undo: contextlib.ExitStack, folder: Path, name: str, script: str, *files: str):
        if os.geteuid() != 0:
            pytest.skip("a guest needs a network namespace and a tap: root only")
        harness.build()
        self._undo, self._folder = undo, folder
        self.namespace, self.cable = f"gn-{os.getpid()}-{name}", folder / "cable"
        given = [word for file in files for word in ("-f", str(HERE / file))]
        self.guest = self._start(
            str(HERE / "run_guest.sh"), *given, "-N", self.namespace, "-u", str(self.cable), "-t", "500",
            "-P", str(os.getpid()), "--", script, log="guest",
        )
        self.until(self.cable.exists, "the guest's cable")

    def _start(self, *argv: str, log: str) -> subprocess.Popen[bytes]:
        with (self._folder / log).open("wb") as out:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self._undo.callback(harness.end, process)
        return process

    def start(self, *argv: str, log: str) -> subprocess.Popen[bytes]:
        """Start a Python program in the guest's namespace."""
        return self._start("ip", "netns", "exec", self.namespace, sys.executable, *argv, log=log)

    def said(self, log: str) -> str:
        return (self._folder / log).read_text(errors="replace")

    def until(self, done: Callable[[], object], what: str) -> None:
        end = time.monotonic() + BOOT
        while not done():
            assert self.guest.poll() is None, self.said("guest")
            assert time.monotonic() < end, f"waited {BOOT} s for {what}"
            time.sleep(0.1)

    def finish(self, kernel: subprocess.Popen[bytes], log: str) -> str:
        """Wait for the guest, and end what a kernel runs in by Ctrl+C. Return what the latter has said."""
        status = self.guest.wait(400)
        kernel.send_signal(signal.SIGINT)
        assert (status, kernel.wait(END)) == (0, 0), self.said("guest") + self.said(log)
        return self.said(log)
