"""Windows: memory of all ranks that kernels address by offsets."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..enums import Access
from ..errors import InvalidValueError, NotSupportedError
from .abi import FORCE_STRICT_ORDERING, WINDOW_HANDLE, Pointer
from .connection import Collective

KEY_BYTES = 4


def packed_keys(keys: list[int]) -> bytes:
    """Return keys as NCCL's kernels put them into WQEs: big-endian."""
    return np.array(keys, ">u4").tobytes()


class Window:
    """`nbytes` at `address`, registered on all ranks. Keys address it from 0 on.

    `device_address` is the `ncclGinGdakiMemHandle` that kernels read: the keys of all ranks, and the one for local use.
    """

    device_address: int

    def __init__(self, ranks: Collective, address: int, nbytes: int, kind: int, flags: int):
        if kind not in (Pointer.HOST, Pointer.CUDA):
            raise NotSupportedError(f"memory of type {kind}: this plugin registers host memory (1) and CUDA memory (2)")
        if not address or nbytes <= 0:
            raise InvalidValueError(f"{nbytes} bytes at {address:#x} are no memory that can be registered")
        device = ranks.device
        access = Access.all()
        if not flags & FORCE_STRICT_ORDERING:
            access |= Access.RELAXED_ORDERING
        with ExitStack() as undo:
            with ranks.telling("regMrSym"):
                region = device.pd.register(address, access, nbytes=nbytes, iova=0)
                undo.callback(region.close)
            keys = [told.integer("rkey", 0, 0xFFFF_FFFF) for told in ranks.gather("regMrSym", rkey=region.rkey)]
            memory = device.constant(bytes(WINDOW_HANDLE.size) + packed_keys(keys), undo)
            self.device_address = memory.device_address
            rkeys = memory.device_address + WINDOW_HANDLE.size
            memory.write(WINDOW_HANDLE.pack(rkeys=rkeys, lkey=region.lkey))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Close the region on this rank. Idempotent."""
        self._undo.close()
