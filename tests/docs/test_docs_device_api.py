"""docs/device-api.md is complete and true: names, signatures, and snippets that run as one program."""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

from gpunetio import Gpu, device, verbs
from gpunetio.device.status import NAMES
from repository import ROOT

PAGE = ROOT / "docs" / "device-api.md"
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    """Each behind as many empty lines as are above it: errors then name the line of the page."""
    text = PAGE.read_text()
    found = [one for one in FENCED.finditer(text) if one["language"] == language]
    return ["\n" * text.count("\n", 0, one.start("code")) + one["code"] for one in found]


def named() -> Iterator[str]:
    """The names that begin a row of a table."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


Parameters = list[tuple[str, object]]


def written() -> Iterator[tuple[str, Parameters]]:
    """Each signature of the page: a call, whose arguments are the parameters and whose keywords have defaults."""
    for block in blocks("py"):
        for line in ast.parse(block, str(PAGE)).body:
            assert isinstance(line, ast.Expr)
            call = line.value
            assert isinstance(call, ast.Call)
            assert isinstance(call.func, ast.Name)
            found: Parameters = [(ast.unparse(each), inspect.Parameter.empty) for each in call.args]
            for each in call.keywords:
                value = compile(ast.Expression(each.value), str(PAGE), "eval")
                found.append((str(each.arg), eval(value, dict(vars(device)))))
            yield call.func.id, found


def signature(function: object) -> Parameters:
    taken = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(each.name, each.default) for each in taken]


def test_every_name_has_one_row():
    assert Counter(named()) == Counter(device.__all__)


def test_every_function_has_one_signature():
    public = {name: getattr(device, name) for name in device.__all__}
    functions = [name for name, value in public.items() if callable(value) and not isinstance(value, type)]
    assert Counter(name for name, _ in written()) == Counter(functions)


@pytest.mark.parametrize(("name", "found"), [pytest.param(*each, id=each[0]) for each in written()])
def test_signatures_are_those_of_the_code(name, found):
    assert found == signature(getattr(device, name))


def test_statuses_have_these_values():
    table = PAGE.read_text().split("## Statuses")[1].split("## ")[0]
    values = {name: int(value.replace("−", "-")) for name, value in re.findall(r"^\| `(\w+)` \| (\S+)", table, re.M)}
    assert len(values) == len(NAMES)
    assert values == {name: getattr(device, name) for name in values}


def test_every_snippet_runs():
    page = ModuleType("device_api_page")
    try:
        for code in blocks("python"):
            exec(compile(code, str(PAGE), "exec"), vars(page))
    finally:
        for kind in (Gpu, verbs.Context):
            for each in list(vars(page).values()):
                if isinstance(each, kind):
                    each.close()


def test_there_are_only_signatures_and_snippets_that_assert():
    snippets = blocks("python")
    assert PAGE.read_text().count("```") == 2 * (len(snippets) + len(blocks("py")))
    assert all("assert" in code for code in snippets)


def test_links_lead_somewhere():
    for page in re.findall(r"\]\(([\w./-]+)\)", FENCED.sub("", PAGE.read_text())):
        assert (PAGE.parent / page).exists(), page
