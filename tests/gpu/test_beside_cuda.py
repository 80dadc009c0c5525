"""A kernel that waits for a NIC on its GPU, beside calls of CUDA: the NIC goes on, whatever they wait for."""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpunetio import Gpu, MemType, device, kernel, verbs
from gpunetio.jit.code import Launch
from gpunetio.jit.cuda_launch import cuda_runtime
from gpunetio.providers import PortConfig
from nic_rig import until
from pair import Pair, make_pair

pytestmark = pytest.mark.gpu
ROUNDS = [pytest.param(300, id="few"), pytest.param(10_000, id="many", marks=pytest.mark.slow)]
STOP, DONE, STATUS = 0, 1, 2  # words
FOR_GOOD = 1 << 40
WHILE = 50_000  # requests, so that a call falls into them


@kernel
def put_again_and_again(qp, raddr, rkey, laddr, lkey, most, words):
    """Put and wait, until the first word says stop, or `most` times. Count in the second, and leave the status."""
    status = device.OK
    done = 0
    while status == device.OK and done < most and device.ld_relaxed64(words + 8 * STOP) == 0:
        ticket = device.put(qp, raddr, rkey, laddr, lkey, 8, device.EXCLUSIVE)
        status = device.wait(qp, ticket, device.EXCLUSIVE)
        done += 1
        device.st64(words + 8 * DONE, done)
    device.st64(words + 8 * STATUS, status)


@dataclass
class Busy:
    """A pair of queues whose NIC is on the GPU."""

    pair: Pair
    words: np.ndarray
    address: int

    def launch(self, most: int = FOR_GOOD) -> Launch:
        self.words[:] = 0
        p = self.pair
        where = p.there.address, p.there_mr.rkey, p.here.address, p.here_mr.lkey
        launch = put_again_and_again[1, 1, p.gpu](p.a, *where, most, self.address)
        until(lambda: self.words[DONE] > 0, "the first request")
        return launch

    def goes_on(self) -> None:
        """Wait for a request that began after this call."""
        before = int(self.words[DONE])
        until(lambda: self.words[DONE] > before + 1, "another request")

    def end(self, launch: Launch) -> None:
        self.words[STOP] = 1
        assert launch.wait(30)
        assert self.words[STATUS] == device.OK


@pytest.fixture
def busy() -> Iterator[Busy]:
    port = PortConfig(engine="gpu0")
    with verbs.open("soft0", port=port) as ctx, Gpu("0") as gpu, gpu.alloc(4096, MemType.CPU_GPU) as memory:
        pair = make_pair(ctx, gpu)
        yield Busy(pair, memory.array.view(np.int64)[:3], memory.device_address)
        pair.a.close()
        pair.b.close()


def checked(result: tuple[Any, ...]) -> Any:
    assert result[0] == 0
    return result[1] if len(result) > 1 else None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_calls_that_wait_for_no_kernel(busy, rounds):
    """Allocation, registration, stream-ordered frees, and launches of a loaded kernel."""
    rt = cuda_runtime()
    stream = checked(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    launch = busy.launch()
    for i in range(rounds):
        nbytes = 1 << 12 + i % 10
        address = checked(rt.cudaMallocAsync(nbytes, stream))
        checked(rt.cudaMemsetAsync(address, i & 0xFF, nbytes, stream))
        checked(rt.cudaFreeAsync(address, stream))
        if i % 16 == 0:
            checked(rt.cudaStreamSynchronize(stream))
        if i % 100 == 0:
            busy.goes_on()
    busy.goes_on()
    kept = [checked(rt.cudaMalloc(1 << 16)) for _ in range(10)]
    busy.goes_on()
    busy.end(launch)
    for address in kept:
        checked(rt.cudaFree(address))
    checked(rt.cudaStreamDestroy(stream))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_pytorch(busy, rounds):
    torch = pytest.importorskip("torch")
    numbers = torch.zeros(1 << 16, device="cuda")
    other = torch.zeros(1 << 16, device="cuda")
    numbers.add_(1)  # loads the kernel: the first time waits for those that run
    other.copy_(numbers)
    torch.cuda.synchronize()
    launch = busy.launch()
    for i in range(rounds):
        numbers.add_(1)
        if i % 8 == 0:
            other.copy_(numbers)
        if i % 500 == 0:
            assert float(numbers[i % 100]) == i + 2
            busy.goes_on()
    assert float(numbers[0]) == rounds + 1
    busy.end(launch)


def blocking() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Calls that wait for all running kernels; each entry prepares one."""
    rt = cuda_runtime()

    def free() -> Callable[[], Any]:
        address = checked(rt.cudaMalloc(1 << 20))
        return lambda: rt.cudaFree(address)

    def free_host() -> Callable[[], Any]:
        address = checked(rt.cudaHostAlloc(1 << 20, 0))
        return lambda: rt.cudaFreeHost(address)

    def unregister() -> Callable[[], Any]:
        memory = mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        checked(rt.cudaHostRegister(address, 1 << 20, 0))

        def call() -> Any:
            assert memory
            return rt.cudaHostUnregister(address)

        return call

    def synchronize() -> Callable[[], Any]:
        return rt.cudaDeviceSynchronize

    return {"free": free, "free_host": free_host, "unregister": unregister, "synchronize": synchronize}


@pytest.mark.parametrize("name", ["free", "free_host", "unregister", "synchronize"])
def test_calls_that_wait_for_kernels(busy, name):
    """They return when the kernel has ended, and its requests are executed meanwhile."""
    for _ in range(3):
        call = blocking()[name]()
        launch = busy.launch(WHILE)
        checked(call())
        assert launch.wait(30)
        assert busy.words[STATUS] == device.OK
        assert busy.words[DONE] == WHILE
