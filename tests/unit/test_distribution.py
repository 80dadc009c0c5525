"""What is distributed: an sdist, and a wheel made from it that runs in an environment of its own."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import gpunetio
from repository import ROOT

PACKAGE = ROOT / "src" / "gpunetio"
pytest.importorskip("build", reason="needs build (extra 'dev')")
pytest.importorskip("hatchling", reason="needs hatchling (dependency group 'build')")


def run(*command: object, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, timeout=timeout, env=environment
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the sdist, as `python -m build` makes it."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob(f"gpunetio-{gpunetio.__version__}-*.whl")
    return made


def test_citation_and_changelog_have_the_version():
    """The package has it, and the wheel takes it from there."""
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert (citation["version"], citation["license"]) == (gpunetio.__version__, project["license"])
    assert f"\n## {gpunetio.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_wheel_has_the_whole_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("gpunetio/")}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        scripts = ConfigParser()
        scripts.read_string(archive.read(entry_points).decode())
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {str(path.relative_to(PACKAGE.parent)) for path in files}
    assert {"gpunetio/py.typed", "gpunetio/device/__init__.pyi"} <= packed
    assert dict(scripts["console_scripts"]) == {"gpunetio": "gpunetio.cli:main"}


NO_INDEX = r"No matching distribution|NewConnectionError|Could not fetch|connection|timed out|Name or service not known"


def install(python: Path, *what: object) -> None:
    """With the bare environment's own pip; skips the test where no index answers."""
    done = run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what, cwd=ROOT, timeout=400)
    if done.returncode != 0 and re.search(NO_INDEX, done.stderr, re.IGNORECASE):
        pytest.skip(f"no package index answers: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_runs_in_a_bare_environment(wheel, tmp_path):
    """The wheel, and then the checkout, as `pip install .` takes it."""
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    command = python.parent / "gpunetio"
    install(python, "--require-hashes", "-r", ROOT / "requirements.txt")
    for what in (wheel, ROOT):
        install(python, "--no-deps", "--force-reinstall", what)
        checked = run(python, "-m", "pip", "check", cwd=tmp_path)
        assert checked.returncode == 0, checked.stdout
        where = run(python, "-W", "error", "-c", "import gpunetio; print(gpunetio.__file__)", cwd=tmp_path)
        assert Path(where.stdout.strip()).is_relative_to(tmp_path), where.stderr
        version = run(command, "--version", cwd=tmp_path)
        assert version.returncode == 0, version.stderr
    devices = run(command, "devices", cwd=tmp_path, timeout=1000)  # compiles the NIC
    assert devices.returncode == 0, devices.stderr
    assert "soft0" in devices.stdout
