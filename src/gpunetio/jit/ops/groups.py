"""Synchronisation within a warp or a block."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from ..compile import device_function
from .atomics import fetch_add_sys64, fetch_max_gpu64
from .lanes import count_lanes, from_lane, lanes_where
from .lowering import nothing, op, ptx
from .memory import ld64, ld_acquire64, ld_relaxed64, st64, st_release64
from .patience import yield_thread
from .threads import block_dim, block_group, block_idx, block_slot, lane_id, on_host, thread_idx, warp_group, warp_size


@op(cpu=nothing, cuda=ptx("bar.sync 0;", convergent=True))
def _cuda_block_sync() -> None: ...


@op(cpu=nothing, cuda=ptx("bar.warp.sync 0xffffffff;", convergent=True))
def _cuda_warp_sync() -> None: ...


_COUNT = "{.reg .pred p; setp.ne.u32 p, $1, 0; bar.red.popc.u32 $0, 0, p;}"


@op(32, ret=32, cpu=lambda b, which: which, cuda=ptx(_COUNT, 32, convergent=True))
def _cuda_block_count(which: int) -> int: ...


# A host group is a record of int64 words: arrived, generation, size, value, total. The slot of a block follows.

_GENERATION, _SIZE, _VALUE, _TOTAL = 8, 16, 24, 32
_BROADCAST = 64  # in the slot
_SIGN = -(1 << 63)  # turns the order of signed numbers into that of unsigned numbers


@device_function
def _host_barrier(group):
    generation = ld_relaxed64(group + _GENERATION)
    if fetch_add_sys64(group, 1) + 1 == ld64(group + _SIZE):
        st64(group, 0)
        st_release64(group + _GENERATION, generation + 1)
    else:
        while ld_acquire64(group + _GENERATION) == generation:
            yield_thread()


@device_function
def block_sync():
    """Wait for every thread of the block (`__syncthreads`)."""
    if on_host():
        if block_dim() > 1:
            _host_barrier(block_group())
    else:
        _cuda_block_sync()


@device_function
def warp_sync():
    """Wait for every lane of the warp (`__syncwarp`)."""
    if on_host():
        if warp_size() > 1:
            _host_barrier(warp_group())
    else:
        _cuda_warp_sync()


@device_function
def warp_broadcast(value, lane):
    """Return the `value` of lane `lane` in every lane of the warp (`__shfl_sync`)."""
    if on_host():
        if warp_size() == 1:
            return value
        group = warp_group()
        if lane_id() == lane:
            st64(group + _VALUE, value)
        _host_barrier(group)
        value = ld64(group + _VALUE)
        _host_barrier(group)
        return value
    return from_lane(value, lane)


@device_function
def block_broadcast(value, thread):
    """Return the `value` of thread `thread` in every thread of the block."""
    if block_dim() == 1:
        return value
    slot = block_slot() + _BROADCAST
    if thread_idx() == thread:
        st64(slot, value)
    block_sync()
    value = ld64(slot)
    block_sync()  # all threads have read it before the next broadcast
    return value


@device_function
def group_sum(group, value):
    """Return the sum of the values of all threads of a host group, through a word that is 0 between sums.

    Each thread restores the word before it arrives at the next barrier.
    """
    fetch_add_sys64(group + _TOTAL, value)
    _host_barrier(group)
    total = ld_relaxed64(group + _TOTAL)
    _host_barrier(group)
    fetch_add_sys64(group + _TOTAL, -value)
    return total


@device_function
def group_max(group, value, leads):
    """Return the largest value of all threads of a host group. One of the threads `leads`."""
    if leads:
        st64(group + _VALUE, value ^ _SIGN)
    _host_barrier(group)
    if not leads:
        fetch_max_gpu64(group + _VALUE, value ^ _SIGN)
    _host_barrier(group)
    largest = ld64(group + _VALUE) ^ _SIGN
    _host_barrier(group)
    return largest


@device_function
def warp_count(which):
    """Return in how many lanes of the warp `which` is not 0. All lanes call it, and wait for each other."""
    if on_host():
        if warp_size() == 1:
            return 1 if which else 0
        return group_sum(warp_group(), 1 if which else 0)
    return count_lanes(lanes_where(which))


@device_function
def block_count(which):
    """Return in how many threads of the block `which` is not 0 (`__syncthreads_count`). All threads call it."""
    if on_host():
        if block_dim() == 1:
            return 1 if which else 0
        return group_sum(block_group(), 1 if which else 0)
    return _cuda_block_count(which)


@device_function
def global_id():
    """Return the index of the thread in the whole launch."""
    return block_idx() * block_dim() + thread_idx()
