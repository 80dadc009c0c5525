"""A ring of fixed-size messages with one consumer, in memory that both ends can access.

Only one producer may use it at a time: several take turns by holding `lock` from `next_free` to `publish`.

This code uses no CPU-only features, so either end may be a GPU.
"""

from __future__ import annotations

from ..formats.layout import I64, Record
from ..jit.compile import device_function
from ..jit.ops import cas_acq_rel_gpu64, ld64, ld_acquire64, pause, st_release64


class RingState(Record, size=192):
    """A ring of events.

    Head and tail count messages and sit in cache lines of their own; each end caches the other's counter.
    """

    head: I64 = 0
    tail_seen: I64 = 8
    tail: I64 = 64
    head_seen: I64 = 72
    slots: I64 = 128
    slot_size: I64 = 136
    capacity: I64 = 144
    locked: I64 = 152


RING = RingState.entry


@device_function
def lock(ring: int) -> None:
    """Wait until no other producer fills the ring."""
    while cas_acq_rel_gpu64(ring + RING.locked, 0, 1) != 0:
        pause()


@device_function
def unlock(ring: int) -> None:
    """Let other producers fill the ring."""
    st_release64(ring + RING.locked, 0)


@device_function
def next_free(ring: RingState) -> int:
    """Return the address of the slot to fill next, or 0 when the ring is full."""
    if ring.head - ring.tail_seen >= ring.capacity:
        ring.tail_seen = ld_acquire64(ring + RING.tail)
        if ring.head - ring.tail_seen >= ring.capacity:
            return 0
    return ring.slots + (ring.head % ring.capacity) * ring.slot_size


@device_function
def publish(ring: int) -> None:
    """Hand the filled slot to the consumer."""
    st_release64(ring + RING.head, ld64(ring + RING.head) + 1)


@device_function
def next_full(ring: RingState) -> int:
    """Return the address of the oldest message, or 0 when there is none."""
    if ring.tail == ring.head_seen:
        ring.head_seen = ld_acquire64(ring + RING.head)
        if ring.tail == ring.head_seen:
            return 0
    return ring.slots + (ring.tail % ring.capacity) * ring.slot_size


@device_function
def release(ring: int) -> None:
    """Give the oldest message's slot back to the producer."""
    st_release64(ring + RING.tail, ld64(ring + RING.tail) + 1)
