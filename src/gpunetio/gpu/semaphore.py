"""Semaphores: items with a status, through which kernels and the CPU tell each other what is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ..arguments import member, within
from ..closing import Closing
from ..enums import MemType
from ..errors import BadStateError, InvalidValueError
from ..formats.eth_device import DEV_SEMAPHORE, SEMAPHORE_ITEM, SEMAPHORE_RING, SemaphoreStatus
from ..interrupts import Whole
from ..jit.code import Launch
from ..jit.compile import engine_function
from ..jit.ops import ld_acquire32, st_release32
from .memory import GpuMemory

if TYPE_CHECKING:
    from .device import GpuDevice

_MOST_ITEMS = 1 << 24
_STATUS = 4  # bytes


@engine_function
def _load(address):
    """Return a status. Everything written before it is then visible."""
    return ld_acquire32(address)


@engine_function
def _store(address, status):
    """Set a status, after everything written before."""
    st_release32(address, status)


class Semaphore(Closing, metaclass=Whole):
    """`items` statuses in memory, each with room for packets or your own data (`doca_gpu_semaphore`).

    The producer fills an item, and sets it to READY last. The consumer sets it to DONE or FREE after use. Nothing
    blocks: both sides poll. Pass the semaphore to a kernel as an argument, or pass its `device_address`.

    `items`        number of items
    `memory`       where they are: CPU_GPU if the CPU looks often, GPU if only kernels do, GPU_CPU for both
    `info`         dtype of an item's own data, such as np.dtype([("address", "i8")]), or None
    `info_memory`  where this data is; by default in the same kind of memory as the items
    `rings`        number of rings into which `sem_take` and related functions divide the items; a divisor of `items`
    """

    items: int
    rings: int
    info: np.dtype[np.generic] | None

    def __init__(
        self,
        gpu: GpuDevice,
        items: int,
        memory: MemType = MemType.CPU_GPU,
        info: np.dtype[np.generic] | str | None = None,
        info_memory: MemType | None = None,
        rings: int = 1,
    ):
        self.items = within("items", items, 1, _MOST_ITEMS)
        self.rings = within("rings", rings, 1, self.items)
        if self.items % self.rings:
            raise InvalidValueError(f"rings = {rings}: {items} items cannot be divided into rings of the same length")
        memory = member("memory", memory, MemType)
        self.info = None if info is None else _type_of(info)
        if self.info is not None and (self.info.hasobject or not self.info.itemsize):
            raise InvalidValueError(f"info = {self.info}: it must be a type of one byte or more, without objects")
        with ExitStack() as undo:
            behind = -(-self.items * SEMAPHORE_ITEM.size // SEMAPHORE_RING.size) * SEMAPHORE_RING.size
            self._items = gpu.alloc(behind + self.rings * SEMAPHORE_RING.size, memory)
            undo.callback(self._items.close)
            self._in_gpu = gpu.backend.has_memory and memory is MemType.GPU
            self._info: GpuMemory | None = None
            if self.info is not None:
                kind = memory if info_memory is None else member("info_memory", info_memory, MemType)
                self._info = gpu.alloc(self.items * self.info.itemsize, kind)
                undo.callback(self._info.close)
            self._behind = behind
            self._structure = gpu.alloc(DEV_SEMAPHORE.size)
            undo.callback(self._structure.close)
            self._structure.write(self._image(lambda memory: memory.device_address))
            self._making, self._for_host = threading.Lock(), None
            self._undo = undo.pop_all()

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called, or the Gpu was closed."""
        return self._structure.closed

    @property
    def device_address(self) -> int:
        """Return the `struct doca_gpu_semaphore_gpu *` that kernels take (`doca_gpu_semaphore_get_gpu_handle`)."""
        self._check()
        return self._structure.device_address

    @property
    def host_address(self) -> int:
        """Return the address for kernels on host threads, even with a GPU. BadStateError for items in GPU memory."""
        self._check()
        with self._making:  # all threads get the same image, which kernels use
            if self._for_host is None:
                self._for_host = self._image(lambda memory: int(memory.array.ctypes.data))
            return int(self._for_host.ctypes.data)

    def _image(self, address_of: Callable[[GpuMemory], int]) -> np.ndarray:
        """Return a DEV_SEMAPHORE with these addresses of memory."""
        image = np.zeros(DEV_SEMAPHORE.size, np.uint8)
        row = DEV_SEMAPHORE.at(image)
        items = address_of(self._items)
        row["items"], row["items_num"] = items, self.items
        row["rings"], row["rings_num"] = items + self._behind, self.rings
        if self._info and self.info is not None:
            row["info"], row["info_bytes"] = address_of(self._info), self.info.itemsize
        return image

    def status(self, index: int) -> SemaphoreStatus:
        """Return the status of an item (`doca_gpu_semaphore_get_status`)."""
        at = self._at(index)
        if self._in_gpu:
            return SemaphoreStatus(int(self._items.read(at, _STATUS).view("<u4")[0]))
        return SemaphoreStatus(int(_load(int(self._items.array.ctypes.data) + at)))

    def set_status(self, index: int, status: SemaphoreStatus) -> None:
        """Set the status of an item, after everything written before (`doca_gpu_semaphore_set_status`)."""
        at, status = self._at(index), member("status", status, SemaphoreStatus)
        if self._in_gpu:
            self._items.write(np.array([status], "<u4").view(np.uint8), at)
        else:
            _store(int(self._items.array.ctypes.data) + at, int(status))

    def packets(self, index: int) -> tuple[int, int]:
        """Return how many packets an item hands over, and the index of the first one."""
        row = SEMAPHORE_ITEM.at(self._items.read(self._at(index), SEMAPHORE_ITEM.size))
        return int(row["packets"]), int(row["first"])

    def read_info(self, index: int) -> np.ndarray:
        """Return a copy of an item's data, of shape () and dtype `info`."""
        memory, kind, at = self._info_at(index)
        return memory.read(at, kind.itemsize).view(kind)[0].copy()

    def write_info(self, index: int, value: object) -> None:
        """Replace an item's data."""
        memory, kind, at = self._info_at(index)
        memory.write(np.array([value], kind).view(np.uint8).reshape(-1), at)

    def info_address(self, index: int) -> int:
        """Return the device address of an item's data (`doca_gpu_semaphore_get_custom_info_addr`)."""
        memory, _, at = self._info_at(index)
        return memory.device_address + at

    def _info_at(self, index: int) -> tuple[GpuMemory, np.dtype[np.generic], int]:
        self._at(index)
        if self._info is None or self.info is None:
            raise BadStateError("this semaphore's items carry nothing: create it with info=")
        return self._info, self.info, index * self.info.itemsize

    def _at(self, index: int) -> int:
        self._check()
        return within("index", index, 0, self.items - 1) * SEMAPHORE_ITEM.size

    def _check(self) -> None:
        if self.closed:
            raise BadStateError("this semaphore is closed")

    def used_by(self, launch: Launch) -> None:
        """Keep the semaphore open while `launch`, which has it as an argument, runs."""
        self._structure.used_by(launch)

    def close(self) -> None:
        """Wait for kernels that were given the semaphore, then free it (`doca_gpu_semaphore_destroy`). Idempotent."""
        if not self.closed:
            self._structure.wait_idle()
            self._undo.close()

    def __repr__(self) -> str:
        return f"<semaphore of {self.items} items{', closed' if self.closed else ''}>"

    def __reduce__(self) -> NoReturn:
        raise BadStateError("a semaphore cannot be pickled: its memory belongs to this process")


def _type_of(info: object) -> np.dtype[np.generic]:
    try:
        return np.dtype(info)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise InvalidValueError(f"info = {info!r}: it must be a type of NumPy, such as 'u8'") from None
