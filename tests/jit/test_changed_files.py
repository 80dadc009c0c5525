"""A file that is edited while the program runs: what is compiled is what Python has imported, or nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gpunetio.jit.values import CompileError

TEXT = """
from gpunetio.device import device_function

@device_function
def first(x):
    return x + 1

@device_function
def second(x):
    return first(x) * 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "edited.py"
    file.write_text(TEXT)
    return file


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("edit", ["# a comment\n\n\n{}", "{}# behind\n", "{}\nprint('never')\n"])
def test_what_has_not_changed_is_found_where_it_is(file: Path, edit: str) -> None:
    module = imported(file)
    file.write_text(edit.format(TEXT))
    assert module.second(4) == 50


@pytest.mark.parametrize("old, new", [
    ("x + 1", "x - 1"), ("x + 1", "x + 2"), ("def first", "def other"), ("first(x) * 10", "(("),
])
def test_what_has_changed_is_not_compiled(file: Path, old: str, new: str) -> None:
    """It would be kept under the name of what was imported, and the next program would load it."""
    module = imported(file)
    file.write_text(TEXT.replace(old, new))
    with pytest.raises(CompileError, match=r"has changed since first\(\) was imported, and it is another function now"):
        module.first(4)


def test_a_file_that_is_gone(file: Path) -> None:
    module = imported(file)
    file.unlink()
    with pytest.raises(CompileError, match=r"has changed since first\(\) was imported"):
        module.first(4)


def test_a_program_without_a_file() -> None:
    names: dict = {}
    exec("from gpunetio.device import device_function\n\n@device_function\ndef first(x):\n    return x\n", names)
    with pytest.raises(CompileError, match=r"first\(\) has no source: the compiler reads the file in which a function"):
        names["first"](4)
