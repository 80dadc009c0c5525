"""A receive queue whose packets are never read, for a replay of Ethernet frames."""

from __future__ import annotations

from contextlib import ExitStack

from ..eth.receive import CpuRxq
from ..fabric.pcap_reader import LARGEST_RECORD
from ..memory import HostMemory
from ..verbs import PD

_PACKETS, _JUMBO = 4096, 9216  # waiting packets, and the usual largest size in bytes


class FrameSink(CpuRxq[None, None]):
    """A receive queue with one buffer, into which the device writes all packets."""

    def __init__(self, pd: PD):
        super().__init__(pd, _PACKETS, _JUMBO, None)
        with ExitStack() as undo:
            memory = HostMemory(LARGEST_RECORD)  # frames in a file may be longer than any queue allows
            undo.callback(memory.close)
            self._buffer = pd.register(memory)
            undo.callback(self._buffer.close)
            self._open_queue(None, undo)
            self._start()
            self._opened(f"sink {self.rqn:#x} of {self.ctx.name}", undo)

    def _start(self) -> None:
        for _ in range(self.max_burst):
            self._put(None, self._buffer.iova, self._buffer.lkey, self._buffer.nbytes)
        self._announce()

    def empty(self) -> None:
        """Give the device back the receives that it has completed, whose WQEs are still in the ring."""
        with self._lock:
            count = len(self._reader.take(self.max_burst))
            self._consumer += count
            self._producer += count
            self._announce()

    def _packet(self, what: object, cqe: object, failed: object) -> None:
        """Return nothing: packets are not read."""
