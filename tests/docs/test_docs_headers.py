"""docs/headers.md has every name and signature of `gpunetio.eth.headers`, and its snippets run as one program."""

import inspect
import re
from types import ModuleType

import pytest

from gpunetio.eth import headers
from gpunetio.formats.layout import Entry
from repository import ROOT

TEXT = (ROOT / "docs" / "headers.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SIGNATURES = [line for language, code in FENCED.findall(TEXT) if language == "py" for line in code.splitlines()]
TABLES = "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))


def test_every_name_is_in_a_table():
    assert {name for name in headers.__all__ if f"`{name}`" not in TABLES} == set()


@pytest.mark.parametrize("line", SIGNATURES)
def test_signatures_are_those_of_the_code(line):
    name = line.partition("(")[0]
    parameters = inspect.signature(getattr(headers, name).py_func).parameters.values()
    plain = ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
    assert f"{name}({plain})" == line


def test_every_function_has_a_signature():
    functions = {name for name in headers.__all__ if hasattr(getattr(headers, name), "py_func")}
    assert {line.partition("(")[0] for line in SIGNATURES} == functions


def test_views_have_these_fields():
    rows = re.findall(r"^\| `(\w+)_at` \| `(\w+)` \| (.*) \|$", TABLES, re.MULTILINE)
    assert {f"{view}_at" for view, _, _ in rows} == {name for name in headers.__all__ if name.endswith("_at")}
    for _, name, text in rows:
        entry: Entry = getattr(headers, name)
        fields = [re.sub("_high$|_low$", "", field) for field in re.findall(r"`(\w+)`", text)]
        assert list(dict.fromkeys(fields)) == list(entry.offsets)


def test_snippets_run(tmp_path):
    """From a file, which the compiler reads."""
    page = ModuleType("headers_page")
    code = "\n".join(code for language, code in FENCED.findall(TEXT) if language == "python")
    assert code.count("assert") == 3
    (tmp_path / "headers_page.py").write_text(code)
    exec(compile(code, tmp_path / "headers_page.py", "exec"), page.__dict__)
