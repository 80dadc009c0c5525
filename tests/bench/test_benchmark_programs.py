"""The programs in benchmarks/ start: what they import from the library is there."""

import subprocess
import sys

import pytest

from repository import ROOT

FILES = sorted((ROOT / "benchmarks").glob("*.py"))
PROGRAMS = [path for path in FILES if "import argparse" in path.read_text()]  # the others are modules of these


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_starts(program):
    ran = subprocess.run(
        [sys.executable, program, "--help"], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "--json" in ran.stdout
