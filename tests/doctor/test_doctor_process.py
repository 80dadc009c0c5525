"""Programs that the doctor asks end at a deadline, or are left to the system."""

import os
import signal

import pytest

from gpunetio.doctor import LiveHost, Trouble
from gpunetio.doctor.machine import process, questions
from gpunetio.doctor.machine.process import run


@pytest.fixture
def pid(tmp_path):
    """A command that tells its number and hangs, and how to read that number."""
    path = tmp_path / "pid"
    return ["sh", "-c", f"echo $$ > {path}; exec sleep 60"], lambda: int(path.read_text())


def test_what_ends():
    ended = run(["sh", "-c", "echo out; echo err >&2; exit 3"], 60)
    assert (ended.status, ended.out, ended.err, ended.last_words) == (3, b"out\n", b"err\n", "err")
    assert run(["printenv", "LC_ALL"], 60, {"LC_ALL": "C", "PATH": os.environ["PATH"]}).out == b"C\n"


def test_what_hangs_is_killed(pid):
    command, number = pid
    assert run(command, 3).status is None
    with pytest.raises(ProcessLookupError):  # reaped, too
        os.kill(number(), 0)


@pytest.mark.slow
def test_what_cannot_be_killed_is_left(pid, monkeypatch):
    """As a process that sleeps in a driver: it is not waited for."""
    command, number = pid
    spared, started = [], []
    monkeypatch.setattr(process, "_GRACE", 0.1)
    monkeypatch.setattr(process.os, "killpg", lambda group, _: spared.append(group))
    real = process.start
    monkeypatch.setattr(process, "start", lambda *args, **more: started.append(real(*args, **more)) or started[0])
    assert run(command, 3).status is None
    assert spared == [number()]
    assert started[0].poll() is None
    os.kill(number(), signal.SIGKILL)
    assert started[0].wait(60) == -signal.SIGKILL


@pytest.fixture
def fifo(tmp_path, monkeypatch):
    """A node whose open for writing hangs, as nobody reads."""
    monkeypatch.setattr(questions, "_READ_WRITE", os.O_WRONLY)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


@pytest.mark.slow
def test_a_node_that_hangs(fifo, monkeypatch):
    monkeypatch.setattr(questions, "_OPENS_WITHIN", 1)
    reading = LiveHost().ask("opens", fifo)
    assert (reading.trouble, reading.value, reading.error) == (Trouble.TIMEOUT, None, "no answer within 1 s")


def test_a_node_that_opens(fifo):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert LiveHost().ask("opens", fifo).value is True
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("path", "trouble", "error"),
    [
        ("/dev/null", Trouble.NONE, ""),
        ("/dev/no such node", Trouble.ABSENT, "No such file or directory"),
        ("/proc", Trouble.FAILED, "Is a directory"),
    ],
)
def test_nodes(path, trouble, error):
    reading = LiveHost().ask("opens", path)
    assert (reading.trouble, reading.error) == (trouble, error)


def test_a_process_that_says_nothing(monkeypatch):
    monkeypatch.setattr(questions, "_OPENING", "import sys; sys.exit(7)")
    reading = LiveHost().ask("opens", "/dev/null")
    assert (reading.trouble, reading.error) == (Trouble.FAILED, "the process that tried it ended with status 7")
