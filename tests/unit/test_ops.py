"""Primitives mean the same on both targets: checked against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import Gpu, MemType, device, kernel
from gpunetio.jit import ops
from pair import run_on

U64 = (1 << 64) - 1
words = st.integers(-(1 << 63), (1 << 63) - 1)


def swapped(value: int, nbytes: int) -> int:
    return int.from_bytes((value & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little"), "big")


def signed(value: int) -> int:
    value &= U64
    return value - (1 << 64) if value >> 63 else value


@kernel
def swap_all(value, out):
    ops.st64(out, ops.be16(value))
    ops.st64(out + 8, ops.be32(value))
    ops.st64(out + 16, ops.be64(value))
    ops.st64(out + 24, ops.pack64(value, value + 1))


@pytest.fixture(scope="module")
def host():
    with Gpu("host") as opened:
        yield opened


@given(value=words)
def test_byte_order_on_the_host(host, value):
    got = run_on(host, swap_all, value, count=4)
    assert got == [swapped(value, 2), swapped(value, 4), signed(swapped(value, 8)),
                   signed((value & 0xFFFF_FFFF) | (value + 1 & 0xFFFF_FFFF) << 32)]


@pytest.mark.parametrize("value", [0, 1, -1, 0x0102030405060708, -(1 << 63)])
def test_byte_order(gpu, value):
    got = run_on(gpu, swap_all, value, count=4)
    assert got[:3] == [swapped(value, 2), swapped(value, 4), signed(swapped(value, 8))]


def carry_less(a: int, b: int) -> int:
    """The lower 64 bits of the product of two polynomials over GF(2)."""
    product = 0
    for bit in range(64):
        product ^= (a & U64) << bit if b >> bit & 1 else 0
    return signed(product)


@kernel
def multiply(a, b, out):
    ops.st64(out, ops.clmul(a, b))


@given(a=words, b=words)
def test_carry_less_products_on_the_host(host, a, b):
    assert run_on(host, multiply, a, b, count=1) == [carry_less(a, b)]


@pytest.mark.parametrize(("a", "b"), [(0, 5), (1, -1), (-1, -1), (0x1DB710641, 0xEDB88320), (-(1 << 63), 3)])
def test_carry_less_products(gpu, a, b):
    assert run_on(gpu, multiply, a, b, count=1) == [carry_less(a, b)]


@kernel
def narrow(value, out):
    ops.st8(out + 32, value)
    ops.st16(out + 34, value)
    ops.st32(out + 36, value)
    ops.st64(out, ops.ld8(out + 32))
    ops.st64(out + 8, ops.ld16(out + 34))
    ops.st64(out + 16, ops.ld32(out + 36))
    ops.st_relaxed32(out + 40, value)
    ops.st64(out + 24, ops.ld_relaxed32(out + 40) + ops.ld_relaxed8(out + 40) + ops.ld_acquire32(out + 40))


@pytest.mark.parametrize("value", [0, 0x7F, 0x80, -1, 0x1122334455667788])
def test_narrow_loads_zero_extend_and_narrow_stores_truncate(gpu, value):
    low = value & 0xFFFF_FFFF
    assert run_on(gpu, narrow, value, count=4) == [value & 0xFF, value & 0xFFFF, low, 2 * low + (value & 0xFF)]


@kernel
def atomics(value, out):
    cell = out + 64
    ops.st64(cell, 5)
    ops.st64(out, ops.fetch_add_gpu64(cell, value))
    ops.st64(out + 8, ops.fetch_add_cta64(cell, 1))
    ops.st64(out + 16, ops.fetch_add_sys64(cell, 1))
    ops.st64(cell, 5)
    ops.st64(out + 24, ops.fetch_max_gpu64(cell, 3))
    ops.st64(out + 32, ops.fetch_max_cta64(cell, 9))
    ops.st64(out + 40, ops.exchange64(cell, 77))
    ops.st64(out + 48, ops.cas_gpu64(cell, 77, 1) * 10 + ops.cas_gpu64(cell, 2, 3))
    ops.st64(out + 56, ops.cas_sys64(cell, 1, 8) * 10 + ops.cas_sys32(cell, 8, 4))
    ops.st64(out + 72, ops.cas_sys32(cell, 4, -1))
    ops.st64(out + 80, ops.cas_sys32(cell, -1, 6))


def test_atomics_return_the_old_value(gpu):
    got = run_on(gpu, atomics, 7, count=11)
    assert got == [5, 12, 13, 5, 5, 9, 77 * 10 + 1, 1 * 10 + 8, 6, 4, 0xFFFF_FFFF]


@kernel
def count_up(rounds, out):
    for _ in range(rounds):
        ops.fetch_add_gpu64(out, 1)


def test_concurrent_adds_lose_nothing(gpu):
    assert run_on(gpu, count_up, 5000, count=1, grid=2, block=4) == [5000 * 8]


@kernel
def copy_bytes(offset, shift, nbytes, out):
    for i in range(256):
        ops.st8(out + i, i)
    ops.copy(out + 256 + shift, out + offset, nbytes)


@pytest.mark.parametrize(("offset", "shift", "nbytes"), [(0, 0, 64), (0, 0, 61), (3, 0, 50), (0, 5, 9), (1, 1, 0)])
def test_copy(gpu, offset, shift, nbytes):
    got = np.array(run_on(gpu, copy_bytes, offset, shift, nbytes, count=64), np.int64).view(np.uint8)
    expected = np.zeros(512, np.uint8)
    expected[:256] = np.arange(256)
    expected[256 + shift : 256 + shift + nbytes] = expected[offset : offset + nbytes]
    assert np.array_equal(got, expected)


@kernel
def two_halves(low, high, out):
    ops.st128(out, low, high)
    ops.st_mmio64(out + 16, low)
    ops.st64(out + 24, ops.ld_fixed16(out + 64) + ops.ld_fixed32(out + 64) + ops.ld_fixed64(out + 64))


def test_wide_and_fixed_accesses(gpu):
    assert run_on(gpu, two_halves, 1, -2, count=9) == [1, -2, 1, 0, 0, 0, 0, 0, 0]


@kernel
def follow(first, steps, out):
    for _ in range(steps):
        first = ops.ld_fixed64(first)
    ops.st64(out, first)


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_addresses_that_replace_each_other(gpu, steps):
    """What is loaded comes into the variable that held the address."""
    with gpu.alloc(4096, MemType.CPU_GPU) as words:
        words.array.view(np.int64)[:16] = words.device_address + 8 * np.arange(1, 17)
        assert run_on(gpu, follow, words, steps, count=1) == [words.device_address + 8 * steps]


@kernel
def repeat(value, times, out):
    swapped = narrow = value
    for _ in range(times):
        swapped = ops.be64(swapped)
        narrow = ops.be16(narrow)
        value = ops.first_lane(value)
    ops.st64(out, swapped)
    ops.st64(out + 8, narrow)
    ops.st64(out + 16, value)


def test_results_that_replace_their_operands(gpu):
    value = 0x1122334455667700
    assert run_on(gpu, repeat, value, 3, count=3) == [swapped(value, 8), swapped(value, 2), 0]


@kernel
def look_ahead(value, out):
    ops.st64(out + 8, value)
    ops.prefetch(out + 8)
    ops.prefetch_to_write(out + 16)
    ops.st64(out, ops.ld64(out + 8))


def test_prefetch_changes_nothing(gpu):
    assert run_on(gpu, look_ahead, 7, count=3) == [7, 7, 0]


@kernel
def watch_the_clock(out):
    ops.st64(out, ops.clock_ns())
    for _ in range(1000):
        ops.pause()
        ops.yield_thread()
    ops.st64(out + 8, ops.clock_ns())


def test_the_clock_runs_forward(gpu):
    before, after = run_on(gpu, watch_the_clock, count=2)
    assert 0 < before < after


@kernel
def who_am_i(out):
    at = out + 48 * device.global_id()
    ops.st64(at, ops.thread_idx())
    ops.st64(at + 8, ops.block_idx())
    ops.st64(at + 16, ops.block_dim())
    ops.st64(at + 24, ops.grid_dim())
    ops.st64(at + 32, ops.lane_id())
    ops.st64(at + 40, ops.warp_size())


def test_identity(gpu):
    got = np.array(run_on(gpu, who_am_i, count=36, grid=2, block=3)).reshape(6, 6)
    warp = 32 if gpu.target == "cuda" else 1
    assert got.tolist() == [[t, b, 3, 2, t % warp, warp] for b in range(2) for t in range(3)]


@kernel
def rotate(rounds, out):
    """Every round each thread reads what its neighbour wrote before the barrier."""
    me, n = ops.thread_idx(), ops.block_dim()
    for _ in range(rounds):
        value = ops.ld_relaxed64(out + 8 * ((me + 1) % n))
        ops.block_sync()
        ops.st_relaxed64(out + 8 * me, value + 1)
        ops.block_sync()


def test_block_sync_separates_the_rounds(gpu):
    assert run_on(gpu, rotate, 50, count=8, block=8) == [50] * 8


@kernel
def shout(out):
    lane = ops.lane_id()
    total = 0
    for source in range(ops.warp_size()):
        total += ops.warp_broadcast(100 * lane + 7, source)
        ops.warp_sync()
    ops.st64(out + 8 * ops.global_id(), total)


@pytest.mark.parametrize("warp", [1, 2, 4])
def test_warp_broadcast_on_host_warps(warp):
    with Gpu("host", warp=warp) as host:
        expected = sum(100 * lane + 7 for lane in range(warp))
        assert run_on(host, shout, count=4, block=4) == ([expected] * 4 if warp > 1 else [7] * 4)


@kernel
def count_often(rounds, out):
    """Each round other threads count; all agree on how many."""
    me = ops.thread_idx()
    right = 0
    for i in range(rounds):
        which = 5 if (me + i) % 3 == 0 else 0
        expected = 0
        for thread in range(ops.block_dim()):
            expected += 1 if (thread + i) % 3 == 0 else 0
        right += 1 if ops.block_count(which) == expected else 0
        lanes = 0
        for lane in range(ops.warp_size()):
            lanes += 1 if (me - ops.lane_id() + lane + i) % 3 == 0 else 0
        right += 1 if ops.warp_count(which) == lanes else 0
    ops.st64(out + 8 * ops.global_id(), right)


@pytest.mark.parametrize("warp", [1, 2, 4])
def test_counts_in_groups_of_the_host(warp):
    with Gpu("host", warp=warp) as host:
        assert run_on(host, count_often, 50, count=16, grid=2, block=8) == [100] * 16


@pytest.mark.gpu
def test_counts_in_groups_of_a_gpu():
    with Gpu("auto") as opened:
        assert run_on(opened, count_often, 50, count=128, grid=2, block=64) == [100] * 128


@pytest.mark.gpu
def test_warp_broadcast_on_a_gpu():
    with Gpu("auto") as opened:
        assert run_on(opened, shout, count=32, block=32) == [sum(100 * lane + 7 for lane in range(32))] * 32



@kernel
def act_together(out):
    lane, lanes = ops.lane_or_0(), ops.lanes_here()
    odd = ops.lanes_where(1 if lane % 2 else 0)
    at = out + 8 * 7 * ops.thread_idx()
    ops.st64(at, odd)
    ops.st64(at + 8, ops.first_lane(odd))
    ops.st64(at + 16, ops.first_lane(ops.lanes_where(1)))
    ops.st64(at + 24, ops.from_lane(lane * 1000 + 7, lanes - 1))
    ops.st64(at + 32, ops.sum_up_to(lane + 1))
    ops.st64(at + 40, lanes)
    ops.st64(at + 48, ops.sum_of_lanes(lane + 1))


def test_a_thread_of_the_host_is_one_lane(host):
    assert run_on(host, act_together, count=7) == [0, 32, 0, 7, 1, 1, 1]


@pytest.mark.gpu
def test_lanes_act_together():
    odd = 0xAAAA_AAAA
    with Gpu("auto") as opened:
        got = run_on(opened, act_together, count=7 * 32, block=32)
    expected = [[odd, 1, 0, 31007, sum(range(1, lane + 2)), 32, sum(range(33))] for lane in range(32)]
    assert np.reshape(got, (32, 7)).tolist() == expected


@kernel
def move_some(source, target, stride, nbytes, out):
    ops.move_8_lines(target, source, stride, source + nbytes)
    ops.st64(out, 0)


@pytest.mark.parametrize("nbytes", [0, 1, 16, 17, 64, 8 * 32, 9 * 32])
@pytest.mark.parametrize("stride", [16, 32])
def test_lines_are_moved_up_to_an_end(gpu, stride, nbytes):
    """8 lines of 16 bytes at most: those that begin before the end."""
    with gpu.alloc(512) as source, gpu.alloc(512) as target:
        data = np.random.default_rng(3).integers(1, 256, 512, np.uint8)
        source.write(data)
        run_on(gpu, move_some, source, target, stride, nbytes, count=1)
        expected = np.zeros(512, np.uint8)
        for line in range(8):
            if stride * line < nbytes:
                expected[stride * line :][:16] = data[stride * line :][:16]
        assert np.array_equal(target.read(), expected)
