"""Batches of the RDMA library: threads fill slots of a queue, then one of them commits all slots at once.

A batch is strong or weak. In a strong batch, each thread takes the next slot, and all threads belong to one block. The
queue is reserved for that block from its first slot until the commit; threads of other blocks get EBUSY. In a weak
batch, the caller says which slots its threads fill, and the commit checks that each slot was filled once.

All threads change one word, `turn` (formats/rdma_device.py). It holds the low bits of the index of the next slot, so a
thread that changes the word takes exactly that slot. A committed index supplies the upper bits.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp
from ..formats.rdma_device import DevRdmaQueue, TURN_BLOCK_BITS, TURN_INDEX_BITS, TURN_OPEN_BITS
from ..jit.compile import device_function
from ..jit.ops import (
    block_idx, cas_acquire_gpu64, cas_gpu64, fence_cta, fetch_add_gpu64, ld_fixed32, ld_fixed64, ld_relaxed_gpu64,
    st_relaxed_gpu64,
)
from .cq import timeout_of
from .status import EBUSY, EINVAL, ETIMEDOUT, OK
from .waiting import patience

TURN = DevRdmaQueue.turn
_INDEX = (1 << TURN_INDEX_BITS) - 1
_OPEN_SHIFT, _BLOCK_SHIFT = TURN_INDEX_BITS, TURN_INDEX_BITS + TURN_OPEN_BITS
_OPEN = ((1 << TURN_OPEN_BITS) - 1) << _OPEN_SHIFT
_BLOCK = ((1 << TURN_BLOCK_BITS + 1) - 1) << _BLOCK_SHIFT
_COMMITS = -1 << 63  # makes the word negative
OTHER_BLOCK = -EBUSY  # negative, because EBUSY is positive like an index


@device_function
def _mine() -> int:
    """Return the number of this block, shifted to its place in the word."""
    return 1 + (block_idx() & (1 << TURN_BLOCK_BITS) - 1) << _BLOCK_SHIFT


@device_function
def _next_index(word: int, committed: int) -> int:
    """Return the index of the next slot. `committed` is an index committed at most 16 million slots ago."""
    return committed + (word - committed & _INDEX)


@device_function
def slots_of(queue: DevRdmaQueue) -> int:
    """Return how many slots the ring has."""
    return ld_fixed32(queue + DevRdmaQueue.slots)


@device_function
def _mark(queue: DevRdmaQueue, index: int) -> int:
    return ld_fixed64(queue + DevRdmaQueue.marks) + 8 * (index & slots_of(queue) - 1)


@device_function
def _filled(queue: DevRdmaQueue, index: int) -> int:
    """Return the mark of a slot once it is filled for `index`: how often it has been filled."""
    return (index >> ld_fixed32(queue + DevRdmaQueue.shift)) + 1


@device_function
def next_strong(queue: DevRdmaQueue, word: int, committed: int) -> int:
    """Return the index that a thread of this block may take, or OTHER_BLOCK if another block is filling a batch."""
    if word & _BLOCK != 0 and word & _BLOCK != _mine():
        return OTHER_BLOCK
    return _next_index(word, committed)


@device_function
def take_strong(queue: DevRdmaQueue, word: int, count: int) -> int:
    """Take the next `count` slots if `turn` is still equal to `word`. Return 1 if it was."""
    if word < 0:
        return 0  # a thread is committing
    taken = word & _OPEN | word + count & _INDEX | _mine()
    return cas_gpu64(queue + TURN, word, taken + (count << _OPEN_SHIFT)) == word


@device_function
def close_strong(queue: DevRdmaQueue, first: int, count: int) -> None:
    """Mark `count` slots from `first` on as filled. The threads that filled them have waited for each other."""
    for i in range(first, first + count):
        st_relaxed_gpu64(_mark(queue, i), _filled(queue, i))
    fence_cta()
    fetch_add_gpu64(queue + TURN, -count << _OPEN_SHIFT)


@device_function
def next_weak(queue: DevRdmaQueue, position: int, committed: int) -> int:
    """Return the index of a position of a weak batch, or OTHER_BLOCK while a strong batch is being filled."""
    word = ld_relaxed_gpu64(queue + TURN)
    if word > _INDEX:
        return OTHER_BLOCK
    first = _next_index(word, committed)
    return first + (position - first & slots_of(queue) - 1)


@device_function
def close_weak(queue: DevRdmaQueue, index: int) -> None:
    """Mark a slot as filled. The committing thread must synchronize with this one by other means."""
    fetch_add_gpu64(_mark(queue, index), 1)


@device_function
def free_index(queue: DevRdmaQueue, committed: int) -> int:
    """Return the index of the first slot that no thread has taken."""
    return _next_index(ld_relaxed_gpu64(queue + TURN), committed)


@device_function
def begin_commit(strong: int, queue: DevRdmaQueue, qp: VerbsQp) -> int:
    """Take the right to commit, so that no other thread changes `turn`.

    Return 1, or 0 if there is no strong batch, or a status.
    """
    polls = 0
    start = 0
    while True:
        word = ld_relaxed_gpu64(queue + TURN)
        block = word & _BLOCK
        if word >= 0:
            if strong and block == 0:
                return 0
            if block != 0 and (not strong or block != _mine()):
                return OTHER_BLOCK
            if word & _OPEN == 0 and cas_acquire_gpu64(queue + TURN, word, word | _mine() | _COMMITS) == word:
                return 1
        elif strong and block != _mine():
            return OTHER_BLOCK
        start = patience(polls, start, timeout_of(qp))
        if start < 0:
            return ETIMEDOUT
        polls += 1


@device_function
def end_commit(queue: DevRdmaQueue, next_index: int) -> None:
    """Free the queue for the next batch, which begins at `next_index`. The caller has fenced its stores."""
    st_relaxed_gpu64(queue + TURN, next_index & _INDEX)


@device_function
def check_weak(queue: DevRdmaQueue, first: int, count: int) -> int:
    """Return OK if each of `count` slots from `first` on was filled once, else drop the batch and return EINVAL."""
    wrong = 0
    if 1 <= count <= slots_of(queue):
        for i in range(first, first + count):
            wrong |= ld_relaxed_gpu64(_mark(queue, i)) ^ _filled(queue, i)
    else:
        wrong = 1
    if wrong == 0:
        return OK
    for i in range(first, first + slots_of(queue)):
        st_relaxed_gpu64(_mark(queue, i), _filled(queue, i) - 1)
    return EINVAL
