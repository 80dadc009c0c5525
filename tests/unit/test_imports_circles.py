"""Holds that no modules of gpunetio import each other in a circle: each can be read, and loaded, after what it needs.

An import of `a.b.c` runs the packages `a` and `a.b`, too. Those that the importing module lies in itself do not count:
they run before it in any case.

Imports for types only make no circles either, except among the objects of verbs: a context creates them, and each of
them names its context, a channel its queues, and an event its object.
"""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from import_rig import Module, imports, is_package, module_of
from repository import ROOT

PACKAGE = "gpunetio"
OBJECTS = (PACKAGE, "verbs")
SOURCE = ROOT / "src" / PACKAGE


def graph_of(sources: Mapping[str, str], types: bool) -> dict[Module, set[Module]]:
    """Return what each module needs, with `types` also for those. `sources` are texts by path in the package."""
    paths = {module_of(Path(path), PACKAGE): Path(path) for path in sources}
    needs: dict[Module, set[Module]] = {}
    for module, path in paths.items():
        needs[module] = set()
        for _, base, name in imports(sources[str(path)], module, is_package(path), types):
            target = (*base, name) if name and (*base, name) in paths else base
            around = (target[:n] for n in range(1, len(target)) if target[:n] != module[:n])
            needs[module] |= {other for other in (*around, target) if other in paths}
        needs[module].discard(module)
    return needs


def as_one(package: Module, graph: Mapping[Module, set[Module]]) -> dict[Module, set[Module]]:
    """Return the graph in which a package is one module."""

    def merged(module: Module) -> Module:
        return package if module[: len(package)] == package else module

    found: dict[Module, set[Module]] = {}
    for module, needed in graph.items():
        found.setdefault(merged(module), set()).update(set(map(merged, needed)) - {merged(module)})
    return found


def circle_in(graph: Mapping[Module, set[Module]]) -> list[str]:
    """Return the modules of a circle, in order; nothing if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [".".join(module) for module in reversed(error.args[1])]
    return []


def test_no_modules_import_each_other() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    assert len(sources) > 300
    assert circle_in(graph_of(sources, types=False)) == []
    assert circle_in(as_one(OBJECTS, graph_of(sources, types=True))) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"a.py": "from . import b", "b.py": "from . import a"},
        {"a.py": "from .b import x", "b.py": "def f():\n    from .a import y"},
        {"a.py": "import gpunetio.b", "b.py": "from gpunetio.c import x", "c.py": "from .a import x"},
        {"nic/nic.py": "from .control import links", "nic/control/links.py": "from ..nic import SoftNic"},
        {"gpu/__init__.py": "from .one import x", "gpu/one.py": "from ..dpa import x", "dpa.py": "from .gpu import x"},
        {"gpu/__init__.py": "from ..dpa import x", "gpu/gpu.py": "", "dpa.py": "from .gpu.gpu import Gpu"},
    ],
)
def test_a_circle_is_seen(sources: dict[str, str]) -> None:
    found = circle_in(graph_of(sources, types=False))
    assert found[0] == found[-1]
    assert len(set(found)) >= 2


@pytest.mark.parametrize(
    "sources",
    [
        {"a.py": "from . import b", "b.py": ""},
        {"a.py": "from .b import x", "b.py": "if TYPE_CHECKING:\n    from .a import y"},
        {"nic/__init__.py": "from .nic import SoftNic", "nic/nic.py": "from .engine import x", "nic/engine.py": ""},
        {"a.py": "import b, numpy.a", "b.py": "from a import x"},  # others' modules with the same names
    ],
)
def test_a_graph_without_circles_passes(sources: dict[str, str]) -> None:
    assert circle_in(graph_of(sources, types=False)) == []


def test_a_circle_of_types_is_seen() -> None:
    sources = {"gpu/a.py": "from .b import x", "gpu/b.py": "if TYPE_CHECKING:\n    from .a import y"}
    graph = graph_of(sources, types=True)
    assert set(circle_in(graph)) == {"gpunetio.gpu.a", "gpunetio.gpu.b"}
    assert circle_in(as_one((PACKAGE, "gpu"), graph)) == []
    through = graph_of({**sources, "gpu/b.py": "from ..dpa import x", "dpa.py": "from .gpu.a import y"}, types=True)
    assert set(circle_in(as_one((PACKAGE, "gpu"), through))) == {"gpunetio.gpu", "gpunetio.dpa"}
