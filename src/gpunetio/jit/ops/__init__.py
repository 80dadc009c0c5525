"""Primitive operations with one meaning and two lowerings: LLVM on the CPU, PTX on CUDA.

Only this package depends on the target, so a port to another GPU compiler has to rewrite only this package.

Every value is an int64. Narrow loads zero-extend, narrow stores truncate.
Plain `ld*`/`st*` are for memory that no other agent accesses at that moment. A loop that waits for another agent must
poll with `ld_relaxed*` or `ld_acquire*`, because LLVM hoists a plain load out of the loop.

Scopes follow the PTX memory model: `sys` includes the CPU and the NIC, `gpu` the threads of one GPU, `cta` those of one
block. The CPU has one scope, so all three lower to the same instruction there.
"""

from .atomics import (
    cas_acq_rel_gpu32,
    cas_acq_rel_gpu64,
    cas_acquire_gpu64,
    cas_gpu64,
    cas_sys32,
    cas_sys64,
    exchange64,
    exchange_gpu64,
    fetch_add_acq_rel_cta64,
    fetch_add_acq_rel_gpu64,
    fetch_add_cta64,
    fetch_add_gpu64,
    fetch_add_sys64,
    fetch_max_cta64,
    fetch_max_gpu64,
    raise_gpu64,
)
from .calls import NO_CALLS, call_c
from .copies import (
    await_fetched,
    copy,
    copy_to_register,
    fetch_line,
    has_bulk_copy,
    move_4_lines,
    move_8_lines,
    prefetch,
    prefetch_to_write,
)
from .crc import CRC32_POLYNOMIAL, clmul, crc32_fold, has_clmul, x_to_the
from .fences import (
    drain_stores,
    fence_acquire_cta,
    fence_acquire_gpu,
    fence_acquire_sys,
    fence_cta,
    fence_gpu,
    fence_release_cta,
    fence_release_gpu,
    fence_release_sys,
    fence_sc_gpu,
    fence_sys,
)
from .groups import (
    block_broadcast,
    block_count,
    block_sync,
    global_id,
    group_max,
    group_sum,
    warp_broadcast,
    warp_count,
    warp_sync,
)
from .lanes import (
    ALL_LANES,
    converged_lanes,
    count_lanes,
    first_lane,
    from_first,
    from_lane,
    lane_or_0,
    lanes_here,
    lanes_where,
    lanes_with,
    rank_among,
    shuffle_down,
    sum_of_lanes,
    sum_up_to,
    sync_lanes,
)
from .memory import (
    be16,
    be32,
    be64,
    ld8,
    ld16,
    ld32,
    ld64,
    ld_acquire32,
    ld_acquire64,
    ld_acquire_cta64,
    ld_fixed16,
    ld_fixed32,
    ld_fixed64,
    ld_relaxed8,
    ld_relaxed32,
    ld_relaxed64,
    ld_relaxed_gpu64,
    pack64,
    st8,
    st16,
    st32,
    st64,
    st128,
    st_mmio64,
    st_mmio_release64,
    st_relaxed32,
    st_relaxed64,
    st_relaxed_gpu64,
    st_release32,
    st_release64,
    st_release_cta64,
)
from .patience import CLOCK_MONOTONIC, clock_ns, futex_wait, futex_wake, pause, sleep_ns, yield_thread
from .threads import (
    BLOCK_PARTS,
    BLOCK_SLOT,
    GROUP_HEADER,
    GROUP_WORDS,
    THREAD_KEY_SYMBOL,
    block_dim,
    block_group,
    block_idx,
    block_slot,
    dynamic_shared,
    dynamic_shared_bytes,
    grid_dim,
    lane_id,
    on_host,
    thread_idx,
    thread_record,
    warp_group,
    warp_size,
)

__all__ = [
    "ALL_LANES", "BLOCK_PARTS", "BLOCK_SLOT", "CLOCK_MONOTONIC", "CRC32_POLYNOMIAL", "GROUP_HEADER", "GROUP_WORDS",
    "NO_CALLS", "THREAD_KEY_SYMBOL", "await_fetched", "be16", "be32", "be64", "block_broadcast", "block_count",
    "block_dim", "block_group", "block_idx", "block_slot", "block_sync", "call_c", "cas_acq_rel_gpu32",
    "cas_acq_rel_gpu64", "cas_acquire_gpu64", "cas_gpu64", "cas_sys32", "cas_sys64", "clmul", "clock_ns",
    "converged_lanes", "copy", "copy_to_register", "count_lanes", "crc32_fold", "drain_stores", "dynamic_shared",
    "dynamic_shared_bytes", "exchange64", "exchange_gpu64", "fence_acquire_cta", "fence_acquire_gpu",
    "fence_acquire_sys", "fence_cta", "fence_gpu", "fence_release_cta", "fence_release_gpu", "fence_release_sys",
    "fence_sc_gpu", "fence_sys", "fetch_add_acq_rel_cta64", "fetch_add_acq_rel_gpu64", "fetch_add_cta64",
    "fetch_add_gpu64", "fetch_add_sys64", "fetch_line", "fetch_max_cta64", "fetch_max_gpu64", "first_lane",
    "from_first", "from_lane", "futex_wait", "futex_wake", "global_id", "grid_dim", "group_max", "group_sum",
    "has_bulk_copy", "has_clmul", "lane_id", "lane_or_0", "lanes_here", "lanes_where", "lanes_with", "ld16", "ld32",
    "ld64", "ld8", "ld_acquire32", "ld_acquire64", "ld_acquire_cta64", "ld_fixed16", "ld_fixed32", "ld_fixed64",
    "ld_relaxed32", "ld_relaxed64", "ld_relaxed8", "ld_relaxed_gpu64", "move_4_lines", "move_8_lines", "on_host",
    "pack64", "pause", "prefetch", "prefetch_to_write", "raise_gpu64", "rank_among", "shuffle_down", "sleep_ns",
    "st128", "st16", "st32", "st64", "st8", "st_mmio64", "st_mmio_release64", "st_relaxed32", "st_relaxed64",
    "st_relaxed_gpu64", "st_release32", "st_release64", "st_release_cta64", "sum_of_lanes", "sum_up_to", "sync_lanes",
    "thread_idx", "thread_record", "warp_broadcast", "warp_count", "warp_group", "warp_size", "warp_sync", "x_to_the",
    "yield_thread",
]
