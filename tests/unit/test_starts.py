"""What a program does not wait for: modules that it does not need are not loaded."""

import subprocess
import sys

import pytest

from gpunetio import verbs
from repository import environment

MATHS = "gpunetio.jit.libdevice"  # CUDA's, which only some kernels need


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        pytest.param("import gpunetio", "llvmlite", id="the package"),
        pytest.param("import gpunetio.cli", "llvmlite", id="commands"),
        pytest.param("import gpunetio.uverbs.environment", "llvmlite", id="what starts programs of libibverbs"),
        pytest.param("from gpunetio import verbs; verbs.open('soft0').close()", MATHS, id="a NIC opened before"),
    ],
)
def test_modules_that_are_not_loaded(opened_before, program, absent):
    code = f"{program}\nimport sys\nsys.exit({absent!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=100, check=False)
    assert done.returncode == 0


@pytest.fixture(scope="module")
def opened_before():
    verbs.open("soft0").close()
