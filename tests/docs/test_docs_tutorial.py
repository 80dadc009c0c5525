"""The tutorials show what the examples have; test_examples.py runs those."""

import re
import textwrap

import pytest

from repository import ROOT

# The page, and how many snippets and commands it has.
PAGES = {"tutorial": (8, 4), "tutorial-ethernet": (7, 2), "tutorial-ping": (7, 2)}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(params=PAGES)
def page(request):
    return ROOT / "docs" / f"{request.param}.md"


def test_every_snippet_is_part_of_an_example(page):
    text = page.read_text()
    shown = [ROOT / "examples" / name for name in re.findall(r"\(\.\./examples/(\w+\.py)\)", text)]
    sources = [path.read_text() for path in shown]
    snippets = [code for language, code in FENCED.findall(text) if language == "python"]
    assert len(snippets) == PAGES[page.stem][0]
    for code in snippets:
        places = [textwrap.indent(code, " " * spaces) for spaces in (0, 4, 8, 12)]
        assert any("\n" + place in source for place in places for source in sources), code


def test_commands_name_examples(page):
    commands = "".join(code for language, code in FENCED.findall(page.read_text()) if language == "sh")
    scripts = [line.split()[1] for line in commands.splitlines() if line.startswith("python ")]
    assert len(scripts) == PAGES[page.stem][1]
    assert all((ROOT / script).is_file() for script in scripts)


def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([\w./-]+)\)", FENCED.sub("", page.read_text())):
        assert (page.parent / target).exists(), target
