"""Semaphores: what the host sees of them, and what kernels are given."""

import numpy as np
import pytest

from gpunetio import Gpu, Semaphore, SemaphoreStatus, kernel
from gpunetio.device import (
    ld64,
    ld_acquire64,
    sem_info,
    sem_next,
    sem_set_status,
    sem_take,
    st64,
    st_release64,
)
from gpunetio.enums import MemType
from gpunetio.errors import BadStateError, InvalidValueError
from gpunetio.formats.eth_device import DEV_SEMAPHORE, SEMAPHORE_ITEM
from gpunetio.memory import is_accessible

INFO = np.dtype([("address", "<i8"), ("count", "<u4"), ("what", "u1", (4,))])
ITEMS, INFO_AT = DEV_SEMAPHORE.items, DEV_SEMAPHORE.info
STATUS_SIZE = SEMAPHORE_ITEM.size
READY, DONE = int(SemaphoreStatus.READY), int(SemaphoreStatus.DONE)


@kernel
def answer(semaphore, count):
    """Wait for each item; double the first word of what it carries."""
    items, info = ld64(semaphore + ITEMS), ld64(semaphore + INFO_AT)
    for i in range(count):
        polls = 0
        while ld_acquire64(items + i * STATUS_SIZE) & 0xFFFFFFFF != READY:
            polls += 1
            if polls > 1 << 30:
                return
        st64(info + i * 16, 2 * ld64(info + i * 16))
        st_release64(items + i * STATUS_SIZE, DONE)


@pytest.mark.parametrize("kind", list(MemType))
def test_items_go_to_a_kernel_and_back(kind):
    with Gpu("host") as gpu, gpu.create_semaphore(4, memory=kind, info=INFO) as semaphore:
        assert [semaphore.status(i) for i in range(4)] == [SemaphoreStatus.FREE] * 4
        launch = answer[1, 1, gpu](semaphore, 4)
        for i in range(4):
            semaphore.write_info(i, (21 * i, i, (1, 2, 3, 4)))
            semaphore.set_status(i, SemaphoreStatus.READY)
        assert launch.wait(20)
        for i in range(4):
            assert semaphore.status(i) is SemaphoreStatus.DONE
            found = semaphore.read_info(i)
            assert (found["address"], found["count"], list(found["what"])) == (42 * i, i, [1, 2, 3, 4])


@pytest.mark.host_memory
def test_info_of_any_type_lies_in_memory_of_its_own():
    with Gpu("host") as gpu:
        semaphore = gpu.create_semaphore(3, info="<f8", info_memory=MemType.GPU)
        semaphore.write_info(2, 1.5)
        assert semaphore.read_info(2) == 1.5
        assert semaphore.info_address(2) - semaphore.info_address(0) == 16
        assert is_accessible(semaphore.device_address, DEV_SEMAPHORE.size, True)
        assert semaphore.packets(1) == (0, 0)
        semaphore.close()
        semaphore.close()
        for use in (lambda: semaphore.device_address, lambda: semaphore.status(0), lambda: semaphore.info_address(0)):
            with pytest.raises(BadStateError, match="closed"):
                use()
    with Gpu("host") as gpu, Semaphore(gpu, 1) as plain, pytest.raises(BadStateError, match="create it with info="):
        plain.read_info(0)


@pytest.mark.parametrize("items, options, words", [
    (0, {}, "items = 0"), (-1, {}, "items = -1"), (2.5, {}, "items = 2.5"), (1, {"info": object}, "info = object"),
    (1, {"info": "V0"}, "one byte or more"), (1, {"memory": 7}, "memory = 7"),
])
def test_what_cannot_be_created(items, options, words):
    with Gpu("host") as gpu:
        with pytest.raises(InvalidValueError, match=words):
            gpu.create_semaphore(items, **options)
        assert not gpu._memory


def test_items_that_do_not_exist():
    with Gpu("host") as gpu, gpu.create_semaphore(2) as semaphore:
        for index in (-1, 2):
            with pytest.raises(InvalidValueError, match="index"):
                semaphore.status(index)
            with pytest.raises(InvalidValueError, match="index"):
                semaphore.set_status(index, SemaphoreStatus.READY)
        with pytest.raises(InvalidValueError, match="status = 9"):
            semaphore.set_status(0, 9)


def test_closing_the_gpu_closes_its_semaphores():
    gpu = Gpu("host")
    semaphore = gpu.create_semaphore(2, info="<i4")
    gpu.close()
    assert semaphore.closed
    semaphore.close()


@pytest.mark.host_memory
def test_threads_of_the_host_use_a_semaphore_beside_a_gpu():
    """By a structure of their own, which names the same items."""
    with Gpu("host") as gpu:
        semaphore = gpu.create_semaphore(4, info=INFO, rings=2)
        host = semaphore.host_address
        assert sem_take(host, 1) == 1
        assert sem_info(host, 1) == semaphore.info_address(1)
        assert sem_set_status(host, 1, READY) == 0
        assert semaphore.status(1) is SemaphoreStatus.READY
        assert sem_next(semaphore.device_address, 1) == 1
        semaphore.close()
        with pytest.raises(BadStateError, match="closed"):
            _ = semaphore.host_address
