"""The twin of a GPU: host threads with memory that only they reach.

The CPU cannot access a GPU's memory. The twin reproduces this on machines without a GPU: its memory is mapped without
any permission, except while a kernel runs on the twin, or a slice of an engine (nic/gpu/slices.py). A thread that
accesses the memory at any other time gets SIGSEGV.

Twins of other processes of the same user may map the memory and write to it, as CUDA allows for GPU memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..errors import NoMemoryError
from ..formats.layout import Entry
from ..memory import PAGE, HostMemory, reserved, round_up, sealed_memory
from ..once import once
from .compile import engine_function
from .ops import exchange64, pause, st_release64
from .ops.calls import external
from .struct_view import View, struct_view

ARENA = 1 << 30  # bytes of address space; the system allocates memory as it is used

# How many kernels and slices run, and what they reach.
TWIN = Entry("twin", 64, """
    lock             0  i64
    users            8  i64
    address         16  i64
    nbytes          24  i64
""")
twin_at: View = struct_view(TWIN)

_mprotect = external("mprotect", 64, 64, 32, ret=32)
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_ssize_t
_libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_NO_RIGHT, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_NO_RESERVE, _REMOVE = 0x4000, 9  # MAP_NORESERVE, MADV_REMOVE
_FAILED = -1


@engine_function
def count_user(twin, change):
    """Count kernels and slices that start (+1) or have ended (-1). The first opens the memory, the last closes it."""
    while exchange64(twin + TWIN.lock, 1) != 0:
        pause()
    t = twin_at(twin)
    before = t.users
    t.users = before + change
    if before == 0 or t.users == 0:
        _mprotect(t.address, t.nbytes, _NO_RIGHT if t.users == 0 else _READ_WRITE)
    st_release64(twin + TWIN.lock, 0)


class TwinMemory:
    """The memory of the twin: `room` bytes, allocated in whole pages. `record` is the address of its TWIN."""

    record: int

    def __init__(self, room: int = ARENA) -> None:
        self._room = room
        self._fd = sealed_memory(room, "twin of a GPU")
        self._base = _libc.mmap(0, room, _NO_RIGHT, mmap.MAP_SHARED | _NO_RESERVE, self._fd, 0)
        if self._base == _FAILED:
            os.close(self._fd)
            raise NoMemoryError(f"the system has no {room} bytes of address space for the twin of a GPU")
        reserved.append(range(self._base, self._base + self._room))
        self._memory = HostMemory(TWIN.size)
        self.record = self._memory.address
        (record,) = self._memory.view(TWIN.dtype)
        record["address"], record["nbytes"] = self._base, self._room
        self._free = {0: self._room}  # offset → size
        self._left: deque[tuple[int, int]] = deque()  # offsets and sizes that were freed since
        self._lock = threading.Lock()
        count_user.compile()

    def close(self) -> None:
        """Release the address space. Nothing may use the memory any more."""
        reserved.remove(range(self._base, self._base + self._room))
        _libc.munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self._room))
        os.close(self._fd)
        self._memory.close()

    def contains(self, address: int, nbytes: int) -> bool:
        """Return whether a range is in the twin's memory."""
        return self._base <= address and address + nbytes <= self._base + self._room

    def share(self) -> tuple[int, int, int]:
        """Return address and size of the whole memory, and a new descriptor of it for another process."""
        return self._base, self._room, os.dup(self._fd)

    def count_user(self, change: int) -> None:
        """Count kernels and slices, like the function of this name."""
        count_user(self.record, change)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let the caller access the memory inside the block, as a GPU's driver does for a copy."""
        self.count_user(1)
        try:
            yield
        finally:
            self.count_user(-1)

    def alloc(self, nbytes: int) -> int:
        """Return the address of zeroed pages. NoMemoryError if not enough contiguous pages are left."""
        size = round_up(nbytes, PAGE)
        with self._lock:
            while self._left:
                self._take_back(*self._left.popleft())
            offset = next((offset for offset, room in sorted(self._free.items()) if room >= size), None)
            if offset is None:
                raise NoMemoryError(f"the twin of a GPU has no {nbytes} bytes left in one piece, of {self._room}")
            rest = self._free.pop(offset) - size
            if rest:
                self._free[offset + size] = rest
        return self._base + offset

    def free(self, address: int, nbytes: int) -> None:
        """Free pages, and return them to the system, so that they are zeros when they are allocated again.

        This takes no lock: finalizers call it, even inside `alloc`, whose thread would wait for its own lock.
        """
        size = round_up(nbytes, PAGE)
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _REMOVE)
        self._left.append((address - self._base, size))

    def _take_back(self, offset: int, size: int) -> None:
        size += self._free.pop(offset + size, 0)
        before = next((at for at, room in self._free.items() if at + room == offset), None)
        if before is None:
            self._free[offset] = size
        else:
            self._free[before] += size


@once
def twin_memory() -> TwinMemory:
    """Return the memory of this process's twin."""
    return TwinMemory()
