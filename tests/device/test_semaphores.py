"""Semaphores: items that kernels hand to each other and to the host, with packets and memory of the user's."""

import time

import numpy as np
import pytest

from eth_kernels import empty_items, fill_items, look
from gpunetio import Gpu, GpuMemory, MemType, device
from gpunetio.formats.eth_device import DEV_SEMAPHORE, SEMAPHORE_ITEM, SemaphoreStatus

ITEMS, INFO, INFO_BYTES, SUM = 64, 1024, 32, 2048  # offsets, and the bytes of a piece
COUNT = 5
FREE, READY = SemaphoreStatus.FREE, SemaphoreStatus.READY


def made(gpu: Gpu, info: bool = True) -> GpuMemory:
    memory = gpu.alloc(4096, MemType.CPU_GPU)
    memory.array[:] = 0
    s = DEV_SEMAPHORE.at(memory.array)
    s["items"], s["items_num"] = memory.device_address + ITEMS, COUNT
    if info:
        s["info"], s["info_bytes"] = memory.device_address + INFO, INFO_BYTES
    return memory


def item(memory: GpuMemory, index: int) -> np.ndarray:
    return SEMAPHORE_ITEM.at(memory.array, ITEMS + SEMAPHORE_ITEM.size * index)


def total(items: int) -> int:
    """What the consumer adds up."""
    return sum(3 * i + 1000 * i + i % 7 for i in range(items))


def test_kernels_hand_over_to_each_other(gpu):
    """The consumer sees all that the producer has stored, in the order of the items, lap after lap."""
    with made(gpu) as memory, gpu.alloc(64, MemType.CPU_GPU) as one, gpu.alloc(64, MemType.CPU_GPU) as other:
        for kernel in ((empty_items, one.device_address), (fill_items,)):  # loaded before one waits for the other
            assert kernel[0][1, 1, gpu](memory, COUNT, 0, *kernel[1:], other).wait(110)
        one.array[:] = other.array[:] = 0xEE
        consumer = empty_items[1, 1, gpu](memory, COUNT, 200, memory.device_address + SUM, one)
        producer = fill_items[1, 1, gpu](memory, COUNT, 200, other)
        assert consumer.wait(110)
        assert producer.wait(110)
        assert one.array.view(np.int64)[0] == other.array.view(np.int64)[0] == device.OK
        assert memory.array[SUM : SUM + 8].view(np.int64)[0] == total(COUNT * 200)


def test_a_kernel_hands_over_to_the_host(gpu):
    """The host looks at the status and gives each item back."""
    with made(gpu) as memory, gpu.alloc(64, MemType.CPU_GPU) as out:
        producer = fill_items[1, 1, gpu](memory, COUNT, 20, out)
        found, end = 0, time.monotonic() + 100
        for i in range(COUNT * 20):
            one = item(memory, i % COUNT)
            while one["status"] != READY and time.monotonic() < end:
                time.sleep(0)
            info = memory.array[INFO + INFO_BYTES * (i % COUNT) :][:8].view(np.int64)
            found += int(info[0]) + int(one["first"]) + int(one["packets"])
            one["status"] = FREE
        assert producer.wait(60)
        assert found == total(COUNT * 20)


@pytest.mark.parametrize("index", [0, COUNT - 1])
def test_an_item(gpu, index):
    with made(gpu) as memory, gpu.alloc(64, MemType.CPU_GPU) as out:
        item(memory, index)["status"] = SemaphoreStatus.DONE
        assert look[1, 1, gpu](memory, index, out).wait(60)
        info = memory.device_address + INFO + INFO_BYTES * index
        found = out.array.view(np.int64)[:8].tolist()
        assert found == [device.SEM_DONE, 0, 0, device.ETIMEDOUT, info, 0, 2, 1]
        assert item(memory, index)["status"] == 9
        assert not item(memory, COUNT)["status"]


@pytest.mark.parametrize("index", [-1, COUNT, 1 << 40])
def test_an_item_that_is_not_there(gpu, index):
    with made(gpu) as memory, gpu.alloc(64, MemType.CPU_GPU) as out:
        before = memory.array.copy()
        assert look[1, 1, gpu](memory, index, out).wait(60)
        assert set(out.array.view(np.int64)[:8].tolist()) == {device.EINVAL}
        assert np.array_equal(memory.array, before)


def test_a_semaphore_without_memory_of_the_users(gpu):
    with made(gpu, info=False) as memory, gpu.alloc(64, MemType.CPU_GPU) as out:
        assert look[1, 1, gpu](memory, 0, out).wait(60)
        assert out.array.view(np.int64)[4] == device.EINVAL
