"""Memory that goes away under a region: the process ends, and says which region it was."""

import re
import signal
import subprocess
import sys

import pytest

import gpunetio as gn
from gpunetio.nic.host import helping
from repository import RIGS

pytestmark = pytest.mark.soft_nic


def killed(what: str, handler: str) -> tuple[int, str, str]:
    """The signal that has ended the child, and what it has said on stdout and stderr."""
    gn.open("soft0").close(), helping.address()  # compiled here, if it must be: the child has a deadline
    child = subprocess.run(
        [sys.executable, RIGS / "lost_memory_child.py", what, handler],
        capture_output=True, text=True, timeout=100, check=False,
    )
    assert child.returncode < 0, child.stderr[-2000:]
    return -child.returncode, child.stdout, child.stderr


@pytest.mark.parametrize(
    ("what", "handler", "number"),
    [("munmap", "none", signal.SIGSEGV), pytest.param("truncate", "none", signal.SIGBUS, marks=pytest.mark.slow),
     pytest.param("munmap", "before", signal.SIGSEGV, marks=pytest.mark.slow), ("truncate", "after", signal.SIGBUS),
     ("helped", "none", signal.SIGSEGV)],
)
def test_the_region_is_named(what, handler, number):
    """And faulthandler has its say, whether it was enabled before the NIC was opened or after.

    `helped`: a thread of the program makes the turn.
    """
    how, out, said = killed(what, handler)
    assert how == number
    key, address = out.split()
    assert re.findall(r"^gpunetio: .*", said, re.MULTILINE) == [
        (
            f"gpunetio: soft0 found no memory at {address}: MR {key} [{address}, +0x0000000000003000) was unmapped, or "
            "its file truncated, while it was registered. Close an MR before you free its memory."
        )
    ]
    assert said.count("Fatal Python error") == (handler != "none")


@pytest.mark.parametrize(("what", "handler"), [
    *(pytest.param("elsewhere", handler, marks=pytest.mark.slow) for handler in ("none", "before", "after")),
    ("sent", "none"), pytest.param("closed", "before", marks=pytest.mark.slow),
])
def test_other_faults_are_others(what, handler):
    """Of another thread beside an engine, by kill(), or when no engine is left."""
    how, _, said = killed(what, handler)
    assert how == signal.SIGSEGV
    assert "gpunetio:" not in said
    assert said.count("Fatal Python error") == (handler != "none")
