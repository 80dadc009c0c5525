"""The pages of libraries run: the snippets of each, in order, as one program on the software NIC."""

import re

import pytest

from gpunetio import verbs
from repository import ROOT

PAGES = ("cm.md", "core.md", "dma.md", "rdma.md")
FENCED = re.compile(r"^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_every_snippet_runs(name):
    page = ROOT / "docs" / name
    text = page.read_text()
    found = list(FENCED.finditer(text))
    assert sum("assert" in one["code"] for one in found) >= len(found) - 2  # one without shows nothing
    namespace: dict[str, object] = {"__name__": "guide"}
    try:
        for one in found:
            lines = "\n" * text.count("\n", 0, one.start("code"))  # so that errors name the line of the page
            exec(compile(lines + one["code"], str(page), "exec"), namespace)
    finally:
        for each in list(namespace.values()):
            if isinstance(each, verbs.Context):
                each.close()
