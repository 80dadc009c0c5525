"""Holds the direction of imports: a module of gpunetio imports only from its own layer or a lower one.

The layers, from high to low:

    cli
    samples, packet_processing, bench, testing, doctor
    eth, flow, rdma, dma            the libraries, and the package's face, gpunetio/__init__.py
    core, cm, uverbs, nccl          what libraries share, the connection manager; libibverbs' and NCCL's users
    embed                           how programs in other languages load Python
    rendezvous
    gpu, dpa
    verbs
    providers
    nic
    fabric
    device, foreign                 device functions; the same for other compilers
    jit                             the compiler substrate
    formats
    errors, log, enums, memory, ... modules at the package root that anyone may import, and that import only each other

So formats knows nothing of the NIC, the NIC nothing of verbs, and verbs reaches a NIC only through providers.
Packages on one line count as one layer. An import inside a function, or for types only, counts like any other. A new
package or root module belongs in LAYERS: the test names the ones it does not know.

A large package has floors of its own, in FLOORS.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from import_rig import Module, imports, is_package, module_of
from repository import ROOT

PACKAGE = "gpunetio"
SOURCE = ROOT / "src" / PACKAGE

FACE = "__init__"  # the package itself: `import gpunetio`, or `from gpunetio import` of something that is no module
Layers = tuple[tuple[str, ...], ...]
LAYERS: Layers = (
    ("cli", "__main__"),
    ("samples", "packet_processing", "bench", "testing", "doctor"),
    ("eth", "flow", "rdma", "dma", FACE),
    ("core", "cm", "uverbs", "nccl"),
    ("embed",),
    ("rendezvous",),
    ("gpu", "dpa"),
    ("verbs",),
    ("providers",),
    ("nic",),
    ("fabric",),
    ("device", "foreign"),
    ("jit",),
    ("formats",),
    (
        "errors", "log", "enums", "types", "memory", "arguments", "closing", "compiler", "dlpack", "dropped",
        "interrupts", "limits", "service", "trusted", "kept", "once", "_version",
    ),
)
FLOORS: dict[str, Layers] = {
    "nic": (
        ("diagnosis",),
        ("nic",),       # the NIC, as drivers call it
        ("host",),      # turns on threads of the CPU
        ("observe",),   # counters, reports, tables for other processes
        ("gpu",),       # turns in slices, on a GPU or its twin
        ("control",),   # commands by object, links, shared memory
        ("wires",),     # what wires lead to
        ("engine",),    # what the control path acts on
        ("turn",),      # what the engine does again and again
        ("transport",), # IBTA chapter 9, and Ethernet frames
        ("queues",),    # WQEs, CQEs, doorbells, events
        ("steering",),  # flow tables
        ("memory",),    # keys, and how payload is copied
        ("state", FACE),
    ),
    "nic/control": (
        ("control_path",),
        ("queues", "flow"),
        ("links",),     # to other NICs
        ("regions",),   # PDs, memory keys, UMEMs, shared memory
        ("interpreter", "event_channels", "gids", "hca", "uar", "vport"),
        ("command", "components", "guids", "objects", "syndromes", FACE),
    ),
}


def ranks_of(layers: Layers) -> dict[str, int]:
    return {name: len(layers) - i for i, names in enumerate(layers) for name in names}


def imported_parts(source: str, module: Module, package: bool, inside: Module) -> Iterator[tuple[int, str]]:
    """(line, part of the package `inside`) for each import of a module."""
    found: dict[tuple[int, str], None] = {}  # once for each line
    folder = SOURCE.joinpath(*inside[1:])
    for line, base, name in imports(source, module, package, types=True):
        target = (*base, name) if name and base == inside else base
        if target[: len(inside)] == inside:
            part = target[len(inside)] if len(target) > len(inside) else FACE
            known = (folder / part).is_dir() or (folder / f"{part}.py").is_file()
            found[line, part if known else FACE] = None
    yield from found


def complaints(source: str, path: Path) -> list[str]:
    """What is wrong with the imports of one module; path is relative to the package."""
    parts = path.with_suffix("").parts
    found = wrong_imports(source, path, (PACKAGE,), parts[0], LAYERS, "LAYERS")
    for depth in range(1, len(parts)):
        package = "/".join(parts[:depth])
        if package in FLOORS:
            inside = (PACKAGE, *parts[:depth])
            found += wrong_imports(source, path, inside, parts[depth], FLOORS[package], f"FLOORS[{package!r}]")
    return found


def wrong_imports(source: str, path: Path, inside: Module, own: str, layers: Layers, table: str) -> list[str]:
    ranks = ranks_of(layers)
    if own not in ranks:
        return [f"{path}: {own!r} is in no layer; add it to {table}"]
    found = []
    for line, part in imported_parts(source, module_of(path, PACKAGE), is_package(path), inside):
        if part not in ranks:
            found.append(f"{path}:{line}: {part!r} is in no layer; add it to {table}")
        elif ranks[part] > ranks[own]:
            found.append(f"{path}:{line}: {own} imports {part}, which lies above it")
    return found


def test_imports_point_downwards() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert paths, f"no modules in {SOURCE}"
    found = [text for path in paths for text in complaints(path.read_text("utf-8"), path.relative_to(SOURCE))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "upward"),
    [
        ("formats/wqe.py", "from ..nic import tables", "nic"),
        ("formats/wqe.py", "from ..nic.tables import Row", "nic"),
        ("formats/__init__.py", "from ..nic import tables", "nic"),
        ("formats/__init__.py", "from .. import device", "device"),
        ("nic/host/engine.py", "import numpy, gpunetio.verbs.qp", "verbs"),
        ("nic/host/engine.py", "def f():\n    from gpunetio import verbs", "verbs"),
        ("nic/turn/deep.py", "from ...verbs import qp", "verbs"),
        ("nic/state/tables.py", "from ..control import qp", "control"),
        ("nic/transport/packets.py", "def f():\n    from ..gpu.slices import take_slice", "gpu"),
        ("nic/turn/step.py", "from gpunetio.nic.host.loop import run", "host"),
        ("nic/control/regions/mkey.py", "from ..queues.qp import QueuePairs", "queues"),
        ("verbs/qp.py", "import gpunetio", FACE),
        ("verbs/qp.py", "from gpunetio import PD", FACE),
        ("errors.py", "from . import formats", "formats"),
        ("__init__.py", "from . import cli", "cli"),
        ("fabric/udp.py", "if TYPE_CHECKING:\n    from ..nic import tables", "nic"),
    ],
)
def test_upward_import_is_seen(path: str, source: str, upward: str) -> None:
    assert [text.split("imports ")[1] for text in complaints(source, Path(path))] == [f"{upward}, which lies above it"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("providers/soft.py", "from ..nic import commands\nfrom .. import errors, log"),
        ("gpu/handle.py", "from gpunetio.verbs.context import Context"),
        ("eth/rxq.py", "from ..flow import Pipe"),
        ("formats/wqe.py", "from . import wire\nfrom .cqe import Cqe\nimport gpunetio.formats.mlx5"),
        ("formats/__init__.py", "from .wqe import Wqe"),
        ("__init__.py", "from .verbs import PD\nfrom .eth import RxQueue"),
        ("cli/__init__.py", "import gpunetio\nfrom gpunetio import PD"),
        ("jit/ops.py", "import llvmlite\nfrom llvmlite import ir"),
        ("foreign.py", "import numba\nfrom numba import types"),
    ],
)
def test_downward_import_passes(path: str, source: str) -> None:
    assert complaints(source, Path(path)) == []


def test_unknown_part_is_named() -> None:
    assert "'utils' is in no layer" in complaints("", Path("utils/__init__.py"))[0]
