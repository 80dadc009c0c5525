"""A kernel that runs until the application ends: one block, which serves queues of its own."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import DocaError
from ..gpu import Gpu, GpuMemory
from ..jit.code import Launch
from ..jit.launch import Kernel
from ..samples.until_stopped import StopWord, failure
from .counts import WORK


class Worker:
    """A kernel with its arguments, which begin with `stop`, the address of the word that ends it.

    `name`     the queues that it serves
    `title`    its task, for messages
    `gpu`      where it runs
    `work`     its WORK
    `explain`  returns the error of a queue of its own, or None
    """

    name: str
    title: str
    work: GpuMemory

    def __init__(
        self, name: str, title: str, gpu: Gpu, kernel: Kernel, threads: int, arguments: tuple[object, ...],
        work: GpuMemory, explain: Callable[[], object],
    ):
        self.name, self.title, self.work, self._gpu = name, title, work, gpu
        self._kernel, self._threads, self._arguments, self._explain = kernel, threads, arguments, explain
        self.failure: DocaError | None = None
        self._launch: Launch | None = None

    def launch(self, stop: StopWord) -> None:
        """Start the kernel."""
        self._launch = self._kernel[1, self._threads, self._gpu](stop.address_on(self._gpu), *self._arguments)

    def wait(self, seconds: float) -> bool:
        """Wait for the kernel to end, and return whether it has. If it has failed, `failure` says why."""
        if self._launch is None or not self._launch.wait(seconds):
            return False
        status = int(WORK.at(self.work.array)["status"])
        if status < 0 and self.failure is None:
            self.failure = failure(status, self._explain())
        return True
