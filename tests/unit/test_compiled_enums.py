"""Members of enumerations are int64 constants in compiled code, so no module keeps copies of them as plain integers."""

import ast
import importlib
from collections.abc import Iterator
from enum import Enum, EnumMeta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gpunetio
from compiled import reached
from gpunetio import device
from gpunetio.device import device_function, kernel
from gpunetio.enums import Access
from gpunetio.formats.commands import QpState
from gpunetio.formats.wqe import CtrlFlags
from gpunetio.jit.compile import DeviceFunction
from gpunetio.jit.cubin import ptx_of
from gpunetio.jit.kinds import INT
from gpunetio.jit.ops import st64
from gpunetio.jit.values import CompileError, kind_of, of_python
from gpunetio.nic.state.qp import QP_ROW
from gpunetio.nic.state.reasons import Reason
from pair import run_on

PACKAGE = Path(gpunetio.__file__).parent
PUBLIC = set(device.__all__)  # its constants are for kernels of programs, like macros of the original


@device_function
def twice(value):
    return value + value


@kernel
def members(state, out):
    """Members of an IntEnum and of an IntFlag: together, negated, as arguments, as one of two values."""
    right = Access.REMOTE_WRITE if state == QpState.RTS else QpState.ERR
    st64(out, right)
    st64(out + 8, -Reason.RNR)
    st64(out + 16, twice(QpState.RTS) | twice(CtrlFlags.SOLICITED) | twice(QP_ROW.qpn))


EXPECTED = [int(Access.REMOTE_WRITE), -int(Reason.RNR), 2 * QpState.RTS | 2 * int(CtrlFlags.SOLICITED) | 2 * QP_ROW.qpn]


def test_members_are_integers(gpu):
    assert run_on(gpu, members, int(QpState.RTS), count=3) == EXPECTED


def test_members_add_no_specialisations():
    """Three calls, with a member of each kind and an offset, are of one function for integers."""
    assert reached(members.code["cpu"].body).count(twice) == 1


def test_members_are_constants_on_a_gpu():
    ptx, _ = ptx_of(members, (INT, INT), (9, 0))
    assert f", {EXPECTED[2]};" in ptx
    assert f", {EXPECTED[1]};" in ptx


class Colour(Enum):
    RED = "red"
    GREEN = 3


@device_function
def mixed(x):
    return x + Colour.GREEN


@device_function
def wrong(x):
    return x + Colour.RED


def test_members_that_are_no_integers():
    """Of an Enum, those whose value is an integer are; in arithmetic, others are refused."""
    assert mixed(1) == 4
    with pytest.raises(CompileError, match=r"Colour\.RED"):
        wrong(1)


def modules() -> Iterator[tuple[Path, ModuleType]]:
    """The package's modules that have compiled functions."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "_function" in path.read_text("utf-8"):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            yield path, importlib.import_module(name)


def test_all_enumerations_in_compiled_code_have_integers():
    """In whichever module they are declared."""
    found = set()
    for _, module in modules():
        for value in vars(module).values():
            if isinstance(value, DeviceFunction):
                named = [value.py_func.__globals__.get(name) for name in value.py_func.__code__.co_names]
                found |= {enumeration for enumeration in named if isinstance(enumeration, EnumMeta)}
    assert len(found) > 10
    for enumeration in found:
        for member in enumeration:
            assert kind_of(of_python(member)) is INT, member


def copies(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    """The names at the top of a module that are a member of an enumeration or its int, alone or in a list of names."""
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for name, value in zip(names, values, strict=False):
            match value:
                case ast.Attribute(ast.Name(owner)) | ast.Call(ast.Name("int"), [ast.Attribute(ast.Name(owner))]):
                    if isinstance(getattr(module, owner, None), EnumMeta):
                        yield name


def test_no_copies_of_members():
    found = {}
    for path, module in modules():
        names = set(copies(ast.parse(path.read_text("utf-8")), module)) - PUBLIC
        if names:
            found[str(path.relative_to(PACKAGE))] = sorted(names)
    assert not found, "write Enumeration.MEMBER where it is used; compiled code folds it"


def test_copies_are_found():
    source = "_A = int(QpState.RTS)\n_B, C = int(QpState.ERR), 4\nD = int('4')\nE = QpState.RTS\nF = int(os.path)\n"
    module: Any = ModuleType("module")
    module.QpState = QpState
    assert list(copies(ast.parse(source), module)) == ["_A", "_B", "E"]
