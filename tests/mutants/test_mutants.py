"""The mutants of `make mutants` fit the tree, and name tests that are there."""

import re

import pytest

import packages
from imported import sources_of
from packages import LOOSE, PACKAGE, PACKAGES, files_of, modules_of
from patches import ROOT, read_all

PATCHES = read_all()


def test_there_are_thirty():
    assert len(PATCHES) == 30
    assert len({patch.hunks for patch in PATCHES}) == 30


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_fits(patch):
    source = (ROOT / patch.path).read_text()
    mutated = patch.applied(source)
    assert mutated != source
    compile(mutated, patch.path, "exec")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_tests_that_notice_are_there(patch):
    file, option, expression, *_ = patch.tests
    assert option == "-k"
    names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    for part in expression.split(" or "):
        assert any(part in name for name in names), part


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tests_of_a_package_are_there(package):
    assert modules_of(package)
    assert [pattern for pattern in PACKAGES[package] if not files_of(pattern)] == []
    first = {packages.tests_of(package, module)[0] for module in modules_of(package)}
    assert all((ROOT / file).is_file() for file in first)


def test_every_package_is_mutated():
    folders = {init.parent.name for init in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert set(PACKAGES) == folders | {LOOSE}
    assert sum(map(len, map(modules_of, PACKAGES))) == len(list((ROOT / PACKAGE).rglob("*.py")))


def test_every_folder_of_tests_takes_part():
    """All but those of this folder, and those that need foreign programs."""
    used = {file for package in PACKAGES for pattern in PACKAGES[package] for file in files_of(pattern)}
    folders = {file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - {file.parent.name for file in used} == {"interop", "mutants"}


def test_what_the_engine_is_compiled_from():
    """Modules that it imports, directly or not, and no others."""
    package = ROOT / PACKAGE
    found = {path.relative_to(package).as_posix() for path in sources_of(package / "nic" / "host" / "engine.py")}
    assert {"nic/host/engine.py", "nic/turn/step.py", "formats/wqe.py", "jit/ops/__init__.py"} <= found
    assert not {"verbs/qp.py", "cli/warm.py", "device/onesided.py"} & found
