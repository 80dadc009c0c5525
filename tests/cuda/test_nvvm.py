"""Kernels by libNVVM, CUDA's own compiler. Whoever makes PTX of a kernel, it does the same."""

from __future__ import annotations

import math
import re
import shutil

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (extra 'cuda')")

import cuda_kernels
from cuda_kernels import SM_90, SM_100
from gpunetio.errors import InvalidValueError, NotSupportedError
from gpunetio.jit import cubin, libdevice
from gpunetio.jit.kinds import FLOAT32, FLOAT64, ArrayType

QUICK = "blue_flame", "groups", "eth_headers", "buffers"
SLOW = (
    "low_level", "dma_copies", "packet_headers", "one_sided", "two_sided", "in_warps", "in_blocks", "counted",
    "eth_receive", "eth_send", "eth_by_hand", "rdma_strong", "rdma_weak", "receive_udp", "receive_tcp", "receive_icmp",
    "serve_http", "engine", "engine_inside",
)

# What orders memory, and what the threads of a warp or block do together (PTX ISA, "Parallel Synchronization and
# Communication Instructions").
TOGETHER = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:fence|membar|bar|barrier|shfl|vote|activemask|match|atom|red|elect)\b[\w.:]*"
    r"|(?:ld|st)\.(?:acquire|release|relaxed|async|volatile)[\w.:]*)", re.MULTILINE,
)


@pytest.fixture
def by(monkeypatch):
    """A function that returns a kernel as PTX by one of the back ends."""

    def ptx_of(name: str, backend: str, capability: tuple[int, int]) -> str:
        monkeypatch.setenv(cubin.BACKEND, backend)
        return cuda_kernels.ptx_of(*cuda_kernels.KERNELS[name], capability)

    return ptx_of


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *((name, SM_90) for name in QUICK),
        *(pytest.param(name, SM_90, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, capability, marks=pytest.mark.slow)
          for name in ("one_sided", "eth_headers", "engine") for capability in ((8, 0), SM_100)),
    ],
)
def test_both_back_ends_make_the_same_of_a_kernel(by, name, capability):
    """As to what its threads and the NIC see: the kinds of these instructions. Loops may be copied."""
    texts = [by(name, backend, capability) for backend in ("llvm", "nvvm")]
    assert texts[0] != texts[1]
    found = [set(TOGETHER.findall(text)) for text in texts]
    assert found[0] == found[1]
    report = cuda_kernels.report_of(name, texts[1], capability)
    assert not re.search(r"\.f(64|32)\b", texts[1])
    spills = max(map(int, re.findall(r"(\d+) bytes spill", report)))
    assert spills == 0 or name.startswith("engine")


def scaled(out, given, factor):
    i = 0
    while i < len(given):
        if given[i] < 0:
            raise ValueError("negative")
        out[i] = math.sin(given[i]) * factor
        i += 1


@pytest.mark.parametrize("capability", [(8, 0), SM_90, SM_100])
def test_floats_arrays_and_mathematics(monkeypatch, capability):
    """libdevice is linked by libNVVM."""
    monkeypatch.setenv(cubin.BACKEND, "nvvm")
    kinds = ArrayType("float64", 1, True), ArrayType("float32", 1, True), FLOAT32
    text, unit = cubin.ptx_of(scaled, kinds, capability, threads=256)
    assert ".maxntid 256" in text
    assert "__nv_sin" not in text.replace("__internal", "")
    assert [failure.message for failure in unit.failures] == ["negative"]
    cubin.assemble(text, capability)


def test_the_wheel_brings_libdevice(monkeypatch):
    """Where there is no toolkit of CUDA."""
    pytest.importorskip("nvidia", reason="needs the extra cuda-compilers")
    for name in (libdevice.PLACE, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    path = libdevice._found()
    assert path is not None
    assert "site-packages" in path
    assert libdevice.bitcode()[:4] == b"BC\xc0\xde"  # LLVM Bitcode File Format, "Magic Numbers"


def copy(out, given):
    out[0] = given


def test_what_is_kept_knows_its_back_end(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path))
    kinds = ArrayType("float64", 1, True), FLOAT64
    made = []
    for backend in ("llvm", "nvvm", ""):
        monkeypatch.setenv(cubin.BACKEND, backend)
        made.append(cubin.image_of(copy, kinds, SM_90))
        assert len(list(tmp_path.glob("*.cubin"))) == min(len(made), 2)
    assert made[2] == made[0]


def test_an_unknown_back_end(monkeypatch):
    monkeypatch.setenv(cubin.BACKEND, "nvcc")
    with pytest.raises(InvalidValueError, match="GPUNETIO_CUDA_BACKEND is 'nvcc': there are llvm and nvvm"):
        cubin.ptx_of(copy, (ArrayType("float64", 1, True), FLOAT64), SM_90)


def test_it_has_no_lines(monkeypatch):
    monkeypatch.setenv(cubin.BACKEND, "nvvm")
    with pytest.raises(NotSupportedError, match="leave out GPUNETIO_LINEINFO or GPUNETIO_CUDA_BACKEND=nvvm"):
        cubin.ptx_of(copy, (ArrayType("float64", 1, True), FLOAT64), SM_90, lines=True)
