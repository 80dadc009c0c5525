"""Semaphores: items that kernels and the CPU hand to each other: a status, packets, and a piece of memory.

Whoever fills an item changes its status last, and whoever sees that status also sees what was stored before it: other
kernels, the CPU and other GPUs, wherever the semaphore lies.
"""

from __future__ import annotations

from ..formats.eth_device import DEV_SEMAPHORE, SEMAPHORE_ITEM, SemaphoreStatus
from ..jit.compile import device_function
from ..jit.ops import (
    clock_ns, fence_acquire_sys, ld32, ld64, ld_fixed32, ld_fixed64, ld_relaxed32, st32, st64, st_release32,
)  # fmt: skip
from .status import EINVAL, ETIMEDOUT, OK
from .waiting import relax

SEM_FREE, SEM_READY = int(SemaphoreStatus.FREE), int(SemaphoreStatus.READY)
SEM_DONE = int(SemaphoreStatus.DONE)

@device_function
def _item(semaphore, index):
    """Return the address of an item, or 0 if there is none with this index."""
    if index < 0 or index >= ld_fixed32(semaphore + DEV_SEMAPHORE.items_num):
        return 0
    return ld_fixed64(semaphore + DEV_SEMAPHORE.items) + SEMAPHORE_ITEM.size * index


@device_function
def sem_status(semaphore, index):
    """Return the status of an item, and see what was stored before it (`doca_gpu_dev_semaphore_get_status`).

    EINVAL: there is no such item.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    status = ld_relaxed32(item + SEMAPHORE_ITEM.status)
    fence_acquire_sys()
    return status


@device_function
def sem_set_status(semaphore, index, status):
    """Change the status of an item, after everything that was stored before (`doca_gpu_dev_semaphore_set_status`).

    Return OK, or EINVAL if there is no such item. In a block, synchronise first: this orders the stores of the thread
    and those that it knows of.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    st_release32(item + SEMAPHORE_ITEM.status, status)
    return OK


@device_function
def sem_wait(semaphore, index, status, timeout_ns):
    """Wait until an item has a status: OK, ETIMEDOUT after `timeout_ns`, or EINVAL if there is no such item."""
    item = _item(semaphore, index)
    if item == 0 or timeout_ns < 0:
        return EINVAL
    polls = 0
    start = 0
    while ld_relaxed32(item + SEMAPHORE_ITEM.status) != status:
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
def sem_set_packets(semaphore, index, status, first, packets):
    """Hand over packets `first` … `first + packets - 1` with a status (`doca_gpu_dev_semaphore_set_packet_info`).

    Return OK, or EINVAL if there is no such item.
    """
    item = _item(semaphore, index)
    if item == 0:
        return EINVAL
    st64(item + SEMAPHORE_ITEM.first, first)
    st32(item + SEMAPHORE_ITEM.packets, packets)
    st_release32(item + SEMAPHORE_ITEM.status, status)
    return OK


@device_function
def sem_packets(semaphore, index):
    """Return how many packets an item hands over (`doca_gpu_dev_semaphore_get_packet_info_status`). See its status
    first. EINVAL: there is no such item."""
    item = _item(semaphore, index)
    return EINVAL if item == 0 else ld32(item + SEMAPHORE_ITEM.packets)


@device_function
def sem_first(semaphore, index):
    """Return the index of the first packet that an item hands over. EINVAL: there is no such item."""
    item = _item(semaphore, index)
    return EINVAL if item == 0 else ld64(item + SEMAPHORE_ITEM.first)


@device_function
def sem_info(semaphore, index):
    """Return the address of an item's piece of memory (`doca_gpu_dev_semaphore_get_custom_info_addr`).

    EINVAL: there is no such item, or the semaphore has no such memory.
    """
    info = ld_fixed64(semaphore + DEV_SEMAPHORE.info)
    if info == 0 or _item(semaphore, index) == 0:
        return EINVAL
    return info + ld_fixed32(semaphore + DEV_SEMAPHORE.info_bytes) * index
