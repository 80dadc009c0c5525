"""Arrays of buffers for kernels."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn

import numpy as np

from ..arguments import instance, whole, within
from ..closing import Closing
from ..errors import BadStateError, InvalidValueError
from ..formats.core_device import DEV_BUF, DEV_BUF_ARR
from ..gpu import Gpu
from ..interrupts import Whole
from ..jit.code import Launch
from ..verbs import MR
from .remote_memory import RemoteMemory

_MOST = 1 << 24
_KERNELS_REACH = 1 << 63  # addresses are signed in kernels


class BufArray(Closing, metaclass=Whole):
    """`num` buffers of `elem_size` bytes each, starting at `offset` of a memory (`doca_buf_arr`).

    Pass the array or its `device_address` to a kernel, where `buf_get` returns an element. The memory is a `MemoryMap`,
    another region of this process, or a peer's memory. Kernels address it as its keys do, from `iova` on.
    """

    memory: MR | RemoteMemory
    num: int
    elem_size: int

    def __init__(self, gpu: Gpu, memory: MR | RemoteMemory, num: int, elem_size: int, *, offset: int = 0):
        instance("gpu", gpu, Gpu)
        self.memory = instance("memory", memory, MR, RemoteMemory)
        self.num, self.elem_size = within("num", num, 1, _MOST), whole("elem_size", elem_size)
        first = whole("offset", offset)
        if self.elem_size < 1 or first < 0 or first + self.num * self.elem_size > memory.nbytes:
            raise InvalidValueError(
                f"{num} elements of {elem_size} bytes from {offset} on: the memory has {memory.nbytes} bytes"
            )
        if isinstance(memory, MR):
            memory.check_open()
            base, lkey, rkey = memory.iova, memory.lkey, memory.rkey
        else:
            base, lkey, rkey = memory.address, 0, memory.rkey
        if base + memory.nbytes > _KERNELS_REACH:
            raise InvalidValueError(f"memory at {base:#x}: kernels use addresses below {_KERNELS_REACH:#x}")
        rows = np.zeros(self.num, DEV_BUF.dtype)
        rows["address"] = base + first + np.arange(self.num, dtype=np.int64) * self.elem_size
        rows["nbytes"], rows["lkey"], rows["rkey"] = self.elem_size, lkey, rkey
        with ExitStack() as undo:
            self._structure = gpu.alloc(DEV_BUF_ARR.size + rows.nbytes)
            undo.callback(self._structure.close)
            self._structure.write(DEV_BUF_ARR.pack(num=self.num))
            self._structure.write(rows.view(np.uint8), DEV_BUF_ARR.size)
            self._undo = undo.pop_all()

    @property
    def device_address(self) -> int:
        """Return the `struct doca_gpu_buf_arr *` that kernels take (`doca_buf_arr_get_gpu_handle`)."""
        if self.closed:
            raise BadStateError("this array of buffers is closed")
        return self._structure.device_address

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called, or the Gpu was closed."""
        return self._structure.closed

    def check_launch(self) -> None:
        """Raise BadStateError if the memory is no longer registered. Called before a launch with the array."""
        if isinstance(self.memory, MR):
            self.memory.check_open()

    def used_by(self, launch: Launch) -> None:
        """Keep the array open while `launch` runs, which has it as an argument."""
        self._structure.used_by(launch)

    def close(self) -> None:
        """Free the array (`doca_buf_arr_destroy`), but not its memory. Idempotent. Waits for kernels that use it."""
        if not self.closed:
            self._structure.wait_idle()
            self._undo.close()

    def __len__(self) -> int:
        return self.num

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"<array of {self.num} buffers of {self.elem_size} bytes{closed}>"

    def __reduce__(self) -> NoReturn:
        raise BadStateError("an array of buffers cannot be pickled: its memory belongs to this process")
