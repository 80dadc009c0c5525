"""Semaphores: items that kernels and the CPU hand to each other: a status, packets, and a piece of memory.

Whoever fills an item changes its status last, and whoever sees that status also sees what was stored before it: other
kernels, the CPU and other GPUs, wherever the semaphore lies.

Items are used by their index, one producer and one consumer for each, or as rings: of many producers, and one consumer
for each ring.
"""

from __future__ import annotations

from ..formats.eth_device import DevSemaphore, SemaphoreItem, SemaphoreRing, SemaphoreStatus
from ..jit.compile import device_function
from ..jit.ops import (
    cas_sys64, clock_ns, fence_acquire_sys, ld32, ld64, ld_acquire64, ld_fixed32, ld_fixed64, ld_relaxed32,
    ld_relaxed64, st32, st64, st_relaxed32, st_release32, st_release64,
)  # fmt: skip
from .status import EAGAIN, EINVAL, ENOBUFS, ETIMEDOUT, OK
from .waiting import relax

SEM_FREE, SEM_READY = int(SemaphoreStatus.FREE), int(SemaphoreStatus.READY)
SEM_DONE = int(SemaphoreStatus.DONE)

@device_function
def _item(semaphore: DevSemaphore, index: int):
    """Return the address of an item, or 0 if there is none with this index."""
    if index < 0 or index >= ld_fixed32(semaphore + DevSemaphore.items_num):
        return 0
    return ld_fixed64(semaphore + DevSemaphore.items) + SemaphoreItem.size * index


@device_function
def sem_status(semaphore: DevSemaphore, index: int):
    """Return the status of an item, and see what was stored before it (`doca_gpu_dev_semaphore_get_status`).

    EINVAL: there is no such item.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    status = ld_relaxed32(item + SemaphoreItem.status)
    fence_acquire_sys()
    return status


@device_function
def sem_set_status(semaphore: DevSemaphore, index: int, status: int):
    """Change the status of an item, after everything that was stored before (`doca_gpu_dev_semaphore_set_status`).

    Return OK, or EINVAL if there is no such item. In a block, synchronise first: this orders the stores of the thread
    and those that it knows of.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    st_release32(item + SemaphoreItem.status, status)
    return OK


@device_function
def sem_wait(semaphore: DevSemaphore, index: int, status: int, timeout_ns: int):
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
def sem_set_packets(semaphore: DevSemaphore, index: int, status: int, first: int, packets: int):
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
def sem_packets(semaphore: DevSemaphore, index: int):
    """Return how many packets an item hands over (`doca_gpu_dev_semaphore_get_packet_info_status`). See its status
    first. EINVAL: there is no such item."""
    item = _item(semaphore, index)
    return EINVAL if item == 0 else ld32(item + SemaphoreItem.packets)


@device_function
def sem_first(semaphore: DevSemaphore, index: int):
    """Return the index of the first packet that an item hands over. EINVAL: there is no such item."""
    item = _item(semaphore, index)
    return EINVAL if item == 0 else ld64(item + SemaphoreItem.first)


@device_function
def sem_info(semaphore: DevSemaphore, index: int):
    """Return the address of an item's piece of memory (`doca_gpu_dev_semaphore_get_custom_info_addr`).

    EINVAL: there is no such item, or the semaphore has no such memory.
    """
    info = ld_fixed64(semaphore + DevSemaphore.info)
    if info == 0 or _item(semaphore, index) == 0:
        return EINVAL
    return info + ld_fixed32(semaphore + DevSemaphore.info_bytes) * index


@device_function
def _ring(semaphore: DevSemaphore, ring: int):
    """Return the address of a ring's words, or 0 if there is no such ring."""
    if ring < 0 or ring >= ld_fixed32(semaphore + DevSemaphore.rings_num):
        return 0
    return ld_fixed64(semaphore + DevSemaphore.rings) + SemaphoreRing.size * ring


@device_function
def _ring_items(semaphore: DevSemaphore):
    return ld_fixed32(semaphore + DevSemaphore.items_num) // ld_fixed32(semaphore + DevSemaphore.rings_num)


@device_function
def _ring_index(semaphore: DevSemaphore, ring: int, number: int):
    """Return the index of item `number` of a ring, which counts through all its laps."""
    return ring + number % _ring_items(semaphore) * ld_fixed32(semaphore + DevSemaphore.rings_num)


@device_function
def sem_take(semaphore: DevSemaphore, ring: int = 0):
    """Take the next item of a ring, as one of many producers. Return its index.

    Nobody else uses the item until the caller has filled it and changed its status, with `sem_set_status` or
    `sem_set_packets`. The consumer waits for that even if later items are ready. ENOBUFS: all items of the ring are
    taken, and the consumer has not freed the oldest one. EINVAL: there is no such ring.
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
def sem_next(semaphore: DevSemaphore, ring: int = 0):
    """Return the index of the oldest item of a ring, as its only consumer, and see what its producer has stored.

    The same item is returned until `sem_free`. EAGAIN: it is free, or its producer has not changed its status yet.
    EINVAL: there is no such ring.
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
def sem_free(semaphore: DevSemaphore, ring: int = 0):
    """Free the oldest item of a ring, as its only consumer: producers may take it, and `sem_next` goes on to the next.

    Return OK, EAGAIN if no item is ready, or EINVAL if there is no such ring.
    """
    index = sem_next(semaphore, ring)
    if index < 0:
        return index
    st_relaxed32(_item(semaphore, index) + SemaphoreItem.status, SEM_FREE)
    freed = _ring(semaphore, ring) + SemaphoreRing.freed
    st_release64(freed, ld64(freed) + 1)
    return OK
