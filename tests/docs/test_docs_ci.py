"""The recipe for CI: its suite and its commands run as they stand."""

import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from packaging.requirements import Requirement

from rdma_core import skip_without_run
from repository import ROOT, environment

PAGE = ROOT / "docs" / "ci.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What installs packages, or tells the CI service something, is not run: commands that begin with these words.
NOT_RUN = ("apt-get", "python3 -m venv", "/ci/venv/bin/pip", "echo")
LIMIT = 100

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


def blocks(language: str) -> list[str]:
    return [code for name, code in FENCED.findall(PAGE.read_text()) if name == language]


def workflow() -> str:
    (text,) = blocks("yaml")
    return text


def commands_of_the_workflow() -> list[str]:
    """The commands of all steps, in order."""
    found = re.findall(r"^( +)run: (\|\n(?:\1 +.*\n)+|.*\n)", workflow(), re.MULTILINE)
    return [line for _, run in found for line in textwrap.dedent(run.removeprefix("|\n")).splitlines()]


@pytest.fixture
def project(tmp_path):
    """A user's project with the suite of the page, and `run` for a command in its folder."""
    (suite,) = blocks("python")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_put.py").write_text(suite)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ()), ("gpunetio", ("-m", "gpunetio"))):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
        script.chmod(0o755)
    env = environment(CUDA_VISIBLE_DEVICES="", PYTEST_ADDOPTS="-p no:xdist -p no:cacheprovider")
    env["PATH"] = f"{programs}:{env['PATH']}"

    def run(command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_the_workflow_has_these_commands():
    """So that none is left out by mistake."""
    first = [command.split()[0] for command in commands_of_the_workflow()]
    assert first == ["apt-get"] * 2 + ["python3", "/ci/venv/bin/pip", "echo", "echo"] + ["gpunetio", "mkdir"] + [
        "gpunetio"
    ] * 2


def test_the_package_is_installed_from_where_it_is():
    """No package index has it."""
    (install,) = [command for command in commands_of_the_workflow() if command.startswith("/ci/venv/bin/pip install")]
    (source,) = re.findall(r"GPUNETIO: (\S+)", workflow())
    wanted = [Requirement(word.replace("$GPUNETIO", source)) for word in shlex.split(install)[2:]]
    assert {one.name: one.url for one in wanted} == {"gpunetio": source, "pytest": None}
    assert source.startswith("git+https://")


@pytest.mark.slow
def test_the_commands_under_the_suite(project):
    (text,) = blocks("sh")
    passed = []
    for command in text.splitlines():
        if command.startswith("gpunetio run"):
            skip_without_run()
        passed += re.findall(r"(\d+) passed", project(command))
    assert passed in (["4", "4", "5"], ["4", "4", "4"])


@pytest.mark.slow
def test_the_workflow(project, tmp_path):
    skip_without_run()
    said = [project(command) for command in commands_of_the_workflow() if not command.startswith(NOT_RUN)]
    assert "ready: the NIC" in said[0]
    assert re.search(r"[45] passed", said[2])
    assert [path.name for path in (tmp_path / "artefacts").iterdir()] == ["doctor.txt"]


def test_folders_and_options_agree():
    """Cached, written and uploaded folders are the same."""
    text = workflow()
    assert re.findall(r"XDG_CACHE_HOME: (\S+)", text) == re.findall(r"^ +path: (/\S+)$", text, re.MULTILINE)
    (made,) = re.findall(r"mkdir -p (.*)", text)
    uploaded = re.findall(r"path: \|\n((?: +\w+\n)+)", text)[0].split()
    assert made.split() == uploaded
