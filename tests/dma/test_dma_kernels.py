"""Copies that kernels enqueue and commit."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.core import BufArray, MemoryMap, RemoteMemory
from gpunetio.device import (
    EINVAL,
    EIO,
    ENOBUFS,
    ETIMEDOUT,
    OK,
    block_dim,
    block_idx,
    block_sync,
    buf_get,
    dma_commit,
    dma_memcpy,
    dma_wait,
    dma_wait_all,
    global_id,
    kernel,
    ld64,
    ld_relaxed64,
    st64,
    thread_idx,
    yield_thread,
)
from gpunetio.dma import Dma
from gpunetio.enums import MemType
from gpunetio.errors import BadStateError
from gpunetio.gpu import Gpu, GpuMemory
from gpunetio.verbs import PD

ELEMENT, ELEMENTS = 1024, 64
SHARED, FAR = MemType.CPU_GPU, MemType.GPU  # memory of the host, and of a GPU if there is one
PATIENCE = 60.0


class Bench:
    """A Dma for kernels, and two memories cut into bufs."""

    def __init__(
        self, pd: PD, gpu: Gpu, depth: int = 64, timeout: float = 30.0, places: Sequence[MemType] = (SHARED, SHARED)
    ):
        self.pd, self.gpu = pd, gpu
        self.source, self.target = (gpu.alloc(ELEMENT * ELEMENTS, place) for place in places)
        self.data = (np.arange(ELEMENT * ELEMENTS) % 251).astype(np.uint8)
        self.source.write(self.data)
        self.here, self.there = (MemoryMap(pd, memory) for memory in (self.source, self.target))
        self.read, self.written = (BufArray(gpu, each, ELEMENTS, ELEMENT) for each in (self.here, self.there))
        self.given: list[GpuMemory] = []  # to kernels
        self.dma = Dma(pd, gpu=gpu, depth=depth, timeout=timeout)
        self.dma.start()

    def run(self, function: Any, block: int, *arguments: Any, grid: int = 1, results: int = 8) -> list[int]:
        """What the kernel stores in the words of its last argument."""
        out = self.words(np.zeros(results, np.int64))
        launch = function[grid, block, self.gpu](self.dma, self.read, self.written, *arguments, out)
        assert launch.wait(timeout=PATIENCE)
        return [int(word) for word in out.array.view(np.int64)[:results]]

    @property
    def copied(self) -> np.ndarray:
        """What is in the target."""
        return self.target.read()

    def words(self, values: np.ndarray) -> GpuMemory:
        memory = self.gpu.alloc(max(8, values.nbytes), SHARED)
        memory.array[: values.nbytes] = values.astype(np.int64).ravel().view(np.uint8)
        self.given.append(memory)
        return memory


@pytest.fixture
def make(gpu: Gpu) -> Iterator[Callable[..., Bench]]:
    with verbs.open("soft0") as ctx:
        yield lambda **options: Bench(ctx.create_pd(), gpu, **options)


@kernel
def program(dma, read, written, rows, count, out):
    """Each thread enqueues its part of `rows`: buf, offset, buf, offset, bytes; thread 0 commits and waits."""
    i = thread_idx()
    while i < count:
        row = rows + 40 * i
        ticket = dma_memcpy(
            dma, buf_get(read, ld64(row)), ld64(row + 8), buf_get(written, ld64(row + 16)), ld64(row + 24),
            ld64(row + 32),
        )
        if ticket < 0:
            st64(out, ticket)
        i += block_dim()
    block_sync()
    if thread_idx() == 0:
        st64(out + 8, dma_wait(dma, dma_commit(dma)))


@pytest.mark.parametrize("places", [
    (SHARED, SHARED),
    *(pytest.param(places, marks=pytest.mark.slow) for places in ((SHARED, FAR), (FAR, SHARED), (FAR, FAR))),
])
def test_random_programs_against_plain_python(make, places):
    """Copies of any length and alignment, enqueued by 1 to 8 threads: each to an element of its own."""
    bench, r = make(places=places), Random(11)
    expected = np.zeros(ELEMENT * ELEMENTS, np.uint8)
    for _ in range(12):
        count = r.randint(1, 64)
        rows = []
        for i in r.sample(range(ELEMENTS), count):
            nbytes = r.choice((1, 2, 63, 64, 65, r.randint(1, ELEMENT), ELEMENT))
            begin, at = r.randint(0, ELEMENT - nbytes), r.randint(0, ELEMENT - nbytes)
            rows.append((r.randrange(ELEMENTS), begin, i, at, nbytes))
        assert bench.run(program, r.choice((1, 2, 8)), bench.words(np.array(rows)), count)[:2] == [0, OK]
        for a, from_, b, to, nbytes in rows:
            at, source = b * ELEMENT + to, a * ELEMENT + from_
            expected[at : at + nbytes] = bench.data[source : source + nbytes]
        assert np.array_equal(bench.copied, expected)


@kernel
def laps(dma, read, written, rounds, out):
    """Threads of several blocks enqueue, commit and wait, each for itself."""
    i = global_id()
    for _ in range(rounds):
        ticket = dma_memcpy(dma, buf_get(read, i), 0, buf_get(written, i), 0, 100)
        status = dma_commit(dma) if ticket >= 0 else ticket
        if status >= 0:
            status = dma_wait(dma, ticket)
        if status != OK:
            st64(out + 8 * i, status)


def test_threads_of_two_blocks_on_a_small_queue(make):
    bench = make(depth=8)
    assert bench.run(laps, 2, 300, grid=2) == [0] * 8
    copied = bench.copied.reshape(ELEMENTS, ELEMENT)
    assert np.array_equal(copied[:4, :100], bench.data.reshape(ELEMENTS, ELEMENT)[:4, :100])
    assert not copied[:4, 100:].any()
    assert not copied[4:].any()


@kernel
def fill_up(dma, read, written, depth, out):
    """Nothing is copied before the commit; a full queue says so, and goes on after it."""
    st64(out, dma_commit(dma))
    st64(out + 8, dma_wait_all(dma))
    for i in range(depth):
        st64(out + 16, dma_memcpy(dma, buf_get(read, i), 0, buf_get(written, i), 0, 8))
    st64(out + 24, dma_memcpy(dma, buf_get(read, 0), 0, buf_get(written, 9), 0, 8))
    st64(out + 32, dma_commit(dma))
    st64(out + 40, dma_memcpy(dma, buf_get(read, 0), 0, buf_get(written, 9), 0, 8))
    st64(out + 48, dma_commit(dma))
    st64(out + 56, dma_wait_all(dma))


def test_a_queue_full_of_copies_without_commit(make):
    bench = make(depth=8)
    assert bench.run(fill_up, 1, 8) == [EINVAL, OK, 7, ENOBUFS, 7, 8, 8, OK]
    copied = bench.copied.reshape(ELEMENTS, ELEMENT)
    assert np.array_equal(copied[:8, :8], bench.data.reshape(ELEMENTS, ELEMENT)[:8, :8])
    assert np.array_equal(copied[9, :8], bench.data[:8])


@kernel
def bounds(dma, read, written, far, rows, count, out):
    for i in range(count):
        row = rows + 40 * i
        st64(out + 8 * i, dma_memcpy(
            dma, buf_get(read, ld64(row)), ld64(row + 8), buf_get(written, ld64(row + 16)), ld64(row + 24),
            ld64(row + 32),
        ))
    st64(out + 8 * count, dma_memcpy(dma, buf_get(far, 0), 0, buf_get(written, 0), 0, 8))
    st64(out + 8 * count + 8, dma_commit(dma))


def test_what_is_outside_of_a_buf_is_refused(make):
    bench = make()
    bad = [
        (0, 0, 0, 0, 0), (0, 0, 0, 0, -1), (0, 0, 0, 0, ELEMENT + 1), (0, 1, 0, 0, ELEMENT), (0, 0, 0, 1, ELEMENT),
        (0, -1, 0, 0, 8), (0, 0, 0, -1, 8), (0, ELEMENT, 0, 0, 1), (ELEMENTS, 0, 0, 0, 8), (0, 0, -1, 0, 8),
        (0, (1 << 63) - 4, 0, 0, 8), (0, 0, 0, 0, (1 << 31) + 1), (0, 0, 0, 0, (1 << 63) - 1),
    ]
    far = BufArray(bench.gpu, RemoteMemory(bench.here.address, ELEMENT, bench.here.rkey), 1, ELEMENT)
    found = bench.run(bounds, 1, far, bench.words(np.array(bad)), len(bad), results=len(bad) + 2)
    assert found == [EINVAL] * (len(bad) + 2)  # the last one: there is nothing to commit
    assert not bench.copied.any()


@kernel
def late(dma, read, written, commits, out):
    ticket = dma_memcpy(dma, buf_get(read, 0), 0, buf_get(written, 0), 0, 8)
    if commits:
        dma_commit(dma)
    st64(out, ticket)
    st64(out + 8, dma_wait(dma, ticket))
    st64(out + 16, dma_wait(dma, EINVAL))


@pytest.mark.parametrize("commits", [0, 1])
def test_waits_end(make, commits):
    """By the context's deadline, when nobody commits, or the NIC stands still."""
    bench = make(timeout=0.05)
    if commits:
        bench.pd.ctx.provider.nic.pause()
    assert bench.run(late, 1, commits)[:3] == [0, ETIMEDOUT, EINVAL]
    bench.pd.ctx.provider.nic.resume()


def test_a_copy_that_fails(make):
    """It ends with EIO, and the queue says why; a new start makes it good."""
    bench = make()
    good, locked = bench.written, MemoryMap(bench.pd, bytes(ELEMENT))
    bench.written = bad = BufArray(bench.gpu, locked, 1, ELEMENT)
    assert bench.run(late, 1, 1)[:2] == [0, EIO]
    error = bench.dma.queue.last_error()
    assert error is not None
    assert "LKEY_RIGHTS" in str(error) or "local key" in str(error)
    bench.dma.stop()
    with pytest.raises(BadStateError, match="no queue for kernels"):
        _ = bench.dma.device_address
    bench.dma.start()
    bench.written = good
    assert bench.run(late, 1, 1)[:2] == [0, OK]
    bad.close()


@kernel
def until_told(dma, read, written, out):
    while ld_relaxed64(out) == 0:
        yield_thread()
    dma_memcpy(dma, buf_get(read, block_idx()), 0, buf_get(written, 0), 0, 8)


def test_a_context_stays_while_a_kernel_has_it(make):
    bench = make()
    out = bench.words(np.zeros(1))
    launch = until_told[1, 1, bench.gpu](bench.dma, bench.read, bench.written, out)
    with pytest.raises(BadStateError, match="cannot be stopped while a kernel uses it"):
        bench.dma.stop()
    out.array.view(np.int64)[0] = 1
    assert launch.wait(timeout=PATIENCE)
    bench.dma.close()
    assert bench.dma.closed
