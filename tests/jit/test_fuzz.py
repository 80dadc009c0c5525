"""Broken programs are refused in words, or compile: no traceback of the compiler, and no abort of LLVM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from repository import RIGS, environment


@pytest.mark.parametrize("count", [
    pytest.param(150, id="some"),
    pytest.param(6_000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
])
def test_broken_programs(count: int) -> None:
    ran = subprocess.run(
        [sys.executable, RIGS / "fuzz_code.py", str(count), "7"], env=environment(), text=True, capture_output=True,
        timeout=800, check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    outcomes = {line.split(maxsplit=1)[1] for line in ran.stdout.splitlines()}
    assert outcomes == {"refused", "compiled"}, ran.stdout
