"""Compiled code is found again only where all that decides what is in it is the same: each changes once."""

from pathlib import Path
from typing import Any

import llvmlite
import numba
import pytest
from numba import types
from numba.core.registry import cpu_target

from gpunetio.device import device_function
from gpunetio.jit import stamps
from gpunetio.jit.cache import Cache
from gpunetio.jit.units import _PartCache

SOURCES = {
    "own.py": "from .one import a\nfrom .folder import (\n    b,\n    two,\n)\nfrom . import three\n",
    "one.py": "def load():\n    from .later import c\n", "later.py": "", "folder/__init__.py": "", "folder/two.py": "",
    "three.py": "", "stranger.py": "",
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def stamp(package: Path) -> str:
    """The stamp of own.py, as a new process finds it."""
    for remembered in (stamps._files, stamps._read, stamps._sources_of):
        remembered.cache_clear()
    return stamps.stamp_of.__wrapped__(str(package / "own.py"))


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_is_in_the_stamp(package, source):
    """Its own, those that it imports in any way, and those that they import; no other."""
    before = stamp(package)
    (package / source).write_text(SOURCES[source] + "# changed\n")
    assert (stamp(package) == before) is (source == "stranger.py")


@pytest.mark.parametrize("compiler", [numba, llvmlite])
def test_each_compiler_is_in_the_stamp(package, monkeypatch, compiler):
    before = stamp(package)
    monkeypatch.setattr(compiler, "__version__", "0.1")
    assert stamp(package) != before


def test_a_source_that_moves_from_one_module_to_another_is_in_the_stamp(package):
    """All are hashed one by one: together they are the same bytes."""
    (package / "one.py").write_text(SOURCES["one.py"] + "#")
    before = stamp(package)
    (package / "one.py").write_text(SOURCES["one.py"])
    (package / "three.py").write_text(SOURCES["three.py"] + "#")
    assert stamp(package) != before


@device_function
def double(x):
    return x + x


class _Codegen:
    """A code generator for another machine."""

    def __init__(self, *target: str):
        self._target = target

    def magic_tuple(self) -> tuple[str, ...]:
        """Return what names the target."""
        return self._target


def test_each_part_of_the_target_is_in_the_key():
    """As are the types, the bytecode, and whether it is a part that is linked into others or what Python calls."""
    compiler: Any = cpu_target.target_context
    here = compiler.codegen().magic_tuple()
    cache: Any = Cache(double.py_func, "stamp")
    wide, narrow = (types.int64,), (types.int32,)
    keys = [
        cache._index_key(wide, compiler.codegen()), cache._index_key(narrow, compiler.codegen()),
        *(cache._index_key(wide, _Codegen(*here[:at], "other", *here[at + 1 :])) for at in range(len(here))),
        _PartCache(double.py_func, "stamp")._index_key(wide, compiler.codegen()),
        Cache(lambda x: x * x, "stamp")._index_key(wide, compiler.codegen()),
    ]  # fmt: skip
    assert len(here) == 3  # triple, processor, features
    assert len(set(keys)) == len(keys)


def test_another_stamp_finds_nothing(tmp_path, monkeypatch):
    """Also where files have the same names."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    compiler: Any = cpu_target.target_context
    Cache(double.py_func, "one").save_overload((types.int64,), _compiled())
    for stamp, found in (("one", True), ("two", False)):
        cache: Any = Cache(double.py_func, stamp)
        assert (cache.load_overload((types.int64,), compiler) is not None) is found
        cache.end_turn()


def _compiled() -> Any:
    function: Any = double
    function.compile((types.int64,))
    return function.overloads[(types.int64,)]
