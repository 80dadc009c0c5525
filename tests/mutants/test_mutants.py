"""The mutants of `make mutants` fit the tree, and name tests that are there."""

import re

import pytest

from patches import ROOT, read_all
from run import PACKAGE, PYTHON, files_of

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


@pytest.mark.parametrize("package", PYTHON)
def test_the_tests_of_a_package_are_there(package):
    assert (ROOT / PACKAGE / package).is_dir()
    assert [pattern for pattern in PYTHON[package] if not files_of(pattern)] == []
