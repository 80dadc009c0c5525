"""Which host memory is registered with CUDA, against a model that knows each page; a driver stands in for CUDA's."""

import contextlib
import ctypes
import gc
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from garbage import garbage
from gpunetio.errors import DriverError
from gpunetio.memory import PAGE, HostMemory, watchers
from gpunetio.nic.gpu.pinned import Pinned

PAGES = 24
BASE = 1 << 40


class Driver:
    """Registers pages, and refuses what CUDA refuses: a range that is registered in part, or not as it was."""

    def __init__(self, pinned: tuple[int, ...] = ()):
        self.ranges: dict[int, int] = {}
        self.pages: set[int] = set()  # of the ranges
        self.pinned = pinned  # of others

    def is_pinned(self, address: int) -> bool:
        return address // PAGE in self.pinned or address // PAGE in self.pages

    def call(self, name: str, address: ctypes.c_uint64, *rest: object) -> None:
        at = address.value
        if name == "cuMemHostUnregister":
            self.pages -= pages_of(at, self.ranges.pop(at))
            return
        nbytes = rest[0].value
        assert at % PAGE == nbytes % PAGE == 0 < nbytes
        pages = pages_of(at, nbytes)
        if not pages.isdisjoint(self.pages) or not pages.isdisjoint(self.pinned):
            raise DriverError("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", status=712)
        self.ranges[at] = nbytes
        self.pages |= pages


def pinned_with(driver: Driver) -> Pinned:
    return Pinned(driver, contextlib.nullcontext)


def pages_of(address: int, nbytes: int) -> set[int]:
    return set(range(address // PAGE, -(-(address + nbytes) // PAGE)))


spans = st.tuples(st.integers(0, PAGES * PAGE - 1), st.integers(1, 6 * PAGE))


@given(steps=st.lists(st.tuples(st.booleans(), spans), max_size=30))
def test_each_page_is_registered_while_a_range_needs_it(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    driver = Driver()
    pinned, used = pinned_with(driver), []
    for adds, (offset, nbytes) in steps:
        if adds or not used:
            used.append((BASE + offset, nbytes))
            pinned.add(*used[-1])
        else:
            pinned.remove(*used.pop(offset % len(used)))
        needed = set().union(*(pages_of(*span) for span in used))
        assert needed <= driver.pages
    for span in used:
        pinned.remove(*span)
    assert not driver.ranges


@pytest.mark.parametrize("page", range(4))
def test_what_others_have_pinned_is_left_alone(page: int) -> None:
    driver = Driver(pinned=(BASE // PAGE + page,))
    pinned = pinned_with(driver)
    pinned.add(BASE, 4 * PAGE)
    assert driver.pages == pages_of(BASE, 4 * PAGE) - set(driver.pinned)
    pinned.remove(BASE, 4 * PAGE)
    assert not driver.ranges


def test_memory_of_ours_is_registered_while_a_nic_is_open() -> None:
    """All there is, and all that comes. What goes stays registered, and mapped, until CUDA would not have to wait."""
    driver = Driver()
    pinned = pinned_with(driver)
    before = HostMemory(PAGE)
    pinned.open()
    pinned.open()
    try:
        later = HostMemory(3 * PAGE)
        assert pages_of(before.address, PAGE) | pages_of(later.address, 3 * PAGE) <= driver.pages
        place = later.address
        later.close()
        assert pages_of(place, 3 * PAGE) <= driver.pages
        kept = len(driver.pages)
        for _ in range(300):
            HostMemory(PAGE).close()
        assert len(driver.pages) < kept + 100
        pinned.close()
        assert watchers
    finally:
        pinned.close()
    assert not driver.ranges
    assert pinned not in watchers
    before.close()


def test_a_failed_registration_leaves_nothing_behind() -> None:
    class Full(Driver):
        def call(self, name: str, address: ctypes.c_uint64, *rest: object) -> None:
            if name == "cuMemHostRegister_v2" and address.value >= BASE + 2 * PAGE:
                raise MemoryError("no more")
            super().call(name, address, *rest)

    driver = Full()
    pinned = pinned_with(driver)
    pinned.add(BASE + PAGE, PAGE)
    with pytest.raises(MemoryError):
        pinned.add(BASE, 4 * PAGE)
    pinned.remove(BASE + PAGE, PAGE)
    assert not driver.ranges


def test_a_nic_that_cannot_have_all_memory_registered_has_none() -> None:
    class Refusing(Driver):
        def call(self, name: str, address: ctypes.c_uint64, *rest: object) -> None:
            if name == "cuMemHostRegister_v2" and len(self.ranges) == 3:
                raise MemoryError("no more")
            super().call(name, address, *rest)

    kept = [HostMemory(PAGE) for _ in range(5)]
    driver = Refusing()
    pinned = pinned_with(driver)
    with pytest.raises(MemoryError):
        pinned.open()
    assert not driver.ranges
    assert pinned not in watchers
    for memory in kept:
        memory.close()


def test_garbage_may_be_collected_in_the_middle_of_a_registration() -> None:
    """Memory of the garbage is left by a finalizer, in the thread that registers."""

    class Collecting(Driver):
        def call(self, name: str, address: ctypes.c_uint64, *rest: object) -> None:
            gc.collect()
            super().call(name, address, *rest)

    def leave() -> None:
        for page in range(100):
            pinned.leave(BASE + page * PAGE, PAGE, None)

    driver = Collecting()
    pinned = pinned_with(driver)
    for page in range(100):
        pinned.add(BASE + page * PAGE, PAGE)
    with garbage(leave):
        adding = threading.Thread(target=pinned.add, args=(BASE + 200 * PAGE, PAGE), daemon=True)
        adding.start()
        adding.join(20)
    assert not adding.is_alive()
    pinned.add(BASE + 300 * PAGE, PAGE)
    assert driver.pages == {BASE // PAGE + 200, BASE // PAGE + 300}


def test_a_forked_child_registers_nothing() -> None:
    driver = Driver()
    pinned = pinned_with(driver)
    pinned.open()
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(watchers))
        assert os.waitpid(child, 0)[1] == 0
        assert pinned in watchers
    finally:
        pinned.close()
