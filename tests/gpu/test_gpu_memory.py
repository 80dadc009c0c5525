"""Payload in the memory of a real GPU: what test_device_memory.py says with fake ones, of CUDA's own."""

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpunetio import Gpu, MemType, SharingMode, device, kernel, verbs
from gpunetio.errors import NotSupportedError
from gpunetio.gpu.memory import GpuMemory
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    FA,
    READ,
    REMOTE_INVALID,
    REQ,
    RESP_SEND,
    SEND,
    WRITE,
    Queue,
    atomic,
    connect,
    data,
    error_of,
    inline,
    raddr,
)
from pair import make_pair
from repository import environment

pytestmark = pytest.mark.gpu
KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 8, 4097, 300 * KIB + 7, 20 * MIB + 3)
PLACES = ("GPU", "pinned", "pageable")


class Place:
    """Registered memory of one kind, written and read through the CPU."""

    def __init__(self, gpu: Gpu, pd: verbs.PD, place: str, nbytes: int):
        self.memory: Any = np.zeros(nbytes, np.uint8)
        if place != "pageable":
            self.memory = gpu.alloc(nbytes, MemType.GPU if place == "GPU" else MemType.CPU_GPU)
        self.mr, self.nbytes = pd.register(self.memory), nbytes

    def write(self, values: np.ndarray) -> None:
        if isinstance(self.memory, GpuMemory):
            self.memory.write(values)
        else:
            self.memory[:] = values

    def read(self) -> np.ndarray:
        return self.memory.read() if isinstance(self.memory, GpuMemory) else self.memory.copy()

    def at(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        return data(self.mr.address + offset, self.mr.lkey, self.nbytes - offset if nbytes is None else nbytes)

    def remote(self, offset: int = 0) -> bytes:
        return raddr(self.mr.address + offset, self.mr.rkey)


class GpuEnds:
    """Two connected QPs, on one NIC or two."""

    def __init__(self, gpu: Gpu, names: tuple[str, ...]):
        self.gpu, self.contexts = gpu, [verbs.open(name) for name in names]
        self.pds = [ctx.create_pd() for ctx in self.contexts]
        self.a, self.b = Queue(self.pds[0]), Queue(self.pds[-1])
        connect(self.a, self.b, ack_timeout=18, retry_cnt=7)

    def place(self, side: int, place: str, nbytes: int) -> Place:
        return Place(self.gpu, self.pds[-side], place, nbytes)


@pytest.fixture(params=[("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
def ends(request: pytest.FixtureRequest) -> Iterator[GpuEnds]:
    with Gpu("auto") as gpu:
        ends = GpuEnds(gpu, request.param)
        yield ends
        for ctx in ends.contexts:
            ctx.close()


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.usefixtures("kept_by_contexts")
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_every_operation_between_all_places(ends, source, target):
    for nbytes in SIZES:
        here, there = ends.place(0, source, nbytes), ends.place(1, target, nbytes)
        values = noise(nbytes, nbytes)
        here.write(values)
        ends.a.post(WRITE, there.remote(), here.at())
        assert ends.a.done.next().opcode == REQ
        assert np.array_equal(there.read(), values)
        values = noise(nbytes, nbytes + 1)
        there.write(values)
        ends.a.post(READ, there.remote(), here.at())
        assert ends.a.done.next().opcode == REQ
        assert np.array_equal(here.read(), values)
        values = noise(nbytes, nbytes + 2)
        here.write(values)
        ends.b.receive(there.at())
        ends.a.post(SEND, here.at())
        assert ends.a.done.next().opcode == REQ
        assert ends.b.arrived.next().byte_cnt == nbytes
        assert np.array_equal(there.read(), values)


def test_batches(ends):
    here, there = ends.place(0, "GPU", MIB), ends.place(1, "pinned", MIB)
    values = noise(MIB, 1)
    here.write(values)
    for _ in range(20):
        for i in range(32):
            ends.a.put(WRITE, there.remote(i * 32 * KIB), here.at(i * 32 * KIB, 32 * KIB))
        ends.a.ring()
        assert {cqe.opcode for cqe in ends.a.done.take(32)} == {REQ}
        assert np.array_equal(there.read(), values)
        there.write(np.zeros(MIB, np.uint8))


@pytest.mark.host_memory
def test_inline_data_and_atomics(ends):
    there, word, old = ends.place(1, "GPU", 64), ends.place(1, "pinned", 64), ends.place(0, "GPU", 64)
    ends.a.post(WRITE, there.remote(3), inline(b"inline"))
    assert ends.a.done.next().opcode == REQ
    assert there.read()[3:9].tobytes() == b"inline"
    word.write(np.full(64, 1, np.uint8))
    ends.a.post(FA, word.remote(8), atomic(1), old.at(16, 8))
    assert ends.a.done.next().opcode == REQ
    assert old.read()[16:24].tobytes() == b"\1" * 8
    assert word.read()[8] == 2
    ends.a.post(FA, there.remote(), atomic(1), old.at(0, 8))
    assert error_of(ends.a.done.next())[0] == REMOTE_INVALID


def test_segments_of_all_places(ends):
    parts = [ends.place(0, place, 5000) for place in (*PLACES, *PLACES)]
    there = ends.place(1, "GPU", 40000)
    for i, part in enumerate(parts):
        part.write(noise(5000, i))
    ends.a.post(WRITE, there.remote(1), *(part.at(3, 4321) for part in parts))
    assert ends.a.done.next().opcode == REQ
    sent = np.concatenate([part.read()[3 : 3 + 4321] for part in parts])
    assert np.array_equal(there.read()[1 : 1 + len(sent)], sent)


class Bare:
    """An address, and nothing that keeps what is there."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }


# --- other libraries' memory -----------------------------------------------------------------------------------------


def test_torch_tensors(ends):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    here = torch.arange(100_000, dtype=torch.int32, device="cuda")
    there = torch.zeros(100_000, dtype=torch.int32, device="cuda")
    half = torch.zeros(64, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    mine, theirs = ends.pds[0].register(here), ends.pds[-1].register(there)
    assert (mine.address, mine.nbytes) == (here.data_ptr(), 400_000)
    ends.a.post(WRITE, raddr(theirs.address, theirs.rkey), data(mine.address, mine.lkey, mine.nbytes))
    assert ends.a.done.next().opcode == REQ
    assert torch.equal(here, there)
    assert ends.pds[0].register(half).nbytes == 128
    alive = weakref.ref(here)
    del here
    gc.collect()
    assert alive() is not None  # the region holds it
    mine.close()
    gc.collect()
    assert alive() is None


def test_cupy_arrays_and_dlpack(ends):
    cupy = pytest.importorskip("cupy")
    here, there = cupy.arange(50_000, dtype=cupy.float64), cupy.zeros(50_000)
    cupy.cuda.Device().synchronize()

    class OnlyDlpack:
        def __init__(self, array: Any):
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    mine, theirs = ends.pds[0].register(here), ends.pds[-1].register(OnlyDlpack(there))
    assert (mine.address, theirs.address) == (here.data.ptr, there.data.ptr)
    ends.a.post(WRITE, raddr(theirs.address, theirs.rkey), data(mine.address, mine.lkey, mine.nbytes))
    assert ends.a.done.next().opcode == REQ
    assert bool((here == there).all())


@pytest.mark.soft_nic
def test_a_range_that_leaves_the_allocation_is_refused(ends):
    memory = ends.gpu.alloc(4096, MemType.GPU)

    with pytest.raises(NotSupportedError, match="of one GPU"):
        ends.pds[0].register(Bare(memory.device_address, 1 << 40))


def test_memory_that_was_freed_under_its_region():
    """The registration of an address alone keeps nothing allocated: CUDA refuses the copy, and the reason says so.

    In a process of its own, which a driver that touches the memory would take with it.
    """
    ended = subprocess.run([sys.executable, __file__], env=environment(), capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, "COPY_FAILED"), ended.stderr


def free_under_region() -> None:
    from cuda.bindings import runtime  # type: ignore[attr-defined]

    ends = GpuEnds(Gpu("auto"), ("soft0",))
    error, address = runtime.cudaMalloc(64 * MIB)
    assert int(error) == 0

    region, there = ends.pds[0].register(Bare(int(address), MIB)), ends.place(1, "pinned", MIB)
    runtime.cudaFree(address)
    ends.a.post(WRITE, there.remote(), data(region.address, region.lkey, MIB))
    reason = Reason(error_of(ends.a.done.next())[1])
    assert "CUDA error" in ends.a.nic.reports[-1].message
    print(reason.name)


# --- kernels ---------------------------------------------------------------------------------------------------------


@kernel
def fill_and_put(qp, raddr, rkey, laddr, lkey, words, rounds, out):
    """Write a pattern into GPU memory, put it, and wait; the status of the first failure."""
    status = 0
    for i in range(rounds):
        for j in range(words):
            device.st64(laddr + 8 * j, i << 32 | j)
        ticket = device.put(qp, raddr + 8 * words * i, rkey, laddr, lkey, 8 * words, SharingMode.EXCLUSIVE)
        status = min(status, device.wait(qp, ticket, SharingMode.EXCLUSIVE))
    device.st64(out, status)


@kernel
def await_flag(flag, payload, words, out):
    """Poll a flag in GPU memory; how many words of the payload before it are not there when it shows."""
    start = device.clock_ns()
    while device.ld_acquire64(flag) == 0 and device.clock_ns() - start < 10_000_000_000:
        pass
    missing = 0 if device.ld_acquire64(flag) != 0 else words
    for j in range(words):
        if device.ld_relaxed64(payload + 8 * j) != j + 1:
            missing += 1
    device.st64(out, missing)


def test_a_kernel_puts_from_gpu_memory():
    """What the kernel has stored before it rings is what is copied."""
    words, rounds = 1000, 100
    with Gpu("auto") as gpu, verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu)
        here, there = gpu.alloc(8 * words, MemType.GPU), gpu.alloc(8 * words * rounds, MemType.GPU)
        mine, theirs = pair.pd.register(here), pair.pd.register(there)
        with gpu.alloc(8, MemType.CPU_GPU) as out:
            out.array[:] = 0xEE
            launch = fill_and_put[1, 1, gpu](
                pair.a, there.address, theirs.rkey, here.address, mine.lkey, words, rounds, out
            )
            assert launch.wait(60)
            assert out.array.view(np.int64)[0] == 0
        got = there.read().view(np.int64).reshape(rounds, words)
        expected = np.arange(rounds)[:, None] << 32 | np.arange(words)
        assert np.array_equal(got, expected)
        pair.a.close()
        pair.b.close()


def test_a_kernel_that_sees_the_flag_sees_the_payload():
    words = 1 << 17
    with Gpu("auto") as gpu:
        ends = GpuEnds(gpu, ("soft0",))
        source, payload = ends.place(0, "pinned", 8 * words), ends.place(1, "GPU", 8 * words)
        flag, one = ends.place(1, "GPU", 8), ends.place(0, "pinned", 8)
        source.write(np.arange(1, words + 1).view(np.uint8))
        one.write(np.full(8, 1, np.uint8))
        with gpu.alloc(8, MemType.CPU_GPU) as out:
            for _ in range(20):
                payload.write(np.zeros(8 * words, np.uint8))
                flag.write(np.zeros(8, np.uint8))
                out.array[:] = 0xEE
                launch = await_flag[1, 1, gpu](flag.memory, payload.memory, words, out)
                ends.a.put(WRITE, payload.remote(), source.at())
                ends.a.put(WRITE, flag.remote(), one.at())
                ends.a.ring()
                assert launch.wait(30)
                assert out.array.view(np.int64)[0] == 0
                assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ]
        ends.contexts[0].close()


def test_copies_go_on_beside_a_kernel_that_runs():
    """As a queue's owner does that polls for what it has posted."""

    with Gpu("auto") as gpu:
        ends = GpuEnds(gpu, ("soft0",))
        here, there = ends.place(0, "GPU", MIB), ends.place(1, "GPU", MIB)
        flag, words = ends.place(1, "GPU", 8), ends.place(1, "GPU", 8)
        one = ends.place(0, "pageable", 8)
        one.write(np.full(8, 1, np.uint8))
        with gpu.alloc(8, MemType.CPU_GPU) as out:
            launch = await_flag[1, 1, gpu](flag.memory, words.memory, 0, out)
            for _ in range(10):
                ends.a.post(WRITE, there.remote(), here.at())
                assert ends.a.done.next(10).opcode == REQ
            ends.a.post(WRITE, flag.remote(), one.at())
            assert ends.a.done.next(10).opcode == REQ
            assert launch.wait(30)
        ends.contexts[0].close()


def test_the_current_context_of_the_caller_is_left_alone(ends):
    driver = ctypes.CDLL("libcuda.so.1")

    def current() -> int | None:
        context = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(context))
        return context.value

    memory = ends.gpu.alloc(4096, MemType.GPU)
    before = current()
    ends.pds[0].register(memory).close()
    assert current() == before


def test_receives_complete_in_order_with_their_bytes(ends):
    here, there = ends.place(0, "GPU", 64 * KIB), ends.place(1, "GPU", 64 * KIB)
    values = noise(64 * KIB, 3)
    here.write(values)
    for i in range(8):
        ends.b.receive(there.at(8 * KIB * i, 8 * KIB))
        ends.a.put(SEND, here.at(8 * KIB * i, 8 * KIB))
    ends.a.ring()
    assert [cqe.opcode for cqe in ends.b.arrived.take(8)] == [RESP_SEND] * 8
    assert np.array_equal(there.read(), values)


if __name__ == "__main__":
    free_under_region()
