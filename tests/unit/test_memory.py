"""Memory that a NIC may touch: what lies behind an object, for how long, and what is no memory."""

import array
import ctypes
import gc
import logging
import mmap
import os
import pickle
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import log
from gpunetio.errors import BadStateError, InvalidValueError
from gpunetio.memory import PAGE, HostMemory, MappedMemory, Region, is_accessible, round_up
from tensors import OnlyCuda, OnlyDlpack


def place(region: Region) -> tuple[int, int]:
    return region.address, region.nbytes


# --- host memory


def test_host_memory():
    memory = HostMemory(100)
    assert memory.address % PAGE == 0
    assert memory.nbytes == len(memory.array) == PAGE
    assert not memory.array.any()
    memory.view(np.uint32, 8, 2)[1] = 0x01020304
    assert ctypes.string_at(memory.address + 12, 4) == memory.array[12:16].tobytes() != bytes(4)
    with pytest.raises(BadStateError, match="cannot be pickled"):
        pickle.dumps(memory)
    memory.close()
    memory.close()
    assert memory.closed
    for nbytes in (0, -1):
        with pytest.raises(InvalidValueError, match=f"cannot allocate {nbytes} bytes"):
            HostMemory(nbytes)


def test_host_memory_is_not_garbage_collected():
    address = HostMemory(PAGE).address
    gc.collect()
    assert ctypes.string_at(address, 1) == b"\0"  # a segmentation fault otherwise


def test_closed_host_memory_stays_mapped_for_those_who_use_it():
    memory = HostMemory(PAGE)
    region = Region.of(memory)
    memory.array[:4] = 7
    memory.close()
    gc.collect()
    assert ctypes.string_at(region.address, 4) == b"\7" * 4
    with pytest.raises(BadStateError, match="the HostMemory is closed"):
        Region.of(memory)


def test_closed_host_memory_goes():
    def mapped() -> int:
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0])

    before = mapped()
    memory = HostMemory(64 << 20)
    region: Region | None = Region.of(memory)
    memory.close()
    assert mapped() - before >= (64 << 20) // PAGE  # the region has it
    del region
    assert mapped() - before < (32 << 20) // PAGE


# --- memory of another process


@pytest.fixture
def shared():
    memory = HostMemory(PAGE + 1, shared=True)
    yield memory
    memory.close()


def read_only(memory: HostMemory) -> int:
    return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)


def test_shared_memory(shared):
    assert shared.nbytes == 2 * PAGE
    assert os.fstat(shared.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(shared.fd)
    assert HostMemory(1).fd is None
    with pytest.raises(InvalidValueError, match="does not allow writing: the owner has sealed the memory"):
        MappedMemory(shared.fd, shared.nbytes, writable=True)
    there = MappedMemory(shared.fd, shared.nbytes)
    assert there.address != shared.address
    shared.array[5] = 55
    assert there.array[5] == 55
    shared.close()
    assert shared.fd is None
    assert there.array[5] == 55  # it is there until this side closes, too
    there.close()


def test_memory_that_both_write_until_it_is_sealed():
    shared = HostMemory(PAGE + 1, shared=True, sealed=False)
    there = MappedMemory(shared.fd, shared.nbytes, writable=True)
    shared.seal()
    shared.seal()
    with pytest.raises(InvalidValueError, match="sealed the memory"):
        MappedMemory(shared.fd, shared.nbytes, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(shared.fd, b"x", 0)
    shared.array[5], there.array[PAGE] = 55, 66
    assert (there.array[5], shared.array[PAGE]) == (55, 66)
    shared.close()
    assert shared.fd is None
    there.array[PAGE + 1] = 1  # it is there until this side closes, too
    there.close()


def test_shared_memory_to_look_at(shared):
    fd = read_only(shared)
    there = MappedMemory(fd, shared.nbytes)
    with pytest.raises(InvalidValueError, match=f"descriptor {fd} does not allow writing"):
        MappedMemory(fd, shared.nbytes, writable=True)
    os.close(fd)
    shared.array[5] = 55
    assert there.view(np.uint8, 5)[0] == 55
    with pytest.raises(ValueError, match="read-only"):
        there.array[5] = 1
    assert not is_accessible(there.address, 1, writable=True)
    there.close()


def test_shared_memory_keeps_its_size(shared):
    for size in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fd, size)
    for size in (0, -1, PAGE, 2 * PAGE - 1, 3 * PAGE):
        with pytest.raises(InvalidValueError, match=f"has {2 * PAGE} bytes, not the {size} announced"):
            MappedMemory(shared.fd, size)


def test_memory_that_could_shrink_is_refused(tmp_path):
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, PAGE)
    (tmp_path / "file").write_bytes(bytes(PAGE))
    file, (end, other) = os.open(tmp_path / "file", os.O_RDWR), os.pipe()
    for fd in (loose, file, end):
        with pytest.raises(InvalidValueError, match="is not sealed memory"):
            MappedMemory(fd, PAGE)
    for fd in (loose, file, end, other):
        os.close(fd)


@given(st.integers(0, 1 << 40), st.integers(0, 20).map(lambda n: 1 << n))
def test_round_up(nbytes, multiple):
    rounded = round_up(nbytes, multiple)
    assert rounded % multiple == 0
    assert nbytes <= rounded < nbytes + multiple


# --- what lies behind an object


def test_buffers():
    block = (ctypes.c_int32 * 4)()
    assert place(Region.of(block)) == (ctypes.addressof(block), 16)
    numbers = array.array("d", [1, 2, 3])
    assert place(Region.of(numbers)) == (numbers.buffer_info()[0], 24)
    with mmap.mmap(-1, PAGE) as shared:
        region = Region.of(shared)
        assert (region.nbytes, region.readonly) == (PAGE, False)
        del region
    assert Region.of(b"abc").readonly
    assert not Region.of(bytearray(b"abc")).readonly
    whole = np.arange(10, dtype=np.uint8)
    assert place(Region.of(memoryview(whole)[2:5])) == (whole.ctypes.data + 2, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        np.zeros((3, 5), np.float32), np.zeros((3, 5), np.float32, order="F"), np.zeros((), np.int64),
        np.zeros(7, ">u4"), np.zeros(3, [("a", "<u2"), ("b", ">f8")]), np.zeros((2, 3), ">i8", order="F"),
        np.zeros((4, 6), np.int16)[:1], np.zeros((4, 6), np.int16)[2:4], np.zeros(4, bool), np.zeros(4, np.complex64),
    ],
    ids=lambda tensor: f"{tensor.dtype.str}{tensor.shape}",
)
def test_arrays(tensor):
    assert place(Region.of(tensor)) == (tensor.ctypes.data, tensor.nbytes)


STRIDED = [
    np.zeros(8)[::2], np.zeros((4, 4))[:, 1], np.zeros((4, 4))[:, :2], np.zeros(8)[::-1], np.broadcast_to(1.0, 5),
]
AS_IT_IS = [np.zeros((3, 5), np.float32), np.zeros((4, 6), np.int16)[::2][:1], np.zeros((2, 1, 3)), np.zeros(5, bool)]


@pytest.mark.parametrize("tensor", STRIDED, ids=lambda tensor: f"{tensor.shape}{tensor.strides}")
def test_what_is_not_contiguous(tensor):
    with pytest.raises(InvalidValueError, match="not contiguous"):
        Region.of(tensor)
    with pytest.raises(InvalidValueError, match="only C-contiguous arrays"):
        Region.of(OnlyCuda(tensor))
    if tensor.flags.writeable:
        with pytest.raises(InvalidValueError, match="not C-contiguous"):
            Region.of(OnlyDlpack(tensor))


def test_other_order_needs_a_buffer():
    tensor = np.zeros((2, 3), order="F")
    for wrap in (OnlyDlpack, OnlyCuda):
        with pytest.raises(InvalidValueError, match="C-contiguous"):
            Region.of(wrap(tensor))


@pytest.mark.parametrize("tensor", AS_IT_IS, ids=lambda tensor: f"{tensor.shape}{tensor.strides}")
def test_cuda_array_interface(tensor):
    region = Region.of(OnlyCuda(tensor))
    assert (*place(region), region.cuda, region.readonly) == (tensor.ctypes.data, tensor.nbytes, True, False)
    assert place(Region.of(OnlyCuda(tensor, strides=None))) == place(region)
    assert Region.of(OnlyCuda(tensor, data=(tensor.ctypes.data, True))).readonly


@pytest.mark.parametrize("tensor", AS_IT_IS, ids=lambda tensor: f"{tensor.shape}{tensor.strides}")
def test_dlpack(tensor):
    region = Region.of(OnlyDlpack(tensor))
    assert (*place(region), region.cuda, region.readonly) == (tensor.ctypes.data, tensor.nbytes, False, False)


@pytest.mark.parametrize("nothing", [b"", np.zeros(0), np.zeros((3, 0)), OnlyCuda(np.zeros((3, 0))),
                                     OnlyDlpack(np.zeros((3, 0)))])
def test_nothing(nothing):
    assert Region.of(nothing).nbytes == 0


def test_dlpack_holds_the_tensor_and_lets_it_go():
    tensor = np.zeros(1000)
    alive, count = weakref.ref(tensor), sys.getrefcount(tensor)
    regions = [Region.of(OnlyDlpack(tensor)) for _ in range(50)]
    assert sys.getrefcount(tensor) >= count + 50
    del regions
    gc.collect()
    assert sys.getrefcount(tensor) == count  # every capsule's deleter has run, once
    region: Region | None = Region.of(OnlyDlpack(tensor))
    del tensor
    gc.collect()
    assert alive() is not None
    del region
    gc.collect()
    assert alive() is None


def test_dlpack_tensor_that_nothing_else_holds():
    alive: list[weakref.ref] = []

    class Fresh:
        def __dlpack__(self, **options: object) -> object:
            tensor = np.zeros(8)
            alive.append(weakref.ref(tensor))
            return tensor.__dlpack__()

    region: Region | None = Region.of(Fresh())
    gc.collect()
    assert alive[0]() is not None
    del region
    gc.collect()
    assert alive[0]() is None


def test_dlpack_that_fails():
    class Fails(OnlyDlpack):
        answer: object = None

        def __dlpack__(self, **options: object) -> object:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    fails = Fails(np.zeros(1))
    used = np.zeros(4).__dlpack__()
    np.from_dlpack(type("Once", (), {"__dlpack__": lambda self, **_: used, "__dlpack_device__": lambda self: (1, 0)})())
    for fails.answer in (BufferError("requires grad"), RuntimeError("on a device"), 5, used):
        with pytest.raises(InvalidValueError, match="Fails gives no DLPack tensor: "):
            Region.of(fails)
    readonly = np.zeros(4)
    readonly.flags.writeable = False
    with pytest.raises(InvalidValueError, match=r"OnlyDlpack gives no DLPack tensor: .*readonly"):
        Region.of(OnlyDlpack(readonly))


def test_no_memory():
    released = memoryview(b"abc")
    released.release()
    for thing in (5, "text", None, [1, 2], released):
        with pytest.raises(InvalidValueError, match=f"{type(thing).__name__} is not memory"):
            Region.of(thing)
    with pytest.raises(InvalidValueError, match="ndarray"):
        Region.of(np.array(["2020-01-01"], "M8[D]"))  # no format that a buffer could name


def test_objects_that_say_where_they_are():
    class Elsewhere:
        address, nbytes, is_cuda = 0x7000_0000_0000, 512, True

        @property
        def array(self):
            raise BadStateError("no CPU mapping")

    region = Region.of(Elsewhere())
    assert (*place(region), region.cuda) == (0x7000_0000_0000, 512, True)


# --- logging


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (None, logging.WARNING), ("", logging.WARNING), ("0", logging.CRITICAL), ("2", logging.CRITICAL),
        ("3", logging.ERROR), ("4", logging.WARNING), ("5", logging.INFO), ("6", logging.INFO), ("7", logging.DEBUG),
        ("70", logging.DEBUG), ("-1", logging.WARNING), ("debug", logging.WARNING), ("²", logging.WARNING),
        pytest.param("9" * 5000, logging.WARNING, id="5000 digits"),
    ],
)
def test_log_level(text, level):
    assert log.level_from_environment(text) == level


@pytest.mark.parametrize(
    ("protection", "readable", "writable"),
    [
        (mmap.PROT_READ | mmap.PROT_WRITE, True, True),
        (mmap.PROT_READ, True, False),
        (0, False, False),  # as CUDA reserves the addresses of GPU memory
    ],
)
def test_what_the_process_may_touch(protection, readable, writable):
    with mmap.mmap(-1, 4 * PAGE, prot=protection) as area:
        view = np.frombuffer(area, np.uint8)
        start, nbytes = int(view.ctypes.data), view.nbytes
        del view
        for address, count in ((start, nbytes), (start + 5, 1), (start + PAGE, 2 * PAGE)):
            assert is_accessible(address, count, False) == readable
            assert is_accessible(address, count, True) == writable


@pytest.mark.parametrize("address", [8, (1 << 63) - PAGE])
def test_nobody_may_touch_what_is_not_mapped(address):
    assert not is_accessible(address, 8, False)
