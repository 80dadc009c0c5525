"""docs/verbs.md runs: its snippets, in order, as one program on the software NIC."""

import re

from gpunetio import verbs
from repository import ROOT

GUIDE = ROOT / "docs" / "verbs.md"
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def snippets() -> list[tuple[str, str]]:
    """Language and code of each, behind as many empty lines as are above it: errors then name the line of the page."""
    text = GUIDE.read_text()
    return [
        (one["language"], "\n" * text.count("\n", 0, one.start("code")) + one["code"]) for one in FENCED.finditer(text)
    ]


def test_every_snippet_runs():
    namespace: dict[str, object] = {"__name__": "guide"}
    try:
        for _, code in snippets():
            exec(compile(code, str(GUIDE), "exec"), namespace)
    finally:
        for each in list(namespace.values()):
            if isinstance(each, verbs.Context):
                each.close()


def test_all_snippets_are_python_and_hold_assertions():
    """One in another language would not be run; one that shows nothing could say anything."""
    found = snippets()
    assert {language for language, _ in found} == {"python"}
    assert GUIDE.read_text().count("```") == 2 * len(found)
    assert sum("assert" in code for _, code in found) >= len(found) - 2


def test_links_lead_somewhere():
    for page, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", GUIDE.read_text()):
        target = (GUIDE.parent / page).read_text()
        headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in target.splitlines()
                    if line.startswith("#")}
        assert not anchor or anchor in headings, f"{page} has no heading {anchor}"
