"""docs/debugging.md is true: its programs run, and gdb shows the stack that it shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nic_rig import until
from repository import ROOT, environment

PAGE = (ROOT / "docs" / "debugging.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.host_memory


@pytest.mark.parametrize("code", PROGRAMS, ids=lambda code: re.findall(r"def (\w+)", code)[-1])
def test_a_program_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code)
    subprocess.run([sys.executable, tmp_path / "program.py"], env=environment(), timeout=100, check=True)


@pytest.mark.slow
def test_the_stack_of_gdb(tmp_path: Path) -> None:
    """Where the thread is in the inner function. Sometimes it is in the outer one."""
    if shutil.which("gdb") is None:
        pytest.skip("needs gdb")
    shown = re.findall(r"^#\d  \w+ \(\) at program\.py:\d+$", PAGE, re.MULTILINE)
    assert len(shown) == 2
    (code,) = (code for code in PROGRAMS if "wait_for_word" in code)
    file, launched = tmp_path / "program.py", tmp_path / "launched"
    wait = "    launch.wait(1.0)\n"
    assert wait in code
    file.write_text(code.replace(wait, f"    open({str(launched)!r}, 'w').close()\n    launch.wait(60.0)\n"))
    program = subprocess.Popen([sys.executable, file], env=environment())

    def is_there() -> bool:
        ran = subprocess.run(
            ["gdb", "--batch", "-p", str(program.pid), "-ex", "thread apply all backtrace 2"],
            capture_output=True, text=True, timeout=100, check=False,
        )
        if "Operation not permitted" in ran.stderr:
            pytest.skip("gdb may not attach to processes here")
        return "\n".join(shown) in ran.stdout.replace(f"{tmp_path}/", "")

    try:
        until(launched.exists, "the launch", 60)
        until(is_there, "the stack", 60)
    finally:
        program.kill()
        program.wait()


def test_a_breakpoint_stops_interpreted_code(tmp_path: Path) -> None:
    """And compiled code refuses it, in words."""
    file = tmp_path / "program.py"
    file.write_text(
        "from gpunetio import device_function\n"
        "@device_function\n"
        "def doubled(value):\n"
        "    breakpoint()\n"
        "    return 2 * value\n"
        "print(doubled.interpret(21))\n"
        "doubled(21)\n"
    )
    ran = subprocess.run(
        [sys.executable, file], env=environment(), input="p value + 1\nc\n", capture_output=True, text=True,
        timeout=100, check=False,
    )
    assert "-> return 2 * value" in ran.stdout
    assert "(Pdb) 22" in ran.stdout
    assert "42" in ran.stdout.splitlines()[-1]
    assert "compiled code cannot call" in ran.stderr
