"""A contiguous shared receive queue as kernels see it: one structure for all queue pairs that receive from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from ..enums import SrqType
from ..errors import NotSupportedError
from ..formats.device_structs import DEV_RQ
from ..verbs import SRQ
from .completions import Completions
from .device import GpuDevice
from .structure import fill_rq

_WORD = 8  # bytes per slot in `done`


class ExportedSrq:
    """The structure of an SRQ. The SRQ's first exported queue pair creates it, the last one frees it, under `lock`.

    If the structure was freed before, `image` is its last content: the NIC's counts continue. `forget` is called before
    the structure is freed.
    """

    srq: SRQ

    def __init__(
        self, gpu: GpuDevice, srq: SRQ, lock: threading.RLock, forget: Callable[[ExportedSrq], None],
        image: np.ndarray | None = None,
    ):
        if srq.type is not SrqType.CONTIGUOUS:
            raise NotSupportedError(
                f"{srq} is a linked list whose free entries the host keeps: kernels need a CONTIGUOUS one"
            )
        self._lock, self._forget, self.srq, self._users = lock, forget, srq, 0
        with ExitStack() as undo:
            if image is None:
                image = np.zeros(DEV_RQ.size + _WORD * srq.entries, np.uint8)
            self._memory = gpu.alloc(image.nbytes)
            undo.callback(self._memory.close)
            rq = DEV_RQ.at(image)
            fill_rq(rq, gpu.backend, srq, srq.entries, srq.stride, undo)
            rq["done"] = self._memory.device_address + DEV_RQ.size
            self._memory.write(image)
            self._undo = undo.pop_all()

    @property
    def device_address(self) -> int:
        """Return the address of the structure."""
        return self._memory.device_address

    def read(self) -> np.ndarray:
        """Return a copy of the structure."""
        return DEV_RQ.at(self._memory.read(0, DEV_RQ.size))

    def read_all(self) -> np.ndarray:
        """Return a copy of the structure and of the words of all slots."""
        return self._memory.read()

    def give_up(self, completions: Completions, before: int, first: int, count: int) -> None:
        """Free the receives of messages `first` … `count` − 1 of a queue pair, which no kernel will take.

        `completions` holds their CQEs; `before` is how many CQEs it had before the first message.
        """
        newest = int(self.read()["rsvd"]) - 1
        cqes = completions.cqes()
        for arrival in range(first, count):
            slot = int(cqes[(before + arrival) % len(cqes)]["wqe_counter"]) % self.srq.entries
            index = newest - (newest - slot) % self.srq.entries
            self._memory.write(np.array([index + 1], "<i8").view(np.uint8), DEV_RQ.size + _WORD * slot)

    def use(self) -> ExportedSrq:
        """Count another user. The caller has the lock."""
        self._users += 1
        return self

    def release(self) -> None:
        """Remove a user. The last one frees the structure."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                with self._undo:  # frees the structure even if `forget` fails
                    self._forget(self)
