"""Rings of a semaphore: many producers, and one consumer for each ring."""

import numpy as np
import pytest

from eth_kernels import free_items, one_step, take_and_fill
from gpunetio import Gpu, MemType, Semaphore, device
from gpunetio.errors import InvalidValueError
from gpunetio.formats.eth_device import SemaphoreStatus

TAKE, NEXT, FREE = range(3)


def step(gpu: Gpu, semaphore: Semaphore, what: int, ring: int = 0) -> int:
    with gpu.alloc(8, MemType.CPU_GPU) as out:
        assert one_step[1, 1, gpu](semaphore, what, ring, out).wait(60)
        return int(out.array.view(np.int64)[0])


@pytest.mark.parametrize(
    ("items", "rings", "count"), [(8, 1, 400), (3, 3, 400), (12, 2, 400), (2, 1, 400), (1 << 20, 1, 1_000_000)]
)
def test_all_that_producers_hand_over_arrives_in_their_order(gpu, items, rings, count):
    """No number is lost or comes twice, and those of one producer stay in order, for many laps of the ring."""
    producers = 3 * rings
    if gpu.target == "cuda":
        count = min(count, 20_000)  # items are in memory of the CPU: each trip of a GPU there takes a microsecond
    with (
        gpu.create_semaphore(items, info="<i8", rings=rings) as semaphore,
        gpu.alloc(8 * producers * count, MemType.CPU_GPU) as seen, gpu.alloc(64, MemType.CPU_GPU) as freed,
        gpu.alloc(8 * producers, MemType.CPU_GPU) as taken, gpu.alloc(8, MemType.CPU_GPU) as began,
    ):
        free_items[1, 1, gpu](semaphore, 0, seen, freed).wait(60)  # loaded before another kernel waits for it
        take_and_fill[1, 1, gpu](semaphore, rings, 0, began, taken).wait(60)
        began.array[:] = 0
        consumers = free_items[rings, 1, gpu](semaphore, 3 * count, seen, freed)
        assert take_and_fill[producers, 1, gpu](semaphore, rings, count, began, taken).wait(60)
        assert consumers.wait(60)
        assert taken.array.view(np.int64).tolist() == [count] * producers
        assert freed.array.view(np.int64)[:rings].tolist() == [3 * count] * rings
        for ring, numbers in enumerate(seen.array.view(np.int64).reshape(rings, 3 * count)):
            for producer in range(ring, producers, rings):
                assert numbers[numbers >> 32 == producer].tolist() == [producer << 32 | i for i in range(count)]


def test_an_item_is_taken_once_and_consumed_in_order(gpu):
    """The second item is ready first, and yet comes second. A ring has every second item, and is full after two."""
    with gpu.create_semaphore(4, info="<i8", rings=2) as semaphore:
        assert step(gpu, semaphore, NEXT, 1) == step(gpu, semaphore, FREE, 1) == device.EAGAIN
        assert [step(gpu, semaphore, TAKE, 1) for _ in range(3)] == [1, 3, device.ENOBUFS]
        semaphore.set_status(3, SemaphoreStatus.READY)
        assert step(gpu, semaphore, NEXT, 1) == device.EAGAIN
        semaphore.set_status(1, SemaphoreStatus.READY)
        for index in (1, 3):
            assert step(gpu, semaphore, NEXT, 1) == step(gpu, semaphore, NEXT, 1) == index
            assert step(gpu, semaphore, FREE, 1) == device.OK
            assert semaphore.status(index) is SemaphoreStatus.FREE
            assert step(gpu, semaphore, TAKE, 1) == index
        assert step(gpu, semaphore, TAKE, 0) == 0


@pytest.mark.parametrize("ring", [-1, 2, 1 << 40])
def test_a_ring_that_is_not_there(gpu, ring):
    with gpu.create_semaphore(4, rings=2) as semaphore:
        assert {step(gpu, semaphore, what, ring) for what in (TAKE, NEXT, FREE)} == {device.EINVAL}


@pytest.mark.parametrize(("rings", "words"), [(3, "rings = 3: 4 items"), (0, "rings = 0"), (5, "rings = 5")])
def test_rings_that_cannot_be_made(gpu, rings, words):
    with pytest.raises(InvalidValueError, match=words):
        gpu.create_semaphore(4, rings=rings)
