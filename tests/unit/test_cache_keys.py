"""Compiled code is found again only where all that decides what is in it is the same: each changes once."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
import pytest

from gpunetio.device import device_function
from gpunetio.jit import frozen, roots
from gpunetio.jit.arguments import kind_and_words
from gpunetio.jit.compile import DeviceFunction, engine_function
from gpunetio.jit.kinds import FLOAT32, FLOAT64, INT, ArrayType, TupleType
from gpunetio.jit.prebuilt import here

SOURCES = ("compile.py", "lower.py", "ops/atomics.py")


@device_function
def double(x):
    return x + x


@device_function
def treble(x):
    return x + x + x


def name(
    function: DeviceFunction = double, kinds: tuple[Any, ...] = (INT,), widths: tuple[int, ...] = (), **target: str
) -> str:
    """The name of a root's file."""
    return roots.name_of(function, kinds, widths, replace(here(), **target).key())


def test_each_part_of_the_name(monkeypatch):
    """The function, the types of its arguments, C's widths, the target, and whether indices are checked."""
    array = ArrayType("int64", 1, True)
    kinds = (
        FLOAT64, FLOAT32, array, ArrayType("int32", 1, True), ArrayType("int64", 2, True),
        ArrayType("int64", 1, False), TupleType((INT,)), TupleType((INT, INT)), TupleType((INT,), ("x",)),
    )
    names = [
        name(), name(treble), *(name(kinds=(kind,)) for kind in kinds), name(widths=(32,)), name(widths=(64,)),
        name(triple="riscv64-linux"), name(cpu="other"), name(features="+other"),
        name(engine_function(double.py_func)),  # which LLVM need not inline
        name(DeviceFunction(double.py_func, inlined=True, takes_integers=True)),
    ]
    monkeypatch.setenv(roots.CHECKS_BOUNDS, "1")
    names.append(name())
    assert len(set(names)) == len(names)
    monkeypatch.delenv(roots.CHECKS_BOUNDS)
    assert name() == names[0]


def test_the_name_says_whose_it_is():
    assert name().startswith("double-")
    assert name().endswith(".o")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1.0, np.float32(1)), ((1, 2), (1, 2.0)), (np.zeros(4), np.zeros(8)[::2]),
        (np.zeros(4), np.zeros((2, 2))),
    ],
)
def test_arguments_of_other_types_have_other_names(one, other):
    kinds = [kind_and_words("x", value)[0] for value in (one, other)]
    assert kinds[0] != kinds[1]
    assert name(kinds=(kinds[0],)) != name(kinds=(kinds[1],))


@pytest.mark.parametrize(("one", "other"), [(1, 2), (np.zeros(4), np.ones(5)), ((1, 2), (3, 4)), (1, True)])
def test_values_of_arguments_are_not_in_the_name(one, other):
    first, second = (name(kinds=(kind_and_words("x", value)[0],)) for value in (one, other))
    assert first == second


# --- the compiler ----------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A compiler of a few files."""
    for source in (*(f"jit/{one}" for one in SOURCES), "nic/host/engine.py"):
        (tmp_path / source).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / source).write_text(f"# {source}\n")
    monkeypatch.setattr(frozen, "PACKAGE", tmp_path)
    return tmp_path


def stamp() -> str:
    """The compiler's, as a new process finds it."""
    return frozen.compiler_stamp.__wrapped__()


@pytest.mark.parametrize("source", [*(f"jit/{one}" for one in SOURCES), "nic/host/engine.py"])
def test_each_source_of_the_compiler_is_in_the_stamp(package, source):
    """And no other: what they compile is followed function by function."""
    before = stamp()
    (package / source).write_text("# changed\n")
    assert (stamp() == before) is (source == "nic/host/engine.py")


def test_a_source_that_is_added_or_moved_is_in_the_stamp(package):
    stamps = [stamp()]
    (package / "jit" / "more.py").write_text("# more\n")
    stamps.append(stamp())
    (package / "jit" / "more.py").rename(package / "jit" / "less.py")
    stamps.append(stamp())
    assert len(set(stamps)) == 3


def test_lines_that_move_from_one_source_to_the_next_are_in_the_stamp(package):
    """Together they are the same bytes."""
    first, second = package / "jit" / "lower.py", package / "jit" / "lower.pyx.py"
    first.write_text("a\nb\n")
    second.write_text("c\n")
    before = stamp()
    first.write_text("a\n")
    second.write_text("b\nc\n")
    assert stamp() != before


def test_llvm_and_python_are_in_the_stamp(monkeypatch):
    before = stamp()
    monkeypatch.setattr(llvmlite, "__version__", "0.1")
    assert stamp() != before
    monkeypatch.undo()
    assert stamp() == before
    monkeypatch.setattr(importlib.import_module("sys").implementation, "cache_tag", "cpython-399")
    assert stamp() != before


def test_the_stamp_is_in_each_name(monkeypatch):
    """Also where the function, and all that it calls, is the same."""
    before = frozen.Frozen(double.py_func).digest
    monkeypatch.setattr(frozen, "compiler_stamp", lambda: "another compiler")
    assert frozen.Frozen(double.py_func).digest != before
