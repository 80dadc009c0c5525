"""The documentation site: `make docs` builds it into build/docs, from these pages and the package's docstrings."""

import re
from abc import ABC
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils.nodes import Element, TextElement, document, literal_block
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.inspect import signature, stringify_signature
from sphinx.util.nodes import make_refnode

project = "gpunetio"
author = "The gpunetio authors"
copyright = author
version = release = version_of("gpunetio")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_static"]
nitpicky = True  # a name or link that leads nowhere is an error: `make docs` turns warnings into errors
nitpick_ignore_regex = [
    ("py:obj", r".*"),  # `words` of a docstring: some are names of the API, and then links
    ("py:.*", r"(collections|contextlib|ctypes|enum|ipaddress|numpy|np|pathlib|re|socket|types|typing)\..*"),
    ("py:class", r"(NDArray|ndarray|Path|uint8|optional)"),
    # See the source: what the package's parts need of each other.
    ("py:class", r"gpunetio\.(formats\.commands\.Opcode|providers\.provider\.Provider|jit\.code\.Code)"),
    ("py:class", r"gpunetio\.(gpu\.export\.Exporter|gpu\.proxy\.Forwarded|verbs\.dpa\.\w+)"),
    ("py:class", r"Transition"),  # between states of a queue pair (verbs/qp_state.py)
    ("py:class", r"gpunetio\.eth\.receive\._Packet"),  # `Received` or `ManagedPacket`
    ("py:class", r"gpunetio\.cm\.listener\.Asked"),  # `Request` or `DatagramRequest`
    # Values of matches and destinations of rules, which the page of flow rules lists.
    ("py:.*", r"gpunetio\.flow\..*|(ipaddress\.)?IPv[46](Address|Network)|PerEntry|Stage|To|Number|Mac|Ip"),
    # Options that are passed on: the pages of `QP.connect` and `Gpu.create_qp` name them.
    ("py:class", r"(gpunetio\.verbs\.qp\.)?ConnectOptions|(gpunetio\.gpu\.group\.)?QpOptions"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {"DTypeLike": "numpy.typing.DTypeLike"}  # which would be a page of types
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    # What the package's parts ask of each other.
    "exclude-members": "__init__, __new__, backend, close_with_owner, code, event_taken, hold_for_event, kinds, own, "
    "page, place, posting, provider, reader, ring, serve, used_by, wait_idle, wire_argument, wire_kind",
}
add_module_names = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
default_role = "py:obj"

html_theme = "pydata_sphinx_theme"
html_title = f"gpunetio {version}"
html_short_title = "gpunetio"
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {"**": ["all-pages.html"]}  # the theme's own shows only the pages of one section
html_theme_options = {
    "logo": {"image_light": "_static/logo.svg", "image_dark": "_static/logo.svg", "text": "gpunetio"},
    "navigation_with_keys": False,
    "navbar_start": ["navbar-logo", "site-version"],
    "navbar_center": ["navbar-nav"],  # the sections
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,  # functions of the device API are headings of this level
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

# --- the front page is the README; links that leave docs/ lead to pages of the site -----------------------------------

_README = Path(__file__).parents[1] / "README.md"
_PAGES = {
    "../README.md": "index.md", "../examples/": "examples.md",
    "../benchmarks/README.md": "measurements.md", "../benchmarks/RESULTS.md": "measurements.md",
}


def _from_docs(link: str) -> str:
    """A relative link of the README as it is from docs/."""
    if re.match(r"\w+:|#", link):
        return link
    return link.removeprefix("docs/") if link.startswith("docs/") else f"../{link}"


def _link_pages(app: Sphinx, page: str, source: list[str]) -> None:
    link = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
    if page == "index":
        readme = link.sub(lambda found: _from_docs(found[0]), _README.read_text(encoding="utf-8"))
        source[0] = readme + source[0].partition("\n")[2]
        app.env.note_dependency(str(_README))
    up = "../" * page.count("/")  # from a page in a folder to docs/
    pages = {up + left: up + led for left, led in _PAGES.items()}
    source[0] = link.sub(lambda found: pages.get(found[0], found[0]), source[0])


# --- docstrings are plain text with `names`, not reStructuredText -----------------------------------------------------

_TERM = re.compile(r"(?P<names>`[^`]+`(?:, `[^`]+`)*)  +(?P<text>\S.*)")  # a row of a table: `name`    what it is
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")


def _marked_up(line: str) -> str:
    """With `names` as links or code, and what reStructuredText would take for markup as it is."""
    parts = re.split(r"(`[^`]*`)", line)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([*|\\])|(?<=\w)(_)(?!\w)", r"\\\g<0>", part)
        elif not _NAME.fullmatch(part[1:-1]):
            parts[i] = f"`{part}`"
        if i % 2 and parts[i + 1][:1].isalnum():
            parts[i] += "\\ "
    return "".join(parts)


def _as_rest(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    made: list[str] = []
    in_list = in_code = False
    for line in lines:
        indented = line.startswith("    ")
        if row := _TERM.fullmatch(line):
            if not in_list:
                made.append("")
            in_list = True
            made.append(f"* {_marked_up(row['names'])}: {_marked_up(row['text'])}")
        elif in_list and indented:
            made.append(f"  {_marked_up(line.strip())}")
        elif indented:
            if not in_code:
                made += ["::", ""]
            in_code = True
            made.append(line)
        else:
            if line and (in_list or in_code):
                made.append("")
            in_list = in_list and not line
            in_code = in_code and not line
            made.append(_marked_up(line))
    lines[:] = made


# --- what a user sees of a class --------------------------------------------------------------------------------------

# Beside dataclasses; other objects come from methods.
_MADE_BY_USERS = {"Gpu", "Link", "MpiRendezvous", "ProxyService", "StoreRendezvous", "TcpRendezvous"}


def _signature(
    app: Sphinx, what: str, name: str, thing: Any, options: object, arguments: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave out the arguments of constructors that are no part of the API."""
    if what == "class" and not hasattr(thing, "__dataclass_fields__"):
        arguments = ""
        if name.rpartition(".")[2] in _MADE_BY_USERS:
            arguments = stringify_signature(signature(thing.__init__, bound_method=True), show_return_annotation=False)
    return arguments, returns


_SHARED = {"KernelQueue"}  # what several classes of the API are made of


def _bases(app: Sphinx, name: str, thing: object, options: object, bases: list[type]) -> None:
    """Leave out base classes that are no part of the API."""
    bases[:] = [base for base in bases if base is not ABC and base.__name__[0] != "_" and base.__name__ not in _SHARED]


# --- names as the source has them -------------------------------------------------------------------------------------


_ALIASES = {"Async": "AsyncEventType"}


def _public(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement) -> Element | None:
    """Annotations name a class as its module imports it; the pages name it as users do."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].removesuffix("()")
    if node["reftype"] != "obj" or "." not in name:  # `QP.connect` of a docstring names a method, anything else a class
        name = _ALIASES.get(name, name).rpartition(".")[2]
    found = {
        obj.node_id: obj.docname
        for full, obj in env.domains.python_domain.objects.items()
        if f".{full}".endswith(f".{name}") and ("." in name or obj.objtype in ("class", "exception", "function"))
    }
    if len(found) != 1:
        return None
    ((at, page),) = found.items()
    return make_refnode(app.builder, node["refdoc"], page, at, text, name)


# --- drawings ---------------------------------------------------------------------------------------------------------

_LINES = re.compile(r"[│┌└├┐┘┤─]")


def _mark_drawings(app: Sphinx, doctree: document) -> None:
    """Mark blocks with drawings, whose lines must not be cut (_static/site.css)."""
    for block in doctree.findall(literal_block):
        if _LINES.search(block.astext()):
            block["classes"].append("drawing")
            block["language"] = "text"


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _mark_drawings)
    app.connect("source-read", _link_pages)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-bases", _bases)
    app.connect("autodoc-process-docstring", _as_rest)
    app.connect("missing-reference", _public)
