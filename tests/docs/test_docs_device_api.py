"""docs/device-api.md and its pages are complete and true: names, signatures, and snippets, a program on each page."""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gpunetio import Gpu, device, verbs
from gpunetio.device.status import NAMES
from repository import ROOT

OVERVIEW = ROOT / "docs" / "device-api.md"
PAGES = [OVERVIEW, *sorted((ROOT / "docs" / "device-api").glob("*.md"))]
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
HEADED = re.compile(r"^### (`[^\n]*)\n\n```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """Each after as many empty lines as are above it: errors then name the line of the page."""
    text = page.read_text()
    found = [one for one in FENCED.finditer(text) if one["language"] == language]
    return ["\n" * text.count("\n", 0, one.start("code")) + one["code"] for one in found]


def named() -> Iterator[str]:
    """The names of headings, and those that begin a row of a table."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            if line.startswith(("| `", "### `")):
                yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


Parameters = list[tuple[str, object]]


def written() -> Iterator[tuple[str, Parameters]]:
    """Each signature of the pages: a call, whose arguments are the parameters and whose keywords have defaults."""
    for page, block in ((each, block) for each in PAGES for block in blocks(each, "py")):
        for line in ast.parse(block, str(page)).body:
            assert isinstance(line, ast.Expr)
            call = line.value
            assert isinstance(call, ast.Call)
            assert isinstance(call.func, ast.Name)
            found: Parameters = [(ast.unparse(each), inspect.Parameter.empty) for each in call.args]
            for each in call.keywords:
                value = compile(ast.Expression(each.value), str(page), "eval")
                found.append((str(each.arg), eval(value, dict(vars(device)))))
            yield call.func.id, found


def signature(function: object) -> Parameters:
    taken = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(each.name, each.default) for each in taken]


def test_every_name_has_one_heading_or_row():
    assert Counter(named()) == Counter(device.__all__)


def test_every_function_has_one_signature():
    public = {name: getattr(device, name) for name in device.__all__}
    functions = [name for name, value in public.items() if callable(value) and not isinstance(value, type)]
    assert Counter(name for name, _ in written()) == Counter(functions)


def test_each_signature_is_below_the_heading_of_its_function():
    headed = [found for page in PAGES for found in HEADED.findall(page.read_text())]
    assert len(headed) == sum(line.startswith("### `") for page in PAGES for line in page.read_text().splitlines())
    for heading, signatures in headed:
        assert re.findall(r"`(\w+)`", heading) == re.findall(r"^(\w+)\(", signatures, re.MULTILINE)


def test_the_overview_links_to_every_function():
    linked = re.findall(r"\[`(\w+)`\]\(device-api/[\w-]+\.md#([\w-]+)\)", OVERVIEW.read_text())
    assert Counter(name for name, _ in linked) == Counter(name for name, _ in written())
    assert all(name in re.split("-", anchor) for name, anchor in linked)


@pytest.mark.parametrize(("name", "found"), [pytest.param(*each, id=each[0]) for each in written()])
def test_signatures_are_those_of_the_code(name, found):
    assert found == signature(getattr(device, name))


def test_statuses_have_these_values():
    table = (ROOT / "docs" / "device-api" / "basics.md").read_text().split("## Statuses")[1].split("## ")[0]
    values = {name: int(value.replace("−", "-")) for name, value in re.findall(r"^\| `(\w+)` \| (\S+)", table, re.M)}
    assert len(values) == len(NAMES)
    assert values == {name: getattr(device, name) for name in values}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_every_snippet_runs(page):
    module = ModuleType("device_api_page")
    try:
        for code in blocks(page, "python"):
            exec(compile(code, str(page), "exec"), vars(module))
    finally:
        for kind in (Gpu, verbs.Context):
            for each in list(vars(module).values()):
                if isinstance(each, kind):
                    each.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_there_are_only_signatures_and_snippets_that_assert(page):
    snippets = blocks(page, "python")
    contents = 1 if page == OVERVIEW else 0
    assert page.read_text().count("```") == 2 * (len(snippets) + len(blocks(page, "py")) + contents)
    assert all("assert" in code for code in snippets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([\w./-]+)", FENCED.sub("", page.read_text())):
        assert (page.parent / link).exists(), link
