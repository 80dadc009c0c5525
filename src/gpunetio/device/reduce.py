"""Reductions: combine the values of all threads of a warp or a block, and return the result in each thread.

On CUDA, the lanes of a warp exchange their values by shuffles, and the warps of a block through its shared memory. A
block may have any number of threads, so its last warp may have fewer lanes.
"""

from __future__ import annotations

from ..jit.compile import device_function
from ..jit.ops import (
    BLOCK_PARTS, block_dim, block_group, block_slot, block_sync, group_max, group_sum, lane_id, ld64, on_host,
    shuffle_down, st64, thread_idx, warp_broadcast, warp_group, warp_size,
)

_SUM, _MAX = 0, 1


@device_function
def _both(one: int, other: int, how: int) -> int:
    return one + other if how == _SUM else max(one, other)


@device_function
def _in_host_group(group: int, value: int, leads: int, how: int) -> int:
    return group_sum(group, value) if how == _SUM else group_max(group, value, leads)


@device_function
def _in_warp(value: int, how: int) -> int:
    if on_host():
        return value if warp_size() == 1 else _in_host_group(warp_group(), value, lane_id() == 0, how)
    lane = lane_id()
    lanes = min(warp_size(), block_dim() - thread_idx() + lane)
    for distance in (16, 8, 4, 2, 1):
        above = shuffle_down(value, distance)
        if lane + distance < lanes:
            value = _both(value, above, how)
    return warp_broadcast(value, 0)


@device_function
def _in_block(value: int, how: int) -> int:
    if on_host():
        return value if block_dim() == 1 else _in_host_group(block_group(), value, thread_idx() == 0, how)
    parts = block_slot() + BLOCK_PARTS
    value = _in_warp(value, how)
    if lane_id() == 0:
        st64(parts + 8 * (thread_idx() // warp_size()), value)
    block_sync()
    value = ld64(parts)
    for warp in range(1, (block_dim() + warp_size() - 1) // warp_size()):
        value = _both(value, ld64(parts + 8 * warp), how)
    block_sync()  # all threads have read the parts before the next reduction
    return value


@device_function
def warp_sum(value: int) -> int:
    """Return the sum of the lanes' values in every lane of the warp. All call it, and wait for each other."""
    return _in_warp(value, _SUM)


@device_function
def warp_max(value: int) -> int:
    """Return the largest of the lanes' values in every lane of the warp. All call it, and wait for each other."""
    return _in_warp(value, _MAX)


@device_function
def warp_min(value: int) -> int:
    """Return the smallest of the lanes' values in every lane of the warp. All call it, and wait for each other."""
    return ~_in_warp(~value, _MAX)


@device_function
def block_sum(value: int) -> int:
    """Return the sum of the threads' values in every thread of the block. All call it, and wait for each other."""
    return _in_block(value, _SUM)


@device_function
def block_max(value: int) -> int:
    """Return the largest of the threads' values in every thread of the block. All call it, and wait for each other."""
    return _in_block(value, _MAX)


@device_function
def block_min(value: int) -> int:
    """Return the smallest of the threads' values in every thread of the block. All call it, and wait for each other."""
    return ~_in_block(~value, _MAX)
