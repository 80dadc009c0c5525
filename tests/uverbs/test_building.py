"""The library that stands in for the kernel is compiled once, and what is missing is told."""

import shutil
from pathlib import Path

import pytest

from gpunetio.errors import InitializationError, NotSupportedError
from gpunetio.uverbs import building, environment
from stand_in.building import compiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpunetio"


def test_it_is_compiled_once(cache, monkeypatch):
    if compiler() is None:
        pytest.skip("no C compiler")
    made = building.library()
    assert made.parent == cache
    assert list(cache.iterdir()) == [made]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert building.library() == made


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotSupportedError, match="there is no C compiler: install one"):
        building.library()
    assert not cache.exists()


def test_a_compiler_that_fails(cache, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(InitializationError, match=r"false cannot compile preload\.c: "):
        building.library()
    assert list(cache.iterdir()) == []


def test_a_python_without_a_shared_library(monkeypatch):
    monkeypatch.setattr(environment.sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(NotSupportedError, match="has no shared library, by which a program gets its NICs: on Debian"):
        environment._libpython()
