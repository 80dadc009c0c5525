"""docs/tutorial.md shows what the examples have; test_examples.py runs those."""

import re
import textwrap

from repository import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_snippet_is_part_of_an_example():
    text = PAGE.read_text()
    shown = [ROOT / "examples" / name for name in re.findall(r"\(\.\./examples/(\w+\.py)\)", text)]
    sources = [path.read_text() for path in shown]
    snippets = [code for language, code in FENCED.findall(text) if language == "python"]
    assert len(snippets) == 8
    for code in snippets:
        places = [textwrap.indent(code, " " * spaces) for spaces in (0, 4, 8, 12)]
        assert any("\n" + place in source for place in places for source in sources), code


def test_commands_name_examples():
    commands = "".join(code for language, code in FENCED.findall(PAGE.read_text()) if language == "sh")
    scripts = [line.split()[1] for line in commands.splitlines()]
    assert len(scripts) == 4
    assert all((ROOT / script).is_file() for script in scripts)


def test_links_lead_somewhere():
    for page in re.findall(r"\]\(([\w./-]+)\)", FENCED.sub("", PAGE.read_text())):
        assert (PAGE.parent / page).exists(), page
