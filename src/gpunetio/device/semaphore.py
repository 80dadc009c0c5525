"""Semaphores: kernels and the CPU hand each other items, which have a status, packets, and a piece of memory.

A producer fills an item and changes its status last. A consumer that sees the status also sees everything stored before
it. This holds for other kernels, the CPU and other GPUs, wherever the semaphore's memory is.

Items are used by index, with one producer and one consumer for each item, or as rings, with many producers and one
consumer for each ring.
"""

from __future__ import annotations

from ..formats.eth_device import DevSemaphore, SemaphoreItem, SemaphoreRing, SemaphoreStatus
from ..jit.compile import device_function
from ..jit.ops import (
    cas_sys64, clock_ns, fence_acquire_sys, ld32, ld64, ld_acquire64, ld_fixed32, ld_fixed64, ld_relaxed32,
    ld_relaxed64, st32, st64, st_relaxed32, st_release32, st_release64,
)
from .status import EAGAIN, EINVAL, ENOBUFS, ETIMEDOUT, OK
from .waiting import relax

SEM_FREE, SEM_READY = int(SemaphoreStatus.FREE), int(SemaphoreStatus.READY)
SEM_DONE = int(SemaphoreStatus.DONE)


@device_function
def _item(semaphore: DevSemaphore, index: int) -> int:
    """Return the address of an item, or 0 if there is none with this index."""
    if index < 0 or index >= ld_fixed32(semaphore + DevSemaphore.items_num):
        return 0
    return ld_fixed64(semaphore + DevSemaphore.items) + SemaphoreItem.size * index


@device_function
def sem_status(semaphore: DevSemaphore, index: int) -> int:
    """Return the status of an item (`doca_gpu_dev_semaphore_get_status`).

    Everything that was stored before the status is then visible. EINVAL: there is no such item.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    status = ld_relaxed32(item + SemaphoreItem.status)
    fence_acquire_sys()
    return status


@device_function
def sem_set_status(semaphore: DevSemaphore, index: int, status: int) -> int:
    """Change the status of an item, after everything that was stored before (`doca_gpu_dev_semaphore_set_status`).

    Return OK, or EINVAL if there is no such item. In a block, synchronize first: this orders only the stores of the
    thread and those that it has synchronized with.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    st_release32(item + SemaphoreItem.status, status)
    return OK


@device_function
def sem_wait(semaphore: DevSemaphore, index: int, status: int, timeout_ns: int) -> int:
    """Wait until an item has a status: OK, ETIMEDOUT after `timeout_ns`, or EINVAL if there is no such item."""
    item = _item(semaphore, index)
    if item == 0 or timeout_ns < 0:
        return EINVAL
    polls = 0
    start = 0
    while ld_relaxed32(item + SemaphoreItem.status) != status:
        now = clock_ns()
        if polls == 0:
            start = now
        if now - start >= timeout_ns:
            return ETIMEDOUT
        relax(polls)
        polls += 1
    fence_acquire_sys()
    return OK


@device_function
def sem_set_packets(semaphore: DevSemaphore, index: int, status: int, first: int, packets: int) -> int:
    """Hand over packets `first` … `first + packets - 1` with a status (`doca_gpu_dev_semaphore_set_packet_info`).

    Return OK, or EINVAL if there is no such item.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    st64(item + SemaphoreItem.first, first)
    st32(item + SemaphoreItem.packets, packets)
    st_release32(item + SemaphoreItem.status, status)
    return OK


@device_function
def sem_packets(semaphore: DevSemaphore, index: int) -> int:
    """Return how many packets an item hands over (`doca_gpu_dev_semaphore_get_packet_info_status`). Read its status
    first. EINVAL: there is no such item."""
    item = _item(semaphore, index)
    return EINVAL if item == 0 else ld32(item + SemaphoreItem.packets)


@device_function
def sem_first(semaphore: DevSemaphore, index: int) -> int:
    """Return the index of the first packet that an item hands over. EINVAL: there is no such item."""
    item = _item(semaphore, index)
    return EINVAL if item == 0 else ld64(item + SemaphoreItem.first)


@device_function
def sem_info(semaphore: DevSemaphore, index: int) -> int:
    """Return the address of an item's piece of memory (`doca_gpu_dev_semaphore_get_custom_info_addr`).

    EINVAL: there is no such item, or the semaphore has no such memory.
    """
    info = ld_fixed64(semaphore + DevSemaphore.info)
    if info == 0 or _item(semaphore, index) == 0:
        return EINVAL
    return info + ld_fixed32(semaphore + DevSemaphore.info_bytes) * index


@device_function
def _ring(semaphore: DevSemaphore, ring: int) -> int:
    """Return the address of a ring's words, or 0 if there is no such ring."""
    if ring < 0 or ring >= ld_fixed32(semaphore + DevSemaphore.rings_num):
        return 0
    return ld_fixed64(semaphore + DevSemaphore.rings) + SemaphoreRing.size * ring


@device_function
def _ring_items(semaphore: DevSemaphore) -> int:
    return ld_fixed32(semaphore + DevSemaphore.items_num) // ld_fixed32(semaphore + DevSemaphore.rings_num)


@device_function
def _ring_index(semaphore: DevSemaphore, ring: int, number: int) -> int:
    """Return the index of item `number` of a ring, which counts through all its laps."""
    return ring + number % _ring_items(semaphore) * ld_fixed32(semaphore + DevSemaphore.rings_num)


@device_function
def sem_take(semaphore: DevSemaphore, ring: int = 0) -> int:
    """Take the next item of a ring, as one of many producers. Return its index.

    The item belongs to the caller, who fills it and then changes its status with `sem_set_status` or `sem_set_packets`.
    Until then, the consumer waits, even if later items are ready. ENOBUFS: all items of the ring are taken, and the
    consumer has not freed the oldest one. EINVAL: there is no such ring.
    """
    words = _ring(semaphore, ring)
    if words == 0:
        return EINVAL
    items = _ring_items(semaphore)
    number = ld_relaxed64(words + SemaphoreRing.taken)
    while number - ld_acquire64(words + SemaphoreRing.freed) < items:
        found = cas_sys64(words + SemaphoreRing.taken, number, number + 1)
        if found == number:
            return _ring_index(semaphore, ring, number)
        number = found
    return ENOBUFS


@device_function
def sem_next(semaphore: DevSemaphore, ring: int = 0) -> int:
    """Return the index of the oldest item of a ring, as its only consumer.

    What the producer stored is then visible. The same item is returned until `sem_free`. EAGAIN: the item is free, or
    its producer has not changed its status yet. EINVAL: there is no such ring.
    """
    words = _ring(semaphore, ring)
    if words == 0:
        return EINVAL
    index = _ring_index(semaphore, ring, ld64(words + SemaphoreRing.freed))
    if ld_relaxed32(_item(semaphore, index) + SemaphoreItem.status) == SEM_FREE:
        return EAGAIN
    fence_acquire_sys()
    return index


@device_function
def sem_free(semaphore: DevSemaphore, ring: int = 0) -> int:
    """Free the oldest item of a ring, as its only consumer. Producers may take it, and `sem_next` moves to the next.

    Return OK, EAGAIN if no item is ready, or EINVAL if there is no such ring.
    """
    index = sem_next(semaphore, ring)
    if index < 0:
        return index
    st_relaxed32(_item(semaphore, index) + SemaphoreItem.status, SEM_FREE)
    freed = _ring(semaphore, ring) + SemaphoreRing.freed
    st_release64(freed, ld64(freed) + 1)
    return OK
