"""Host memory that slices on GPUs access: registered with CUDA, at the same addresses as on the CPU.

While any NIC makes its turns on a GPU, all of gpunetio's own host memory is registered, because queues, tables and
pipes are in it. Memory of the program is registered with its region or UMEM. CUDA registers each page once, so
overlapping ranges share pieces.

To unregister memory, CUDA waits for all running kernels. So gpunetio's own memory stays registered until no kernel of
this process runs, or until the last NIC closes. Memory of the program cannot stay registered, because other memory may
get its addresses.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress

from ...errors import DriverError
from ...jit.launch import running
from ...memory import PAGE, live, watchers
from ..memory.cuda_driver import CudaDriver

_MANY = 64  # closed pieces of memory that are still registered
_IN_PART = 1, 712  # CUresult: INVALID_VALUE, HOST_MEMORY_ALREADY_REGISTERED
_PORTABLE, _DEVICE_MAP = 1, 2  # CU_MEMHOSTREGISTER_*


class Pinned:
    """Ranges of host memory that are registered, by page, each for its number of users."""

    def __init__(self, driver: CudaDriver, current: Callable[[], AbstractContextManager[None]]):
        """`current` makes a CUDA context current: any thread may allocate and free memory."""
        self._driver, self._current = driver, current
        self._lock = threading.Lock()
        self._pieces: dict[int, list[int]] = {}  # start → end, users
        self._starts: list[int] = []
        self._left: deque[tuple[int, int, object]] = deque()  # closed memory of gpunetio: address, bytes, the memory
        self._nics = 0

    def open(self) -> None:
        """Count a NIC on a GPU. The first one registers all of gpunetio's memory, and from then on new memory too."""
        with self._lock:
            self._nics += 1
            first = self._nics == 1
        if first:
            watchers.append(self)
            try:
                for kept in list(live().values()):
                    self.add(kept.address, kept.nbytes)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Count a NIC that has closed. The last one ends all registrations."""
        with self._lock:
            self._nics -= 1
            last = self._nics == 0
        if last:
            watchers.remove(self)
            with self._lock:
                for start in self._starts:
                    self._unregister(start)
                self._pieces.clear()
                self._starts.clear()
                self._left.clear()

    def add(self, address: int, nbytes: int) -> None:
        """Register the pages of a range, or count another user of pages that are already registered."""
        begin, end = address & -PAGE, -(-(address + nbytes) // PAGE) * PAGE
        with self._lock, ExitStack() as undo:
            self._remove_left()
            for begins, ends in list(self._gaps(begin, end)):
                for start, stop in self._register(begins, ends - begins):
                    self._pieces[start] = [stop, 0]
                    self._starts.insert(bisect_right(self._starts, start), start)
                    undo.callback(self._forget, start)
            for start in self._within(begin, end):
                self._pieces[start][1] += 1
            undo.pop_all()

    def remove(self, address: int, nbytes: int) -> None:
        """Undo an `add`."""
        with self._lock:
            self._remove(address, nbytes)

    def leave(self, address: int, nbytes: int, memory: object) -> None:
        """Undo an `add` of gpunetio's own memory, now or later. `memory` keeps it mapped.

        Finalizers call this. They run on any thread, even on one that holds the lock.
        """
        self._left.append((address, nbytes, memory))
        if len(self._left) >= _MANY and self._lock.acquire(blocking=False):
            try:
                self._remove_left()
            finally:
                self._lock.release()

    def _remove_left(self) -> None:
        """Undo the `add` of closed memory, if there are _MANY pieces and no kernel runs for which CUDA would wait."""
        if len(self._left) >= _MANY and running() == 0:
            while self._left:
                address, nbytes, _ = self._left.popleft()  # the third value keeps the memory mapped until it is removed
                self._remove(address, nbytes)

    def _remove(self, address: int, nbytes: int) -> None:
        for start in self._within(address & -PAGE, -(-(address + nbytes) // PAGE) * PAGE):
            piece = self._pieces[start]
            piece[1] -= 1
            if piece[1] <= 0:
                self._forget(start)

    def _within(self, begin: int, end: int) -> list[int]:
        """Return the starts of the pieces that overlap a range."""
        at = max(0, bisect_right(self._starts, begin) - 1)
        found = []
        for start in self._starts[at:]:
            if start >= end:
                break
            if self._pieces[start][0] > begin:
                found.append(start)
        return found

    def _gaps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for start in self._within(begin, end):
            if start > begin:
                yield begin, start
            begin = max(begin, self._pieces[start][0])
        if begin < end:
            yield begin, end

    def _register(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Register a range, except pages that others have already pinned, which slices can access.

        Return the starts and ends of what is registered.
        """
        if self._driver.is_pinned(address) or not self._try(address, nbytes):
            pages = range(address, address + nbytes, PAGE)
            return [(page, page + PAGE) for page in pages if not self._driver.is_pinned(page) and self._try(page, PAGE)]
        return [(address, address + nbytes)]

    def _try(self, address: int, nbytes: int) -> bool:
        """Register a range. Return False if a part of it is registered already."""
        start, size = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        try:
            with self._current():
                self._driver.call("cuMemHostRegister_v2", start, size, _PORTABLE | _DEVICE_MAP)
        except DriverError as error:
            if error.status not in _IN_PART:
                raise
            return False
        return True

    def _forget(self, start: int) -> None:
        """End the registration of a piece."""
        self._unregister(start)
        del self._pieces[start]
        self._starts.remove(start)

    def _unregister(self, address: int) -> None:
        with suppress(DriverError), self._current():  # after a kernel has failed, every call fails
            self._driver.call("cuMemHostUnregister", ctypes.c_uint64(address))
