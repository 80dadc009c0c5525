"""Files that are made once: they are as they were written, and one process at a time makes one."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import kept
from gpunetio.kept import DamagedError, read_kept, turn_to_make, unsealed, write_kept

COUNT = """
import sys
from pathlib import Path
from gpunetio.kept import turn_to_make

made, count = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(25):
    with turn_to_make(made):
        count.write_text(str(int(count.read_text()) + 1))  # loses some if two do it at once
"""
HOLD = """
import sys, time
from pathlib import Path
from gpunetio.kept import turn_to_make

with turn_to_make(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holder(made: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, whose turn it is until it gets a line."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(made)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


@given(st.binary(max_size=200), st.data())
def test_any_change_is_noticed(tmp_path_factory, contents, data):
    file = tmp_path_factory.mktemp("kept") / "file"
    write_kept(file, contents)
    assert read_kept(file) == contents
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (flipped, whole[:at], whole + b"\0"):
        with pytest.raises(DamagedError, match="its checksum is wrong"):
            unsealed(damaged)


def test_turns_do_not_overlap(tmp_path):
    count = tmp_path / "count"
    count.write_text("0")
    command = [sys.executable, "-c", COUNT, str(tmp_path / "made"), str(count)]
    children = [subprocess.Popen(command) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert count.read_text() == "75"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_a_process_that_dies_ends_its_turn(tmp_path):
    with holder(tmp_path / "made") as child:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        with turn_to_make(tmp_path / "made", patience=30):
            pass
    assert not any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads, since Python 3.12
def test_a_forked_child_has_no_part_in_a_turn(tmp_path, caplog):
    """It neither ends its parent's turn nor makes it last."""
    turn, (ready, tell) = ExitStack(), os.pipe()
    turn.enter_context(turn_to_make(tmp_path / "made"))
    child = os.fork()
    if child == 0:
        turn.close()
        os.write(tell, b"!")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        assert (tmp_path / ".made.lock").exists()
        kept._close(*kept._held)  # as if this process died
        with turn_to_make(tmp_path / "made", patience=10):
            pass
        assert not caplog.records
    finally:
        turn.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def test_a_wait_is_told_and_has_an_end(tmp_path, monkeypatch, capfd, caplog):
    """On stderr as all that users wait for the compiler, and not as a warning: nothing is wrong until the wait ends."""
    monkeypatch.setattr(kept, "_TOLD_AFTER", 0.1)
    monkeypatch.delenv("GPUNETIO_QUIET", raising=False)
    with holder(tmp_path / "made"):
        start = time.monotonic()
        with turn_to_make(tmp_path / "made", patience=3):
            assert 3 <= time.monotonic() - start < 30
    told = "gpunetio: compiling made is another process's turn: waiting until it is done\n"
    assert capfd.readouterr().err == told
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "another process has not compiled made within 3 s: this one does"
    ]


def test_the_turn_of_another_file_is_not_waited_for(tmp_path, caplog):
    with holder(tmp_path / "made"), turn_to_make(tmp_path / "other", patience=60):
        pass
    assert caplog.messages == []


@pytest.mark.parametrize("folder", ["missing", "/proc"])
def test_where_nothing_can_be_locked_nobody_waits(tmp_path, folder):
    with turn_to_make(tmp_path / folder / "made", patience=60):
        pass


def test_an_error_ends_the_turn(tmp_path):
    with pytest.raises(ZeroDivisionError), turn_to_make(tmp_path / "made"):
        _ = 1 / 0
    with turn_to_make(tmp_path / "made", patience=60):
        pass
