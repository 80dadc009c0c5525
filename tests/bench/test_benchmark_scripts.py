"""The scripts of benchmarks/ agree with the package that they measure."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT, environment

FOLDER = ROOT / "benchmarks"
IMPORT = "import importlib, sys; sys.path.insert(0, sys.argv[1]); [*map(importlib.import_module, sys.argv[2:])]"
COMPILE = "import sys; sys.path.insert(0, sys.argv[1]); import engine; engine.build_peer(sys.argv[2])"


def run(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", program, str(FOLDER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_they_find_what_they_import() -> None:
    names = [path.stem for path in sorted(FOLDER.glob("*.py"))]
    assert len(names) > 15
    run(IMPORT, *names)


@pytest.mark.slow
def test_the_peer_of_the_engine_has_its_structures(tmp_path: Path) -> None:
    """It is C++, made from the declarations of formats and of the NIC's state."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    run(COMPILE, str(tmp_path))
