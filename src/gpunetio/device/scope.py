"""Execution scopes: who posts together, with one reservation and one doorbell.

| scope  | a group is                                               | called by                        |
|--------|----------------------------------------------------------|----------------------------------|
| THREAD | the lanes of a warp that happen to run converged (CUDA)  | any thread                       |
| WARP   | the lanes of a warp                                      | all lanes, with the same queue   |
| BLOCK  | the threads of a block                                   | all threads, with the same queue |

Each thread posts WQEs of its own, `count` of them, the same number for all of a group. Tickets are those of one's own
last WQE. `lanes` is a group of thread scope: a mask, or ALONE.
"""

from __future__ import annotations

from ..formats.device_structs import DEV_QP
from .compile import device_function
from .modes import BLOCK, EXCLUSIVE, THREAD, WARP
from .ops import (
    block_broadcast, block_dim, block_sync, converged_lanes, count_lanes, from_first, lane_id, lanes_with, ld_fixed16,
    rank_among, sync_lanes, thread_idx, warp_broadcast, warp_size, warp_sync,
)  # fmt: skip
from .qp import reserve
from .status import OK
from .submit import post

ALONE = 0
_BESIDE_ADDRESS = 56  # bits of an address have fewer
_PART = 8  # slots of a ring for each thread of a group: operations of two WQEs take a quarter of it at most


@device_function
def group_with(key, other, slots, sharing, code_opt, scope):
    """Who is here with the same `key`, an address, `other` and `code_opt`, if queues are shared and a ring of `slots`
    has room for them all."""
    if scope != THREAD or sharing == EXCLUSIVE:
        return ALONE
    lanes = converged_lanes(key ^ (code_opt << _BESIDE_ADDRESS))  # its leader rings for all, or for none
    if other != 0:
        lanes = lanes_with(lanes, other)
    threads = count_lanes(lanes)
    return ALONE if threads == 1 or threads * _PART > slots else lanes


@device_function
def group_of(qp, companion, sharing, code_opt, scope):
    """Who is here with the same queue, companion (or 0) and `code_opt`, if queues are shared and large enough."""
    slots = ld_fixed16(qp + DEV_QP.sq_wqe_num)
    if companion != 0:
        slots = min(slots, ld_fixed16(companion + DEV_QP.sq_wqe_num))
    return group_with(qp, companion, slots, sharing, code_opt, scope)


@device_function
def rank_in(scope, lanes):
    """Which of its group a thread is; 0 leads: it reserves, marks ready and submits for all."""
    if scope == WARP:
        return lane_id()
    if scope == BLOCK:
        return thread_idx()
    return 0 if lanes == ALONE else rank_among(lanes)


@device_function
def size_of(scope, lanes):
    """Threads of the group."""
    if scope == WARP:
        return warp_size()
    if scope == BLOCK:
        return block_dim()
    return 1 if lanes == ALONE else count_lanes(lanes)


@device_function
def from_leader(value, scope, lanes):
    """The leader's `value`, in all of the group."""
    if scope == WARP:
        return warp_broadcast(value, 0)
    if scope == BLOCK:
        return block_broadcast(value, 0)
    return value if lanes == ALONE else from_first(value, lanes)


@device_function
def from_last(value, scope):
    """The last thread's `value`, in all of a warp or block."""
    return warp_broadcast(value, warp_size() - 1) if scope == WARP else block_broadcast(value, block_dim() - 1)


@device_function
def gather(scope, lanes):
    """Wait for the group: what its threads have stored is the leader's to announce then."""
    if scope == WARP:
        warp_sync()
    elif scope == BLOCK:
        block_sync()
    elif lanes != ALONE:
        sync_lanes(lanes)


@device_function
def reserve_own(qp, count, sharing, code_opt, scope, lanes):
    """Take `count` slots for each of the group: one's own first, or a negative status, the same for all."""
    first = 0
    rank = rank_in(scope, lanes)
    if rank == 0:
        first = reserve(qp, count * size_of(scope, lanes), sharing, code_opt)
    first = from_leader(first, scope, lanes)
    return first + count * rank if first >= 0 else first


@device_function
def post_own(qp, first, count, sharing, code_opt, scope, lanes):
    """Mark ready and submit the slots of the group, each its own from `first` on: one's last as the ticket, or a
    negative status, the same for all."""
    gather(scope, lanes)
    status = OK
    if rank_in(scope, lanes) == 0:
        status = min(OK, post(qp, first, first + count * size_of(scope, lanes) - 1, sharing, code_opt))
    status = from_leader(status, scope, lanes)
    return first + count - 1 if status == OK else status
