"""Holds that no module of gpunetio uses what another one keeps to itself: names that begin with an underscore.

A class may use the private names of its base classes, wherever they are: `self._undo`. Private names of others, such as
llvmlite's, count only where one of our modules has the same name and the object may be ours; `FOREIGN` lists what is
not.
"""

import ast
from collections.abc import Iterator, Mapping

import pytest

from repository import ROOT

SOURCE = ROOT / "src" / "gpunetio"
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # not private
FOREIGN = {
    ("providers/mlx5/libraries.py", "self._library._handle"),  # ctypes.CDLL
    ("providers/sdk/libraries.py", "library._name"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module gives to classes, functions, variables and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(node: ast.expr) -> bool:
    """Return whether an expression is the object whose method this is, or its class, or what its bases have."""
    if isinstance(node, ast.Call):
        return is_name_of(node.func, "super") and not node.args
    return is_name_of(node, "self", "cls")


def is_name_of(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def used_in(tree: ast.AST) -> Iterator[tuple[int, str, str | ast.AST]]:
    """Yield (line, name, expression) for each name of an import or another object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("gpunetio")):
            yield from ((node.lineno, alias.name, f"import {alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and not is_own(node.value):
            yield node.lineno, node.attr, node
        elif isinstance(node, ast.Call) and is_name_of(node.func, "getattr", "setattr", "hasattr", "delattr"):
            if isinstance(name := node.args[1], ast.Constant) and not is_own(node.args[0]):
                yield node.lineno, str(name.value), node


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Say who uses what another module keeps to itself. `sources` are texts by path in the package."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = {path: set(filter(is_private, defined_in(tree))) for path, tree in trees.items()}
    ours = set().union(*own.values())
    found = [
        (path, line, used if isinstance(used, str) else ast.unparse(used))
        for path, tree in trees.items()
        for line, name, used in used_in(tree)
        if name in ours and name not in own[path]
    ]
    return [
        f"{path}:{line}: {expression} is private to another module"
        for path, line, expression in found if (path, expression) not in FOREIGN
    ]


def test_nobody_uses_what_another_module_keeps_to_itself() -> None:
    sources = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    assert len(sources) > 300
    found = complaints(sources)
    assert not found, "\n".join(found)
    assert all(expression in ast.unparse(ast.parse(sources[path])) for path, expression in FOREIGN)


@pytest.mark.parametrize("use", [
    "from .owner import _name", "from gpunetio.owner import Owner, _name", "from . import owner\nowner._name()",
    "def f(one):\n    return one._place", "def f(one):\n    one._place = 3",
    "class A:\n    def f(self): self.one._place", "def f(one):\n    return getattr(one, '_place', None)",
])
def test_a_use_is_seen(use: str) -> None:
    owner = "def _name(): ...\nclass Owner:\n    def __init__(self):\n        self._place = 1"
    assert len(complaints({"owner.py": owner, "user.py": use})) == 1


@pytest.mark.parametrize("use", [
    "class Heir(Owner):\n    def f(self): return self._place + super()._place",
    "class A:\n    def __init__(self): self._place = 2\n    def same(self, other): return self._place == other._place",
    "from llvmlite import _name", "def f(row): return row._replace(x=1)", "def f(one): return one.__class__",
])
def test_what_is_ones_own_or_a_strangers_passes(use: str) -> None:
    owner = "class Owner:\n    def __init__(self):\n        self._place = 1"
    assert complaints({"owner.py": owner, "user.py": use}) == []
