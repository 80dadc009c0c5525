"""Memory of a `Gpu` as an array for kernels. On CUDA it is described only: tests/cuda/test_cuda_stand_in.py."""

import gc

import numpy as np
import pytest

from gpunetio import Gpu, MemType, kernel
from gpunetio.errors import BadStateError, InvalidValueError


@kernel
def add_rows(table, sums):
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            sums[row] = sums[row] + table[row, column]


@pytest.mark.parametrize("kind", [MemType.GPU, MemType.CPU_GPU])
def test_kernels_take_it_and_change_it(gpu, kind):
    with gpu.alloc(48, kind) as memory, gpu.alloc(16 + 8, kind) as out:
        memory.write(np.arange(6, dtype=np.float64))
        sums = out.as_array(2, "f8")
        assert add_rows[1, 1, gpu](memory.as_array((2, 3), np.float64), sums).wait(60)
        assert out.read().view("f8").tolist() == [3, 12, 0]


@pytest.mark.host_memory
def test_on_the_host_it_is_numpys():
    with Gpu("host") as gpu, gpu.alloc(48, MemType.CPU_GPU) as memory:
        array = memory.as_array((4, 6), np.uint16)
        array[1, 2] = 0x1234
        assert (array.shape, array.dtype) == ((4, 6), np.uint16)
        assert memory.array[16:18].tolist() == [0x34, 0x12]
        assert memory.as_array(48).tolist() == memory.array.tolist()
        assert memory.as_array(()).shape == ()


@pytest.mark.host_memory
def test_it_keeps_the_memory_allocated():
    with Gpu("host") as gpu:
        memory = gpu.alloc(4096, MemType.CPU_GPU)
        array = memory.as_array(4096)
        array[:] = 7
        memory.close()
        del memory
        gc.collect()
        assert set(array.tolist()) == {7}


def test_mistakes_are_named(gpu):
    with gpu.alloc(48) as memory:
        with pytest.raises(InvalidValueError, match=r"\[0, \+56\) is outside the memory's 48 bytes"):
            memory.as_array(7, np.int64)
        with pytest.raises(InvalidValueError, match=r"memory is no array of shape \(-1,\) of int64"):
            memory.as_array(-1, np.int64)
        with pytest.raises(InvalidValueError, match=r"memory is no array of shape \(6,\) of object"):
            memory.as_array(6, object)
        with pytest.raises(InvalidValueError, match=r"shape"):
            memory.as_array((1.5,), np.int64)  # type: ignore[arg-type]
    with pytest.raises(BadStateError, match="this GPU memory is closed"):
        memory.as_array(6, np.int64)
