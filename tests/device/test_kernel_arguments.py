"""What a kernel is launched with: a wrong argument is refused in words, before anything runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunetio import Gpu, MemType, device, kernel, verbs
from gpunetio.enums import QpState, WrOpcode
from gpunetio.errors import BadStateError, InvalidValueError
from nic_rig import until
from pair import Pair, make_pair


@kernel
def send(qp, raddr, rkey, laddr, lkey, nbytes):
    device.wait(qp, device.put(qp, raddr, rkey, laddr, lkey, nbytes))


@kernel
def store(out):
    device.st64(out + 8 * device.global_id(), 7)


@kernel
def fill(out, value):
    out[device.global_id()] = value


@kernel
def echo(out, value):
    device.st64(out, value)


@kernel
def total(out, pair):
    device.st64(out, pair[0] + pair[1])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with verbs.open("soft0") as nic, Gpu("host") as gpu:
        yield make_pair(nic, gpu)


def arguments(pair: Pair) -> dict[str, Any]:
    return {
        "qp": pair.a, "raddr": pair.there.address, "rkey": pair.there_mr.rkey,
        "laddr": pair.here.address, "lkey": pair.here_mr.lkey, "nbytes": 8,
    }  # fmt: skip


MR = "is a memory region (MR): pass mr.address, and mr.lkey or mr.rkey"
REFUSED = {
    "None": ("raddr", lambda p: None, "raddr is None, which is not an address: pass 0 for no address"),
    "MR as address": ("raddr", lambda p: p.there_mr, f"raddr {MR}"),
    "MR as key": ("rkey", lambda p: p.there_mr, f"rkey {MR}"),
    "QP": ("qp", lambda p: p.a.qp, "pass what Gpu.create_qp() or Gpu.export_qp() returns"),
    "str": ("nbytes", lambda p: "8", "nbytes is of type str: a kernel takes integers, floats, NumPy arrays"),
    "bytearray": ("laddr", lambda p: bytearray(8), "laddr is of type bytearray, memory that a kernel cannot take: reg"),
    "list": ("laddr", lambda p: [1, 2], "laddr is of type list, memory that a kernel cannot take"),
    "objects": ("laddr", lambda p: np.array([None]), "laddr is of type ndarray, memory that a kernel cannot take"),
    "65 bits": ("raddr", lambda p: 1 << 64, "raddr = 0x10000000000000000 has more than 64 bits"),
    "array": ("raddr", lambda p: np.zeros(8, np.int64), "put() takes integers only, and raddr is an array of int64: r"),
    "float": ("raddr", lambda p: 1.5, "put() takes integers only, and raddr is of type float64: pass an integer"),
    "float key": ("rkey", lambda p: np.float32(2), "put() takes integers only, and rkey is of type float32"),
    "tuple": ("nbytes", lambda p: (8, 8), "put() takes integers only, and nbytes is of type UniTuple(int64 x 2)"),
}


@pytest.mark.parametrize("name, make, words", list(REFUSED.values()), ids=list(REFUSED))
def test_refused_at_the_launch(pair, name, make, words):
    args = {**arguments(pair), name: make(pair)}
    with pytest.raises(InvalidValueError) as caught:
        send[1, 1, pair.gpu](*args.values())
    assert words in str(caught.value)
    assert str(caught.value).startswith("send")
    assert "\n" not in str(caught.value)
    assert pair.a.indices()["reserved"] == 0


def test_closed_objects(pair):
    memory = pair.gpu.alloc(64)
    memory.close()
    with pytest.raises(BadStateError, match=r"store: argument out is closed \(GpuMemory\): its memory is gone"):
        store[1, 1, pair.gpu](memory)
    args = arguments(pair)
    pair.there_mr.close()
    with pytest.raises(InvalidValueError, match=r"raddr is a memory region \(MR, closed\)"):
        send[1, 1, pair.gpu](*{**args, "raddr": pair.there_mr}.values())


@pytest.mark.parametrize("count", [0, 5, 7])
def test_too_few_and_too_many(pair, count):
    words = rf"send takes 6 arguments \(qp, raddr, rkey, laddr, lkey, nbytes\), not {count}"
    with pytest.raises(InvalidValueError, match=words):
        send[1, 1, pair.gpu](*[0] * count)


def test_arrays_where_numba_takes_them():
    with Gpu("host") as gpu:
        out = np.zeros(8, np.int64)
        assert fill[2, 4, gpu](out, 3).wait(60)
        assert out.tolist() == [3] * 8
        floats = np.zeros(4, np.float32)
        assert fill[1, 4, gpu](floats, 2.5).wait(60)
        assert floats.tolist() == [2.5] * 4


def test_an_array_is_no_address():
    """Its pointer would be that of Numba's descriptor, and the store would end the process."""
    with Gpu("host") as gpu:
        words = r"store with out of type ndarray: st64\(\) takes integers only, and addr is an array of int64: register"
        with pytest.raises(InvalidValueError, match=words):
            store[1, 1, gpu](np.zeros(8, np.int64))


@kernel
def spread(value):
    device.block_broadcast(value, 0)


def test_a_group_function_takes_integers_only():
    """Like all device functions, wherever they are defined."""
    with Gpu("host") as gpu:
        words = r"spread with value of type float: block_broadcast\(\) takes integers only"
        with pytest.raises(InvalidValueError, match=words):
            spread[1, 1, gpu](1.5)


def test_what_numba_says_is_not_dumped():
    with Gpu("host") as gpu, gpu.alloc(8) as out:
        with pytest.raises(InvalidValueError) as caught:
            total[1, 1, gpu](out, 2.5)
        assert str(caught.value).startswith("total cannot be compiled with pair of type float: ")
        assert "\n" not in str(caught.value)
        assert total[1, 1, gpu](out, (2, 3)).wait(60)
        assert int(out.read().view("i8")[0]) == 5


@pytest.mark.parametrize(
    "value, word",
    [
        (True, 1), (np.uint64(1 << 63), -1 << 63), (np.int8(-1), -1), (0xFFFF_FFFF_FFFF_FFFF, -1), (-1 << 63, -1 << 63),
        (WrOpcode.RDMA_READ, int(WrOpcode.RDMA_READ)), (np.bool_(True), 1),
    ],
)  # fmt: skip
def test_integers_of_any_kind(value, word):
    with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        assert echo[1, 1, gpu](out, value).wait(60)
        assert int(out.array.view("i8")[0]) == word


def test_memory_of_a_gpu_is_not_for_the_host():
    tensor = SimpleNamespace(__cuda_array_interface__={"shape": (8,), "typestr": "|u1", "data": (4096, False)})
    with Gpu("host") as gpu, pytest.raises(InvalidValueError, match=r"out is memory of a GPU .*runs on the host"):
        store[1, 1, gpu](tensor)


# --- a queue pair that is not connected ------------------------------------------------------------------------------


def test_an_unconnected_queue_is_refused(pair):
    pair.a.qp.reset()
    pair.a.reset()
    with pytest.raises(BadStateError, match="is in RST, where nothing can be posted: connect"):
        send[1, 1, pair.gpu](*arguments(pair).values())
    array = pair.gpu.export_qps([pair.a, pair.b])
    with pytest.raises(BadStateError, match=f"{pair.a.qp} is in RST"):
        echo[1, 1, pair.gpu](0, array)
    assert pair.a.last_error() is None


def test_requests_before_rts_are_told(pair):
    """INIT takes receives, so a launch is not refused; sends wait, and `last_error` says for what."""
    pair.a.qp.reset()
    pair.a.reset()
    pair.a.qp.to_init()
    launch = send[1, 1, pair.gpu](*arguments(pair).values())
    until(lambda: pair.a.indices()["submitted"] == 1, "the kernel to post")
    told = pair.a.last_error()
    assert told is not None
    assert (told.index, told.syndrome, told.state) == (0, 0, QpState.INIT)
    assert str(told) == f"WQE 0 waits: {pair.a.qp} is in INIT and sends nothing before RTS: connect() it"
    pair.a.qp.to_error()
    assert launch.wait(60)


# --- threads ---------------------------------------------------------------------------------------------------------

CROWD = """
import resource
from gpunetio import Gpu, MemType, kernel

@kernel
def nothing():
    pass

with Gpu("host") as gpu:
    assert nothing[1, 1, gpu]().wait(60)
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), resource.RLIM_INFINITY))
    try:
        nothing[1, 64, gpu]()
    except MemoryError as error:
        print(error)
"""


def test_no_room_for_threads(tmp_path):
    """The C library would end the process: "cannot allocate memory for thread-local data: ABORT"."""
    (tmp_path / "crowd.py").write_text(CROWD)
    ran = subprocess.run([sys.executable, tmp_path / "crowd.py"], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("cannot start nothing of 64 threads: its threads take ")
    assert "raise that with ulimit -v" in ran.stdout
