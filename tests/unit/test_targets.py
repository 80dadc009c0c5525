"""Holds that nothing asks by name which target it is on: what differs between targets is in `Code` and `Backend`."""

import ast

import pytest

from gpunetio.gpu.backend import Backend
from gpunetio.gpu.cuda_backend import CudaBackend
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.gpu.twin_backend import TwinBackend
from gpunetio.jit.launch import CODE
from repository import ROOT

SOURCE = ROOT / "src" / "gpunetio"
ROOMS = ("jit", "device", "nic", "verbs", "gpu")
BACKENDS = (HostBackend, TwinBackend, CudaBackend)
NAMES = {"cuda", "cpu"}


def comparisons(source: str) -> list[int]:
    """Return the lines that compare something with the name of a target, or with the class of a backend."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            texts = {"cuda"} if "Backend" in ast.unparse(node.args[1]) else set()
        else:
            continue
        if NAMES & texts:
            found.append(node.lineno)
    return found


def test_no_module_asks_which_target_it_is_on() -> None:
    paths = [path for room in ROOMS for path in (SOURCE / room).rglob("*.py")] + [SOURCE / "dpa.py"]
    assert len(paths) > 100
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in paths for line in comparisons(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ['if gpu.target != "cuda": pass', 'x = 1 if place.target in ("cpu",) else 2', "isinstance(b, (HostBackend, int))"],
)
def test_a_comparison_is_seen(source: str) -> None:
    assert comparisons(source) == [1]


def test_backends_and_code_have_the_same_targets() -> None:
    assert {backend.target for backend in BACKENDS} == {*CODE}
    assert not any(backend.__abstractmethods__ for backend in BACKENDS)
    assert Backend.__abstractmethods__ == {"alloc", "copy", "map", "unmap", "count_kernel", "dmabuf_fd", "close"}
