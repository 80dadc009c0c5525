"""The examples run as they stand, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

# What they say, with numbers of queue pairs left out, in lines that come in any order, and last.
SAID = {
    "completion_epoll": (
        {f"queue {i % 3}: message {i}" for i in range(12)} | {"QP of soft1: QP_ACCESS_ERR"},
        "12 messages on 3 queues, then QP_ACCESS_ERR",
    ),
    "completion_asyncio": (
        {f"client {i}: 10 replies" for i in range(3)},
        "30 right replies of 30",
    ),
}


def run(name: str) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout with warnings as errors, stderr."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return done.returncode, re.sub(r"QP 0x\w+", "QP", done.stdout).splitlines(), done.stderr


@pytest.mark.parametrize("name", SAID)
def test_example(name):
    status, lines, err = run(name)
    assert status == 0, err
    said, last = SAID[name]
    assert said <= set(lines)
    assert lines[-1] == last
    if name == "completion_asyncio":
        assert any(line.startswith("server: SRQ_LIMIT_REACHED, ") for line in lines)


def test_all_are_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAID)
