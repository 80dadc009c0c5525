"""Device functions for other compilers on the host: LLVM's own, by bitcode, and Numba."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llvmlite import binding as llvm

from gpunetio import Gpu, device, foreign, verbs
from gpunetio.device import library
from gpunetio.errors import InvalidValueError, NotSupportedError
from gpunetio.jit.c_function import root_of
from pair import Pair, make_pair
from repository import ROOT

pytestmark = pytest.mark.host_memory

SEND = """
declare i64 @gpunetio_put(i64, i64, i64, i64, i64, i64, i64, i64, i64)
declare i64 @gpunetio_wait(i64, i64, i64, i64)
define i64 @send(i64 %qp, i64 %raddr, i64 %rkey, i64 %laddr, i64 %lkey, i64 %nbytes) {
  %at = call i64 @gpunetio_put(i64 %qp, i64 %raddr, i64 %rkey, i64 %laddr, i64 %lkey, i64 %nbytes, i64 2, i64 0, i64 0)
  %status = call i64 @gpunetio_wait(i64 %qp, i64 %at, i64 2, i64 0)
  ret i64 %status
}
"""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with verbs.open("soft0") as nic, Gpu("host") as gpu:
        yield make_pair(nic, gpu)


def place(pair: Pair) -> tuple[int, ...]:
    """The queue and the memory at its ends, as integers."""
    return (
        pair.a.device_address, pair.there.address, pair.there_mr.rkey, pair.here.address, pair.here_mr.lkey,
    )


def test_bitcode(pair: Pair) -> None:
    """A program of another compiler links it. What it needs is in the C library, or among the symbols."""
    linked = llvm.parse_bitcode(foreign.bitcode(["put", "wait"]))
    for needed in [*linked.functions, *linked.global_variables]:
        if needed.is_declaration and not needed.name.startswith("llvm."):
            assert needed.name in foreign.symbols() or hasattr(ctypes.CDLL(None), needed.name)
    linked.link_in(llvm.parse_assembly(SEND))
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(linked, machine)
    send = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(engine.get_function_address("send"))
    assert send(*place(pair), 4096) == 0
    assert np.array_equal(pair.there.array[:4097], [*pair.here.array[:4096], 0])


@pytest.mark.slow
def test_bitcode_of_all_functions() -> None:
    """None can fail as C functions: nobody would be told."""
    names = {one.c_name for one in library.functions()}
    assert names <= {one.name for one in llvm.parse_bitcode(foreign.bitcode()).functions if not one.is_declaration}
    assert not any(root_of(one.compiled, *[64] * len(one.parameters)).failures for one in library.functions())


def test_unknown_functions() -> None:
    with pytest.raises(InvalidValueError, match="the device library has no putt, rdma_get_info: docs/device-lib"):
        foreign.bitcode(["putt", "wait", "rdma_get_info"])


def test_numba_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(NotSupportedError, match=r"^functions for Numba need it: pip install numba"):
        foreign.numba_functions("put")


# --- Numba itself -----------------------------------------------------------------------------------------------------


@pytest.fixture
def numba() -> Any:
    return pytest.importorskip("numba", reason="Numba is not installed (make .venv/.interop)")


@pytest.mark.interop
def test_a_function_of_numba_puts(numba: Any, pair: Pair) -> None:
    """It computes what it sends, in floats, and reads what has arrived."""
    nic = foreign.numba_functions("put", "wait")

    @numba.njit(nogil=True)
    def send(qp, raddr, rkey, laddr, lkey, values, factor, sharing, scope):
        for i in range(len(values)):
            values[i] = i * factor
        ticket = nic.put(qp, raddr, rkey, laddr, lkey, values.nbytes, sharing, 0, scope)
        return nic.wait(qp, ticket, sharing, scope)

    values = pair.here.array[:800].view(np.float64)
    assert send(*place(pair), values, 0.5, device.GPU, device.THREAD) == 0
    assert np.array_equal(pair.there.array[:808].view(np.float64), [*np.arange(100) * 0.5, 0])


@pytest.mark.interop
def test_threads_of_numba_share_a_queue(numba: Any, pair: Pair) -> None:
    nic = foreign.numba_functions("put", "wait", "global_id")

    @numba.njit(parallel=True)
    def send(qp, raddr, rkey, laddr, lkey, statuses):
        for i in numba.prange(len(statuses)):
            ticket = nic.put(qp, raddr + 64 * i, rkey, laddr + 64 * i, lkey, 64, 2, 0, 0)
            statuses[i] = nic.wait(qp, ticket, 2, 0) + nic.global_id()

    statuses = np.full(500, -1)
    send(*place(pair), statuses)
    assert not statuses.any()
    assert np.array_equal(pair.there.array[:32_000], pair.here.array[:32_000])


def blocks(language: str) -> list[str]:
    """The programs of docs/numba.md."""
    page = (ROOT / "docs" / "numba.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.mark.interop
def test_the_page_of_numba(numba: Any) -> None:
    """The program of docs/numba.md runs."""
    (code,) = blocks("python")
    exec(compile(code, "docs/numba.md", "exec"), {"__name__": "page"})


LINK = """
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import types

{code}
code, _ = cuda.compile(send.py_func, types.void(*[int64] * 6), device=False, abi="numba", cc=(9, 0), output="ltoir")
parts = ObjectCode.from_ltoir(code), ObjectCode.from_ltoir(image.data)
Linker(*parts, options=LinkerOptions(arch="sm_90", link_time_optimization=True)).link("cubin")
"""


@pytest.mark.interop
def test_a_kernel_of_numba_cuda_links() -> None:
    """With the LTO-IR of the device library: each name of C is there."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (make .venv/.interop)")
    (code,) = blocks("py")
    ran = subprocess.run([sys.executable, "-c", LINK.format(code=code)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
