"""Reductions of warps and blocks, often and from many blocks at once."""

import numpy as np
import pytest

from gpunetio import Gpu, MemType, device, kernel

ROUNDS = 40
REDUCTIONS = 6


@device.device_function
def own_value(block, thread, turn):
    """Return a number of either sign, as large as they get, that differs from thread to thread."""
    return (block * 1000 + thread + 1) * ((turn * 0x9E37_79B9 + thread * 0x5851_F42D) % 0x1_0000_0007 - 0x8000_0000)


@kernel
def reduce_often(rounds, out):
    """For each round, store what each reduction returns."""
    at = out + 8 * REDUCTIONS * rounds * device.global_id()
    for i in range(rounds):
        value = own_value(device.block_idx(), device.thread_idx(), i)
        device.st64(at, device.warp_sum(value))
        device.st64(at + 8, device.warp_max(value))
        device.st64(at + 16, device.warp_min(value))
        device.st64(at + 24, device.block_sum(value))
        device.st64(at + 32, device.block_max(value))
        device.st64(at + 40, device.block_min(value))
        at += 8 * REDUCTIONS


def check(gpu: Gpu, grid: int, block: int, warp: int) -> None:
    with gpu.alloc(8 * REDUCTIONS * ROUNDS * grid * block, MemType.CPU_GPU) as out:
        assert reduce_often[grid, block, gpu](ROUNDS, out).wait(110)
        found = out.array.view(np.int64).reshape(grid, block, ROUNDS, REDUCTIONS)
        for b in range(grid):
            for i in range(ROUNDS):
                values = [own_value.py_func(b, t, i) for t in range(block)]
                for t in range(block):
                    lanes = values[t // warp * warp :][:warp]
                    expected = [sum(lanes), max(lanes), min(lanes), sum(values), max(values), min(values)]
                    assert found[b, t, i].tolist() == expected


@pytest.mark.parametrize("warp", [1, 2, 4])
def test_on_the_host(warp):
    with Gpu("host", warp=warp) as gpu:
        check(gpu, 2, 4, warp)


def test_a_thread_alone():
    with Gpu("host") as gpu:
        check(gpu, 3, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 20, 32, 96, 100, 1024])
def test_on_a_gpu(block):
    """Also where the last warp of a block has fewer lanes."""
    with Gpu("auto") as gpu:
        check(gpu, 3, block, 32)
