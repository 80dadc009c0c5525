"""The site of the documentation builds with no warning, has the whole API, and needs no network."""

import html
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpunetio
from gpunetio import cm, core, dma, eth, flow, rdma, rendezvous, verbs
from repository import ROOT

for _needed in ("myst_parser", "pydata_sphinx_theme"):
    pytest.importorskip(_needed, reason="needs Sphinx (extra 'docs')")
inventory = pytest.importorskip("sphinx.util.inventory", reason="needs Sphinx (extra 'docs')")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    options = ("--builder", "html", "--fail-on-warning", "--keep-going", "--quiet")
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, docs, site], capture_output=True, text=True, timeout=390
    )


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pages, beside what they include."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "README.md", folder)
    return folder / "docs"


@pytest.fixture(scope="module")
def site(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(docs, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert all((site / page).with_suffix(".html").is_file() for page in pages)


def test_the_whole_api_is_there(site):
    documented = inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, found in documented.items() if kind.startswith("py:") for name in found}
    last = {name.rpartition(".")[2] for name in names}
    # `device` has a page written by hand.
    modules = {
        "cm", "core", "device", "dma", "errors", "eth", "flow", "match", "rdma", "rendezvous", "verbs", "__version__",
    }
    shown = gpunetio, cm, core, dma, eth, flow, rdma, rendezvous, verbs
    public = {name for module in shown for name in module.__all__}
    assert public - modules <= last
    assert {"gpunetio.open", "gpunetio.Gpu.create_qp", "gpunetio.verbs.QP.connect", "gpunetio.Faults.loss"} <= names


def test_every_page_leads_to_all_others(site):
    """By the sidebar, from pages at all depths of the tree."""
    sources = [path for path in (ROOT / "docs").rglob("*.md") if not path.read_text().startswith("---\norphan: true\n")]
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in sources}
    for page in ("use", "verbs", "decisions/wires", "soft-nic/wires"):
        (sidebar,) = re.findall(r'<nav class="bd-docs-nav.*?</nav>', (site / f"{page}.html").read_text(), re.DOTALL)
        folder = posixpath.dirname(page)
        links = {posixpath.normpath(f"{folder}/{link}").lstrip("/") for link in re.findall(r'href="([^"#]*)', sidebar)}
        assert {f"{other}.html" for other in pages - {page, "index"}} <= links


def test_drawings_are_whole(site):
    """A character is 0.6 em wide, and the style sheet says how many em fit the column."""
    (ems,) = re.findall(r"100cqi - 2rem\) / (\d+)", (site / "_static" / "site.css").read_text())
    drawings = [
        html.unescape(re.sub(r"<[^>]+>", "", drawing))
        for page in site.rglob("*.html")
        for drawing in re.findall(r'<div class="drawing .*?<pre>(.*?)</pre>', page.read_text(), re.DOTALL)
    ]
    assert len(drawings) >= 8
    assert 0.6 * max(len(line) for drawing in drawings for line in drawing.splitlines()) < int(ems)


def test_it_can_be_searched_without_a_network(site):
    assert "doorbell" in (site / "searchindex.js").read_text()
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]*"', page.read_text()), page


def test_what_leads_nowhere_is_an_error(docs, site):
    """The last test of the site: one of its pages is built again."""
    wrong = "[a page](no_page.md), [a heading](verbs.md#no-heading)\n\n```{eval-rst}\n:py:class:`gpunetio.NoClass`\n```"
    with (docs / "tutorial.md").open("a") as page:
        page.write(f"\n{wrong}\n")
    done = build(docs, site)
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 3
    assert all(name in done.stderr for name in ("no_page", "no-heading", "NoClass"))
