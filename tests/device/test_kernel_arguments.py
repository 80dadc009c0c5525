"""What a kernel is launched with: a wrong argument is refused in words, before anything runs."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunetio import Gpu, MemType, device, kernel, verbs
from gpunetio.enums import QpState, WrOpcode
from gpunetio.errors import BadStateError, InvalidValueError
from gpunetio.jit.arguments import checked, kind_and_words
from gpunetio.jit.kinds import ArrayType
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
    }


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
    "float": ("raddr", lambda p: 1.5, "put() takes integers only, and raddr is a float: pass an integer"),
    "float key": ("rkey", lambda p: np.float32(2), "put() takes integers only, and rkey is a float32: pass an integer"),
    "tuple": ("nbytes", lambda p: (8, 8), "put() takes integers only, and nbytes is a tuple of 2"),
}


@pytest.mark.parametrize("name, make, words", list(REFUSED.values()), ids=list(REFUSED))
def test_refused_at_the_launch(pair, name, make, words):
    args = {**arguments(pair), name: make(pair)}
    with pytest.raises(InvalidValueError) as caught:
        send[1, 1, pair.gpu](*args.values())
    assert words in str(caught.value)
    first, *more = str(caught.value).splitlines()
    assert first.startswith("send")
    assert not more or (first.endswith("does not compile:") and set(more[-1]) == {" ", "^"})
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


def test_arrays():
    with Gpu("host") as gpu:
        out = np.zeros(8, np.int64)
        assert fill[2, 4, gpu](out, 3).wait(60)
        assert out.tolist() == [3] * 8
        floats = np.zeros(4, np.float32)
        assert fill[1, 4, gpu](floats, 2.5).wait(60)
        assert floats.tolist() == [2.5] * 4


# --- arrays by DLPack ------------------------------------------------------------------------------------------------

CPU, CUDA, METAL = (1, 0), (2, 0), (8, 0)  # DLDevice
INT, FLOAT, BFLOAT = 0, 2, 4  # DLDataTypeCode


class Tensor:
    """What has memory, and says so by DLPack only."""

    def __init__(self, device: tuple[int, int], give: Callable[..., object]):
        self._device, self._give = device, give

    def __dlpack__(self, **how: object) -> object:
        return self._give(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_tensors_of_the_host():
    """Without a copy, whatever their strides; and tuples of them."""
    with Gpu("host") as gpu:
        whole = np.zeros((4, 2), np.float32)
        column = whole[::-1, 1]
        assert fill[2, 2, gpu](Tensor(CPU, column.__dlpack__), 2.5).wait(60)
        assert whole.tolist() == [[0, 2.5]] * 4
        numbers = np.array([3, 4, 0])
        numbers.flags.writeable = False
        with gpu.alloc(8, MemType.CPU_GPU) as out:
            assert first_of[1, 1, gpu](out, (Tensor(CPU, numbers.__dlpack__), 7)).wait(60)
            assert int(out.array.view("i8")[0]) == 10


@kernel
def first_of(out, pair):
    device.st64(out, pair[0][0] + pair[1])


@device.device_function
def second(numbers):
    return numbers[1]


def test_tensors_in_a_call_from_python():
    assert second(Tensor(CPU, np.array([3, 4]).__dlpack__)) == 4


def test_a_tensor_is_kept_until_its_kernel_has_ended():
    """Nobody else has it: it may have been made for the kernel."""
    with Gpu("host") as gpu, gpu.alloc(16, MemType.CPU_GPU) as memory:
        given = np.zeros(1, np.int64)
        kept = weakref.ref(given)
        words = memory.array.view("i8")
        launch = take_later[1, 1, gpu](Tensor(CPU, given.__dlpack__), memory)
        del given
        gc.collect()
        assert kept() is not None
        words[0] = 1
        assert launch.wait(60)
    del launch, words, memory  # they know each other
    until(lambda: gc.collect() is not None and kept() is None, "the array to be given back")


@kernel
def take_later(numbers, memory):
    while device.ld64(memory) == 0:
        device.yield_thread()
    numbers[0] = 5
    device.st64(memory + 8, numbers[0])


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]


PlaceOfCapsule = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.argtypes, new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, PlaceOfCapsule], ctypes.py_object


class OnCuda(Tensor):
    """A tensor of a GPU that is not there: its capsule is made by hand. `ended` tells that the capsule is gone."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...] | None, code: int = FLOAT, bits: int = 32,
        name: bytes = b"dltensor",
    ):
        super().__init__(CUDA, self._capsule)
        self.ended = False
        sizes = ctypes.c_int64 * len(shape)
        self._kept = sizes(*shape), sizes(*(strides or ())), name, PlaceOfCapsule(self._end)
        places = [ctypes.addressof(self._kept[0]), ctypes.addressof(self._kept[1]) if strides else None]
        self._tensor = DLTensor(1 << 32, CUDA, len(shape), code, bits, 1, *places, 64)

    def _capsule(self) -> object:
        return new_capsule(ctypes.addressof(self._tensor), self._kept[2], self._kept[3])

    def _end(self, capsule: int) -> None:
        self.ended = True


@pytest.mark.parametrize("shape, strides, contiguous", [
    ((6,), None, True), ((2, 3), None, True), ((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((6,), (-1,), False),
])
def test_tensors_of_a_gpu(shape, strides, contiguous):
    """Their address has the offset in it, and their strides are in bytes."""
    tensor = OnCuda(shape, strides)
    (taken,) = checked("fill", ["out"], (tensor,), True)
    in_bytes = [] if contiguous else [4 * n for n in strides]
    words = [(1 << 32) + 64, *shape, *in_bytes]
    assert kind_and_words("out", taken) == (ArrayType("float32", len(shape), contiguous), words)
    assert not tensor.ended
    del taken
    gc.collect()
    assert tensor.ended


def test_elements_of_a_gpu():
    for code, bits, dtype in ((INT, 16, "int16"), (1, 64, "uint64"), (FLOAT, 64, "float64"), (6, 8, "bool")):
        assert kind_and_words("out", OnCuda((1,), None, code, bits))[0] == ArrayType(dtype, 1, True)
    with pytest.raises(InvalidValueError, match=r"^out is an array of float16: kernels take arrays of bool, int8"):
        kind_and_words("out", OnCuda((1,), None, FLOAT, 16))
    with pytest.raises(InvalidValueError, match=r"^out is of type OnCuda, with elements that kernels do not know"):
        kind_and_words("out", OnCuda((1,), None, BFLOAT, 16))
    with pytest.raises(InvalidValueError, match="with elements that kernels do not know"):
        kind_and_words("out", OnCuda((1,), None, FLOAT, 4))


def refuse(**how: object) -> object:
    raise BufferError("it has a gradient")


TENSORS = {
    "of a GPU": (lambda: OnCuda((8,), None), r"out is memory of a GPU \(OnCuda\), but the kernel runs on the host"),
    "elsewhere": (lambda: Tensor(METAL, refuse), "out is of type Tensor, in memory of a device where no kernels run"),
    "refuses": (lambda: Tensor(CPU, refuse), "out is of type Tensor, which does not give its memory: it has a grad"),
    "versioned": (
        lambda: OnCuda((8,), None, name=b"dltensor_versioned"),
        "out is of type OnCuda, which does not give its memory: PyCapsule_GetPointer called with incorrect name",
    ),
    "no device": (
        lambda: SimpleNamespace(__dlpack__=refuse), "out is of type SimpleNamespace, memory that a kernel cannot take: "
    ),
}


@pytest.mark.parametrize("make, words", list(TENSORS.values()), ids=list(TENSORS))
def test_tensors_that_are_refused(make, words):
    with Gpu("host") as gpu, pytest.raises(InvalidValueError, match=f"^fill: argument {words}"):
        fill[1, 1, gpu](make(), 1)


# --- mistakes that the compiler finds --------------------------------------------------------------------------------


def test_an_array_is_no_address():
    """It is an address and a shape, and which of them was meant nobody knows."""
    with Gpu("host") as gpu:
        words = r"(?s)store with out of type ndarray does not .* \+ takes numbers, not an array of int64: register"
        with pytest.raises(InvalidValueError, match=words):
            store[1, 1, gpu](np.zeros(8, np.int64))


@kernel
def spread(value):
    device.block_broadcast(value, 0)


def test_a_group_function_takes_integers_only():
    """Like all device functions, wherever they are defined."""
    with Gpu("host") as gpu:
        words = r"(?s)spread with value of type float does not .* block_broadcast\(\) takes integers only, and value is"
        with pytest.raises(InvalidValueError, match=words):
            spread[1, 1, gpu](1.5)


def test_what_does_not_compile_is_shown():
    with Gpu("host") as gpu, gpu.alloc(8) as out:
        with pytest.raises(InvalidValueError) as caught:
            total[1, 1, gpu](out, 2.5)
        head, place, line, mark = str(caught.value).splitlines()
        assert head == "total with pair of type float does not compile:"
        assert place.startswith(f"{__file__}:")
        assert place.endswith(": in total(): a float cannot be indexed")
        assert line[mark.index("^") : mark.rindex("^") + 1] == "pair[0]"
        assert total[1, 1, gpu](out, (2, 3)).wait(60)
        assert int(out.read().view("i8")[0]) == 5


@pytest.mark.parametrize(
    "value, word",
    [
        (True, 1), (np.uint64(1 << 63), -1 << 63), (np.int8(-1), -1), (0xFFFF_FFFF_FFFF_FFFF, -1), (-1 << 63, -1 << 63),
        (WrOpcode.RDMA_READ, int(WrOpcode.RDMA_READ)), (np.bool_(True), 1),
    ],
)
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
