"""Kernels on the host that access addresses where no memory is: the launch fails, and the process goes on."""

import platform
import re
import signal
import subprocess
import sys

import pytest

import gpunetio as gn
from repository import RIGS, environment

CHILD = RIGS / "wild_kernel_child.py"

pytestmark = [
    pytest.mark.soft_nic,
    pytest.mark.host_memory,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no such registers are known"),
]


def line_of(kernel: str) -> int:
    """Of the kernel's decorator, where its code begins."""
    lines = CHILD.read_text().splitlines()
    return next(n for n, line in enumerate(lines) if line.startswith(f"def {kernel}("))


@pytest.mark.parametrize("handler", ["none", pytest.param("before", marks=pytest.mark.slow), "after"])
def test_the_launch_fails_and_the_process_goes_on(handler):
    """Each error names the kernel, its line, the thread and the address. faulthandler sees the first fault
    if it was enabled later."""
    gn.open("soft0").close()  # compiled here, if it must be: the child has a deadline
    child = subprocess.run(
        [sys.executable, CHILD, handler], capture_output=True, text=True, timeout=100, check=False,
        env=environment(PYTHONPATH=str(RIGS)),
    )
    assert child.returncode == 0, child.stderr[-3000:]
    page, *said = child.stdout.splitlines()
    no_memory = ", where it has no memory, or no right to it"
    nowhere = "an address that no memory can have" if platform.machine() == "x86_64" else f"{1 << 62:#x}{no_memory}"

    def error(kernel: str, threads: int, thread: int, accessed: str) -> str:
        return (
            f"DriverError: kernel {kernel}[1, {threads}] on the host: thread {thread} of block 0 accessed {accessed}. "
            f"Check the addresses that {kernel} ({CHILD}, line {line_of(kernel)}) gets and computes, and close the "
            "queues that it has used"
        )
    assert said == [
        "store True",
        error("store", 4, 2, f"0x0{no_memory}"), "[1, 2, 0, 4]",
        error("load", 1, 0, f"0x123456{no_memory}"),
        error("load", 1, 0, nowhere),
        error("store", 1, 0, page + no_memory), "load True",
        error("meet", 2, 1, f"0x0{no_memory}"),
        "[0] True",
    ]
    assert len(re.findall("Fatal Python error: Segmentation fault", child.stderr)) == (handler == "after")


ANOTHER = """
import ctypes, os, time
import gpunetio as gn

@gn.kernel
def nothing():
    pass

with gn.Gpu("host") as gpu:
    before = len(os.listdir("/proc/self/task"))
    nothing[1, 64, gpu]().wait(30)
    while len(os.listdir("/proc/self/task")) > before + 1:
        time.sleep(0.01)
    ctypes.string_at(0)
"""


def test_the_fault_of_another_thread_ends_the_process(tmp_path):
    """faulthandler, which was there first, tells where. The kernel's threads are the first to need our handler.

    They have ended: since Python 3.14, it tells nothing while a thread is being freed.
    """
    (tmp_path / "another.py").write_text(ANOTHER)
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "another.py"], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, timeout=100, check=False,
    )
    assert ran.returncode == -signal.SIGSEGV
    assert ran.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "string_at" in ran.stderr
