"""The settings of the suite itself, in pytest processes of their own."""

import subprocess
import sys

import pytest

from repository import ROOT, environment

# What pytest-benchmark 5.1.0 says at its start beside pytest-xdist (its session.py).
BENCHMARK = "Benchmarks are automatically disabled because xdist plugin is active."


@pytest.mark.parametrize(("text", "status"), [(BENCHMARK, 0), ("anything else", 3)])
def test_a_plugin_that_warns_at_its_start(tmp_path, text, status):
    """Warnings are errors, but for that one. 3: pytest ends with an internal error."""
    (tmp_path / "warns.py").write_text(
        f"import warnings\n\ndef pytest_configure(config):\n    warnings.warn({text!r}, UserWarning)\n"
    )
    paths = environment()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "warns", "-p", "no:cacheprovider", "--collect-only", "-q", "-n0",
         "tests/unit/test_limits.py"],
        cwd=ROOT, env=paths | {"PYTHONPATH": f"{tmp_path}:{paths['PYTHONPATH']}"}, capture_output=True, text=True,
        timeout=100, check=False,
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
