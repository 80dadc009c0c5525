"""The base class of queues on the GPU data path: the structure passed to kernels, and their launches."""

from __future__ import annotations

from abc import ABC
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from ..enums import MemType
from ..errors import BadStateError
from ..gpu import Gpu, GpuMemory
from ..gpu.memory import LAUNCH_TIMEOUT, RunningLaunches
from ..jit.code import Launch
from ..verbs import Handle
from .failure import QueueError
from .place import Places

_ERROR = "err_index", "err_syndrome", "err_vendor"  # in a kernel's structure: the first error completion it saw


class KernelQueue(Handle, ABC):
    """A queue of a Gpu that is passed to kernels as an argument.

    `_longest_wait` is how many seconds a kernel may wait inside a device function of the queue.
    """

    gpu: Gpu
    _structure: GpuMemory
    _launches: RunningLaunches
    _longest_wait: float = 0.0

    def _allocate(self, nbytes: int, places: Places, undo: ExitStack) -> None:
        """Allocate the structure. The queue writes its contents."""
        self._launches = RunningLaunches()
        self._structure = self.gpu.alloc(nbytes, MemType.CPU_GPU if places.cpu_gpu else MemType.GPU)
        undo.callback(self._structure.close)

    def _attach(self, undo: ExitStack) -> None:
        """Register the queue with the Gpu, which then closes the queue before itself."""
        self.gpu.attach(self)
        undo.callback(self._step(KernelQueue._detach))

    def _detach(self) -> None:
        self.gpu.detach(self)

    def when_dropped(self) -> None:
        super().when_dropped()
        self.gpu.dropped.note(self)  # context and Gpu: whichever comes first closes it

    @property
    def device_address(self) -> int:
        """Return the address of the structure that kernels take.

        It is a `struct doca_gpu_eth_rxq *` (`doca_eth_rxq_get_gpu_handle`) or a `struct doca_gpu_eth_txq *`
        (`doca_eth_txq_get_gpu_handle`).
        """
        self.check_open()
        return self._structure.device_address

    def check_launch(self) -> None:
        """Raise BadStateError if the queue is closed. Called before a launch with the queue as an argument."""
        self.check_open()

    def used_by(self, launch: Launch) -> None:
        """Keep the queue open while `launch` runs, which has it as an argument."""
        self._launches.add(launch)

    def wait_idle(self) -> None:
        self._launches.wait(self._longest_wait + LAUNCH_TIMEOUT, str(self))
        super().wait_idle()

    def _check_reset(self) -> None:
        """Raise BadStateError unless the queue is open and no kernel that was given the queue runs."""
        self.check_open()
        self._launches.check_none(f"{self} cannot be reset")

    def _read(self) -> NDArray[np.uint8]:
        """Return a copy of the structure. BadStateError if the queue or its Gpu is closed."""
        self.check_open()
        if self._structure.closed:
            raise BadStateError(f"{self}: GPU {self.gpu.name} is closed")
        return self._structure.read()

    def _seen_error(self, number: int, row: NDArray[np.void]) -> QueueError | None:
        """Return the error of queue `number` that a kernel has recorded in a row of the structure, or None."""
        if not row["err_syndrome"]:
            return None
        return QueueError.of(self.ctx, number, *(int(row[name]) for name in _ERROR))
