"""Execution scopes: which threads post together, with one reservation and one doorbell.

| scope  | a group is                                               | called by                        |
|--------|----------------------------------------------------------|----------------------------------|
| THREAD | the lanes of a warp that happen to run converged (CUDA)  | any thread                       |
| WARP   | the lanes of a warp                                      | all lanes, with the same queue   |
| BLOCK  | the threads of a block                                   | all threads, with the same queue |

Each thread posts its own `count` WQEs, and `count` is the same in the whole group. A thread's ticket is the index of
its last WQE. `lanes` is a group of thread scope: a mask of lanes, or ALONE.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp
from ..jit.compile import device_function
from .modes import BLOCK, EXCLUSIVE, THREAD, WARP
from ..jit.ops import (
    block_broadcast, block_count, block_dim, block_sync, converged_lanes, count_lanes, from_first, lane_id, lanes_with,
    ld_fixed16, rank_among, sync_lanes, thread_idx, warp_broadcast, warp_count, warp_size, warp_sync,
)
from .qp import reserve
from .status import OK
from .submit import post

ALONE = 0
_BESIDE_ADDRESS = 56  # a shift: addresses have fewer bits
_PART = 8  # ring slots for each thread of a group: operations of two WQEs then take at most a quarter of the ring


@device_function
def group_with(key: int, other: int, slots: int, sharing: int, code_opt: int, scope: int) -> int:
    """Return the converged lanes with the same `key` (an address), `other` and `code_opt`.

    ALONE if queues are not shared, or if a ring of `slots` is too small for all these lanes.
    """
    if scope != THREAD or sharing == EXCLUSIVE:
        return ALONE
    lanes = converged_lanes(key ^ (code_opt << _BESIDE_ADDRESS))  # the leader rings for all, or for none
    if other != 0:
        lanes = lanes_with(lanes, other)
    threads = count_lanes(lanes)
    return ALONE if threads == 1 or threads * _PART > slots else lanes


@device_function
def group_of(qp: VerbsQp, companion: VerbsQp, sharing: int, code_opt: int, scope: int) -> int:
    """Return the converged lanes with the same queue, companion (or 0) and `code_opt`, as `group_with` does."""
    slots = ld_fixed16(qp + VerbsQp.sq_wqe_num)
    if companion != 0:
        slots = min(slots, ld_fixed16(companion + VerbsQp.sq_wqe_num))
    return group_with(qp, companion, slots, sharing, code_opt, scope)


@device_function
def rank_in(scope: int, lanes: int) -> int:
    """Return the rank of the thread in its group. Rank 0 leads: it reserves, marks ready and submits for all."""
    if scope == WARP:
        return lane_id()
    if scope == BLOCK:
        return thread_idx()
    return 0 if lanes == ALONE else rank_among(lanes)


@device_function
def size_of(scope: int, lanes: int) -> int:
    """Return the number of threads in the group."""
    if scope == WARP:
        return warp_size()
    if scope == BLOCK:
        return block_dim()
    return 1 if lanes == ALONE else count_lanes(lanes)


@device_function
def from_leader(value: int, scope: int, lanes: int) -> int:
    """Return the leader's `value` in all threads of the group."""
    if scope == WARP:
        return warp_broadcast(value, 0)
    if scope == BLOCK:
        return block_broadcast(value, 0)
    return value if lanes == ALONE else from_first(value, lanes)


@device_function
def from_last(value: int, scope: int) -> int:
    """Return the last thread's `value` in all threads of a warp or block."""
    return warp_broadcast(value, warp_size() - 1) if scope == WARP else block_broadcast(value, block_dim() - 1)


@device_function
def count_in(which: int, scope: int) -> int:
    """Return in how many threads of a warp or block `which` is 1 rather than 0. The threads wait for each other."""
    if scope == WARP:
        return warp_count(which)
    return block_count(which) if scope == BLOCK else which


@device_function
def gather(scope: int, lanes: int) -> None:
    """Wait for the group, so that its leader may announce what the threads have stored."""
    if scope == WARP:
        warp_sync()
    elif scope == BLOCK:
        block_sync()
    elif lanes != ALONE:
        sync_lanes(lanes)


@device_function
def reserve_own(qp: VerbsQp, count: int, sharing: int, code_opt: int, scope: int, lanes: int) -> int:
    """Reserve `count` slots for each thread of the group. Return the thread's first slot, or the group's status."""
    first = 0
    rank = rank_in(scope, lanes)
    if rank == 0:
        first = reserve(qp, count * size_of(scope, lanes), sharing, code_opt)
    first = from_leader(first, scope, lanes)
    return first + count * rank if first >= 0 else first


@device_function
def post_own(qp: VerbsQp, first: int, count: int, sharing: int, code_opt: int, scope: int, lanes: int) -> int:
    """Mark ready and submit the slots of the group: `count` slots of each thread, from its `first` on.

    Return the index of the thread's last slot, its ticket, or a negative status, the same for the whole group.
    """
    gather(scope, lanes)
    status = OK
    if rank_in(scope, lanes) == 0:
        status = min(OK, post(qp, first, first + count * size_of(scope, lanes) - 1, sharing, code_opt))
    status = from_leader(status, scope, lanes)
    return first + count - 1 if status == OK else status
