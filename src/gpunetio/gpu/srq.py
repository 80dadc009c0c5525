"""A contiguous shared receive queue as kernels see it: one structure for all queue pairs that receive from it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ..enums import SrqType
from ..errors import NotSupportedError
from ..formats.device_structs import DEV_RQ
from ..verbs import SRQ
from .completions import Completions
from .structure import fill_rq

if TYPE_CHECKING:
    from .gpu import Gpu

_WORD = 8  # a slot's, in `done`


class ExportedSrq:
    """Made with the first exported queue pair of an SRQ, and given back with the last one.

    `image` is what it held when it was given back before: the NIC goes on counting.
    """

    srq: SRQ

    def __init__(self, gpu: Gpu, srq: SRQ, image: np.ndarray | None = None):
        if srq.type is not SrqType.CONTIGUOUS:
            raise NotSupportedError(
                f"{srq} is a linked list, whose free entries the host keeps: kernels post to a CONTIGUOUS one"
            )
        self._gpu, self.srq, self._users = gpu, srq, 0
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
        """The structure."""
        return self._memory.device_address

    def read(self) -> np.ndarray:
        """A copy of the structure."""
        return DEV_RQ.at(self._memory.read(0, DEV_RQ.size))

    def read_all(self) -> np.ndarray:
        """A copy of the structure and of what is behind it."""
        return self._memory.read()

    def give_up(self, completions: Completions, before: int, first: int, count: int) -> None:
        """Nobody will take messages `first` … `count` − 1 of a queue pair: the receives that they are in are free.

        `completions` is where they completed, and `before` how many CQEs it had before the first of all.
        """
        newest = int(self.read()["rsvd"]) - 1
        cqes = completions.cqes()
        for arrival in range(first, count):
            slot = int(cqes[(before + arrival) % len(cqes)]["wqe_counter"]) % self.srq.entries
            index = newest - (newest - slot) % self.srq.entries
            self._memory.write(np.array([index + 1], "<i8").view(np.uint8), DEV_RQ.size + _WORD * slot)

    def use(self) -> ExportedSrq:
        """One user more."""
        self._users += 1
        return self

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users == 0:
            with self._undo:  # whatever comes of that
                self._gpu.forget_srq(self)
