"""Bytes at the end of a page that is followed by an inaccessible one: reading one byte too many kills the process."""

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGES = 17  # room for 64 KiB


class Guarded:
    """`put(data)` returns the address of a copy, whose last byte is the last one that may be read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, (_PAGES + 1) * mmap.PAGESIZE)
        self.array = np.frombuffer(self._map, np.uint8)[: _PAGES * mmap.PAGESIZE]
        self.end = self.array.ctypes.data + len(self.array)
        if _LIBC.mprotect(ctypes.c_void_p(self.end), mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: bytes) -> int:
        self.array[len(self.array) - len(data) :] = np.frombuffer(data, np.uint8)
        return self.end - len(data)

    def bytes_at(self, address: int, nbytes: int) -> bytes:
        at = address - self.end + len(self.array)
        return self.array[at : at + nbytes].tobytes()
