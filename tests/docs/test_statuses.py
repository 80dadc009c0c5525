"""Kernels that readers copy keep the status of everything that can fail: without it, nobody notices an error."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest

from gpunetio import device
from gpunetio.jit.compile import DeviceFunction
from repository import ROOT

# They fail only for an index or a ring that the semaphore does not have, and snippets get these from the semaphore.
CANNOT_FAIL = {"sem_free", "sem_set_status"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def answers(function: object) -> bool:
    """Whether a function of the device library returns something."""
    if not isinstance(function, DeviceFunction):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.py_func)))
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))


ANSWERS = {name for name in device.__all__ if answers(getattr(device, name))} - CANNOT_FAIL


def dropped(text: str) -> Iterator[str]:
    """Yield the calls whose answer nobody takes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            module, _, name = ast.unparse(node.value.func).rpartition(".")
            if module in ("dev", "device") and name in ANSWERS:
                yield ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_keep_statuses(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert [*dropped(block)] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_keep_statuses(example):
    assert [*dropped(example.read_text())] == []


def test_a_dropped_status_is_found():
    assert [*dropped("def send(qp):\n    dev.wait(qp, dev.put(qp, 0))")] == ["dev.wait(qp, dev.put(qp, 0))"]
    assert [*dropped("def send(qp, out):\n    dev.st64(out, dev.wait(qp, 0))")] == []
