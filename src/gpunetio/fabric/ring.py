"""A ring of fixed-size messages with one consumer, in memory that both ends can access.

Only one producer may use it at a time: several take turns by holding `lock` from `next_free` to `publish`.

This code uses no CPU-only features, so either end may be a GPU.
"""

from __future__ import annotations


from ..jit.compile import device_function
from ..jit.ops import cas_acq_rel_gpu64, ld64, ld_acquire64, pause, st_release64
from ..jit.struct_view import View, struct_view
from ..formats.layout import Entry

# Head and tail count messages and sit in cache lines of their own; each end caches the other's counter.
RING = Entry("ring", 192, """
    head           0  i64
    tail_seen      8  i64
    tail          64  i64
    head_seen     72  i64
    slots        128  i64
    slot_size    136  i64
    capacity     144  i64
    locked       152  i64
""")

ring_at: View = struct_view(RING)


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
def next_free(ring: int) -> int:
    """Return the address of the slot to fill next, or 0 when the ring is full."""
    r = ring_at(ring)
    if r.head - r.tail_seen >= r.capacity:
        r.tail_seen = ld_acquire64(ring + RING.tail)
        if r.head - r.tail_seen >= r.capacity:
            return 0
    return r.slots + (r.head % r.capacity) * r.slot_size


@device_function
def publish(ring: int) -> None:
    """Hand the filled slot to the consumer."""
    st_release64(ring + RING.head, ld64(ring + RING.head) + 1)


@device_function
def next_full(ring: int) -> int:
    """Return the address of the oldest message, or 0 when there is none."""
    r = ring_at(ring)
    if r.tail == r.head_seen:
        r.head_seen = ld_acquire64(ring + RING.head)
        if r.tail == r.head_seen:
            return 0
    return r.slots + (r.tail % r.capacity) * r.slot_size


@device_function
def release(ring: int) -> None:
    """Give the oldest message's slot back to the producer."""
    st_release64(ring + RING.tail, ld64(ring + RING.tail) + 1)
