"""Memory that a NIC may access: page-aligned host memory of this package, and the address range of a user's object.

Host memory may be shared with another process of the same user: `HostMemory(nbytes, shared=True)` has a descriptor, and
`MappedMemory` is the same memory in the process that received the descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .dlpack import CUDA, tensor_in
from .errors import BadStateError, InvalidValueError

PAGE = mmap.PAGESIZE
BytesLike = bytes | bytearray | memoryview | np.ndarray

reserved: list[range] = []  # addresses that the CPU must not access, whatever their permissions (jit/twin.py)
_live: dict[int, HostMemory] = {}  # by address: garbage collection must not free memory that an engine may still read


class Watcher(Protocol):
    """An observer of all `HostMemory` (nic/gpu/pinned.py)."""

    def add(self, address: int, nbytes: int) -> None:
        """Record new memory."""
        ...

    def leave(self, address: int, nbytes: int, memory: object) -> None:
        """Record that memory is closed. `memory` keeps it mapped."""
        ...


watchers: list[Watcher] = []
os.register_at_fork(after_in_child=watchers.clear)  # CUDA does not work in a forked child


def live() -> dict[int, HostMemory]:
    """Return all open `HostMemory`, by address."""
    return _live


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` (a power of two) that is at least `nbytes`."""
    return (nbytes + multiple - 1) & -multiple


def is_accessible(address: int, nbytes: int, writable: bool) -> bool:
    """Return whether this process may read, and if `writable` also write, all of a range.

    CUDA reserves the addresses of GPU memory as mappings without any permission, so a mapping alone says nothing.
    """
    memory = _live.get(address)
    if memory is not None and nbytes <= memory.nbytes and memory.array.flags.writeable:
        return True  # usually a ring of this package; there may be thousands, each a line of the list below
    end = address + nbytes
    if any(address < kept.stop and kept.start < end for kept in reserved):
        return False
    with open("/proc/thread-self/maps") as maps:
        for line in maps:  # in order of address
            span, permissions, _ = line.split(maxsplit=2)
            low, high = (int(bound, 16) for bound in span.split("-"))
            if high <= address:
                continue
            if low > address or permissions[0] != "r" or (writable and permissions[1] != "w"):
                return False
            address = high
            if address >= end:
                return True
    return False


class HostMemory:
    """Zeroed, page-aligned host memory that stays mapped until `close()`.

    `array` is a NumPy view of its bytes, at `address`. With `shared`, `fd` is a descriptor of the memory until
    `close()`, for another process of this user, which can neither shrink nor grow the memory. Without `shared`, `fd` is
    None. Only this mapping can write to the memory, however another process opens it. With `sealed=False`, other
    mappings may also write until `seal()`.
    """

    nbytes: int
    address: int
    array: NDArray[np.uint8]

    def __init__(self, nbytes: int, shared: bool = False, sealed: bool = True):
        if nbytes <= 0:
            raise InvalidValueError(f"cannot allocate {nbytes} bytes: the size must be positive")
        self.nbytes = round_up(nbytes, PAGE)
        self.fd: int | None = sealed_memory(self.nbytes) if shared else None
        try:
            self._map(self.fd)
            if sealed:
                self.seal()
        except BaseException:
            if self.fd is not None:
                os.close(self.fd)
            raise

    def seal(self) -> None:
        """Forbid all new ways to write to shared memory: writable mappings, and writes to its file. Idempotent.

        Existing mappings stay as they are. Linux before 5.1 cannot forbid any.
        """
        import fcntl  # not on every platform that may import this module

        if self.fd is None or fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            return
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    def _map(self, fd: int | None, writable: bool = True) -> None:
        """Map the memory of a descriptor, or new memory."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.array = np.frombuffer(mmap.mmap(-1, self.nbytes, access=access), np.uint8)
        self.address = int(self.array.ctypes.data)
        if fd is not None:
            _lay_over(self.address, self.nbytes, fd, writable)
        _live[self.address] = self
        for watcher in tuple(watchers):
            watcher.add(self.address, self.nbytes)

    def view(self, dtype: DTypeLike, offset: int = 0, count: int = 1) -> np.ndarray:
        """Return `count` items of `dtype` at byte `offset`, writable in place."""
        return np.ndarray(count, dtype, buffer=self.array, offset=offset)

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes of host memory, {'closed' if self.closed else f'at {self.address:#x}'}>"

    @property
    def allocation(self) -> object:
        """Return what keeps the memory mapped. A region holds it as well: a NIC never writes to unmapped memory."""
        return self.array

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called."""
        return _live.get(self.address) is not self

    def close(self) -> None:
        """Release the memory. Views that other code holds keep it mapped until they are gone."""
        if not self.closed:
            del _live[self.address]
            for watcher in tuple(watchers):
                watcher.leave(self.address, self.nbytes, self.array)
            if self.fd is not None:
                os.close(self.fd)
            self.array, self.fd = np.empty(0, np.uint8), None

    def __reduce__(self) -> NoReturn:
        raise BadStateError("memory shared with a NIC cannot be pickled: its address means nothing elsewhere")


class MappedMemory(HostMemory):
    """Shared memory of another process, from its descriptor `fd`, mapped until `close()`. `fd` stays the caller's.

    InvalidValueError unless the memory has exactly `nbytes` and can never shrink: a process that reads a mapping after
    the end of its file is killed. A dmabuf never changes its size. Without `writable`, `array` and the mapping are
    read-only.
    """

    def __init__(self, fd: int, nbytes: int, writable: bool = False):
        _check_sealed(fd, nbytes)
        self.nbytes, self.fd = nbytes, None
        try:
            self._map(fd, writable)
        except PermissionError as error:
            raise InvalidValueError(
                f"descriptor {fd} does not allow {'writing' if writable else 'reading'}: the owner has "
                f"{'sealed the memory, or opened it read-only' if writable else 'opened it write-only'}"
            ) from error


_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
_libc_mmap.restype, _libc_mmap.argtypes = ctypes.c_ssize_t, (
    ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)
_MAP_FIXED = 0x10


def _lay_over(address: int, nbytes: int, fd: int, writable: bool) -> None:
    """Replace an existing mapping with that of a descriptor: `mmap.mmap(fd)` would keep a duplicate of it open."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if _libc_mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_SEALS = 2 | 4  # F_SEAL_SHRINK, F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1; Python's fcntl has it since 3.13
_MFD_NOEXEC_SEAL = 8  # since Linux 6.3, where a system may require it


def sealed_memory(nbytes: int, name: str = "gpunetio") -> int:
    """Return a descriptor of anonymous memory whose size is final, and which only this user may open.

    `name` is shown in /proc.
    """
    import fcntl

    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_sealed(fd: int, nbytes: int) -> None:
    """Raise InvalidValueError unless the file of `fd` has exactly `nbytes` and its size cannot change."""
    import fcntl

    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if seals & _SEALS != _SEALS:
        if _is_dmabuf(fd):
            return
        raise InvalidValueError(
            f"descriptor {fd} is not sealed memory (seals {seals:#x}, needed {_SEALS:#x}): its owner could shrink it "
            "under us; share memory of HostMemory(…, shared=True)"
        )
    size = os.fstat(fd).st_size
    if nbytes <= 0 or size != nbytes:
        raise InvalidValueError(f"the memory of descriptor {fd} has {size} bytes, not the {nbytes} announced")


def _is_dmabuf(fd: int) -> bool:
    """Return whether the kernel describes a dmabuf (Documentation/driver-api/dma-buf), which never changes its size."""
    with open(f"/proc/thread-self/fdinfo/{fd}") as info:
        return any(line.startswith("exp_name:") for line in info)


def open_shared(address: int, nbytes: int) -> tuple[int, int, int] | None:
    """Return address, size and a new read-only descriptor of the shared HostMemory that contains a range, or None."""
    for memory in list(_live.values()):
        start, size, fd = memory.address, memory.nbytes, memory.fd
        if fd is not None and start <= address and address + nbytes <= start + size:
            return start, size, os.open(f"/proc/thread-self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    return None


@dataclass(frozen=True)
class Region:
    """A contiguous address range. `owner` keeps it alive; `cuda` says whether its owner declares it as CUDA memory."""

    address: int
    nbytes: int
    readonly: bool
    cuda: bool
    owner: object

    @classmethod
    def of(cls, obj: Any) -> Region:
        """Return the range of one of our memory objects, or of `__cuda_array_interface__`, a buffer, or DLPack."""
        if isinstance(getattr(obj, "address", None), int) and isinstance(getattr(obj, "nbytes", None), int):
            if getattr(obj, "closed", False):
                raise BadStateError(f"the {type(obj).__name__} is closed: its memory is gone")
            cuda = bool(getattr(obj, "is_cuda", False))
            keep = getattr(obj, "allocation", None)  # keeps the memory allocated, even if `obj` is closed
            return cls(obj.address, obj.nbytes, False, cuda, (obj, keep))
        face = _cuda_array_of(obj)
        if face is not None:
            return cls._of_cuda_array(obj, face)
        try:
            view = memoryview(obj)
        except (TypeError, ValueError, BufferError) as error:
            if hasattr(obj, "__dlpack__"):
                return cls._of_dlpack(obj)
            raise InvalidValueError(
                f"{type(obj).__name__} is not memory ({error}): give an object with the buffer protocol (bytearray, "
                "NumPy array), __cuda_array_interface__ or DLPack"
            ) from None
        if not view.contiguous:
            raise InvalidValueError("the buffer is not contiguous in memory: register a contiguous copy or its base")
        if view.nbytes == 0:
            return cls(0, 0, view.readonly, False, view)
        array = np.frombuffer(view, np.uint8) if view.c_contiguous else np.asarray(view)
        return cls(int(array.ctypes.data), view.nbytes, view.readonly, False, view)

    @classmethod
    def _of_cuda_array(cls, obj: Any, face: dict[str, Any]) -> Region:
        item, shape, strides = np.dtype(face["typestr"]).itemsize, face["shape"], face.get("strides")
        if strides is not None and not _is_contiguous(shape, strides, item):
            raise InvalidValueError(f"the CUDA array has strides {strides}: only C-contiguous arrays can be registered")
        address, readonly = face["data"]
        return cls(int(address), item * math.prod(shape), bool(readonly), True, obj)

    @classmethod
    def _of_dlpack(cls, obj: Any) -> Region:
        try:
            capsule = obj.__dlpack__()
            tensor = tensor_in(capsule)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidValueError(f"{type(obj).__name__} gives no DLPack tensor: {error}") from error
        shape, bits = tensor.shape[: tensor.ndim], tensor.bits * tensor.lanes
        if tensor.strides and not _is_contiguous(shape, tensor.strides[: tensor.ndim], 1):
            raise InvalidValueError("the DLPack tensor is not C-contiguous: register a contiguous copy")
        # The capsule's own destructor releases the tensor together with the region.
        return cls(
            (tensor.data or 0) + tensor.byte_offset, (math.prod(shape) * bits + 7) // 8, False,
            tensor.device_type == CUDA, (obj, capsule),
        )


def _cuda_array_of(obj: object) -> dict[str, Any] | None:
    """Return the object's CUDA array interface, or None. A tensor that requires gradients refuses to give its own."""
    try:
        return getattr(obj, "__cuda_array_interface__", None)
    except (RuntimeError, TypeError, KeyError):
        return None


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Return whether the items follow each other without gaps. The stride of a dimension of 1 means nothing."""
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != item:
            return 0 in shape
        item *= n
    return True
