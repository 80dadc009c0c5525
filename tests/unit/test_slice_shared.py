"""Rows that a slice has cached are in a block's shared memory, which operations on global memory do not reach.

On a CPU nobody notices. On a GPU, the kernel ends with an error, and the NIC with it.
"""

import ast
from collections.abc import Iterator

import pytest

from repository import ROOT

SOURCE = ROOT / "src" / "gpunetio"
SHARED = "shared"  # the name that engine functions give to the address of a SLICE_SHARED


def global_only() -> set[str]:
    """The operations whose PTX says that the address is one of global memory."""
    names = set()
    for path in (SOURCE / "jit" / "ops").glob("*.py"):
        body = ast.parse(path.read_text()).body
        phrases = {".global"}
        for node in body:
            text = ast.unparse(node)
            if not any(phrase in text for phrase in phrases):
                continue
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                phrases.add(node.targets[0].id)
    return names


def leftmost(node: ast.expr) -> str:
    """The name with which a sum begins."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.id if isinstance(node, ast.Name) else ""


def mistakes(source: str, operations: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in operations:
            if any(leftmost(argument) == SHARED for argument in node.args[:1]):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nothing_in_shared_memory_is_taken_for_global_memory():
    operations = global_only()
    assert {"ld_relaxed64", "st_release64", "fetch_add_gpu64", "exchange64"} < operations
    assert not {"ld64", "st64", "ld_acquire_cta64", "st_release_cta64", "copy"} & operations
    found = [
        f"{path.relative_to(SOURCE)}: {mistake}"
        for path in sorted((SOURCE / "nic").rglob("*.py"))
        for mistake in mistakes(path.read_text(), operations)
    ]
    assert found == []


@pytest.mark.parametrize("call", ["ld_relaxed64(shared + WORKER.uar_count)", "st_release64(shared, 1)"])
def test_a_mistake_is_found(call):
    assert list(mistakes(f"def look(shared):\n    return {call}\n", global_only()))


def test_memory_that_shared_memory_only_names_may_be_global():
    assert not list(mistakes("ld_relaxed64(shared_worker_at(shared).uars + 8)", global_only()))
