"""The data path for kernels: the queue pairs of connections, and the structures that kernels take."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..enums import SrqType
from ..formats.rdma_device import DEV_RDMA, DEV_RDMA_QUEUE
from ..gpu import ExportedQp, Gpu, QpError
from ..verbs import PD, SRQ, QpInitAttr
from ..verbs.qp_init import queue_sizes
from .datapath import Channel, DataPath, Sizes

_MARK = 8  # bytes of a slot's mark


class GpuDataPath(DataPath):
    """Queue pairs for kernels, in one structure (formats/rdma_device.py).

    Sends complete in a collapsed CQ, which keeps only the last completion: only the last WQE of a batch is signaled.
    If there may be several connections, they receive from one SRQ.
    """

    def __init__(self, gpu: Gpu, pd: PD, sizes: Sizes, timeout: float, undo: ExitStack):
        self._gpu, self._pd, self._timeout = gpu, pd, timeout
        self._sends, self._receives = 1 << (sizes.sends - 1).bit_length(), sizes.receives
        self._srq: SRQ | None = None
        self._open: dict[int, ExportedQp] = {}
        slots = self._receive_slots(sizes, undo)
        self._queues = [self._sends] * sizes.connections + [slots]  # slots of each queue; the last one is for receives
        self._memory = gpu.alloc(self._marks_at(len(self._queues)))
        undo.callback(self._memory.close)
        self._memory.write(DEV_RDMA.pack(connections=sizes.connections))
        for number in range(len(self._queues)):
            self._restart(number, None)

    def _receive_slots(self, sizes: Sizes, undo: ExitStack) -> int:
        """Return the number of slots for receives, and create the SRQ if there may be several connections."""
        if sizes.receives and sizes.connections > 1:
            self._srq = self._pd.create_srq(sizes.receives, srq_type=SrqType.CONTIGUOUS, external_datapath=True)
            undo.callback(self._srq.close)
            return self._srq.entries
        device = self._pd.ctx.query_device()
        return queue_sizes(QpInitAttr(rq_wr=sizes.receives), device).rq_entries

    @property
    def device_address(self) -> int:
        """Return the address of the structure."""
        return self._memory.device_address

    def channel(self, number: int) -> Channel:
        exported = self._gpu.create_qp(
            self._pd, self._sends, receives=0 if self._srq else self._receives, srq=self._srq, cq_collapsed=True,
            timeout=self._timeout,
        )
        return _GpuChannel(self, number, exported)

    def poll(self) -> None:
        pass  # kernels have no tasks

    def flush(self) -> None:
        pass

    # --- the structure -----------------------------------------------------------------------------------------------

    def _row_at(self, number: int) -> int:
        return DEV_RDMA.size + DEV_RDMA_QUEUE.size * number

    def _marks_at(self, number: int) -> int:
        return self._row_at(len(self._queues)) + _MARK * sum(self._queues[:number])

    def _row(self, number: int) -> np.ndarray:
        """Return a copy of a queue's structure, to be changed and written back."""
        return self._memory.read(self._row_at(number), DEV_RDMA_QUEUE.size)

    def _restart(self, number: int, exported: ExportedQp | None) -> None:
        """Write the structure of an empty queue, with a queue pair or without."""
        slots, at = self._queues[number], self._memory.device_address
        self._memory.write(np.zeros(_MARK * slots, np.uint8), self._marks_at(number))
        row = DEV_RDMA_QUEUE.pack(
            qp=exported.device_address if exported else 0, marks=at + self._marks_at(number), rdma=at, slots=slots,
            shift=max(0, slots.bit_length() - 1),
        )
        self._memory.write(row, self._row_at(number))

    def connected(self, number: int, exported: ExportedQp) -> None:
        """Make the queue pair of a connection visible to kernels."""
        self._restart(number, exported)
        self._open[number] = exported
        receives = len(self._queues) - 1
        if self._receives and self._srq is None:
            self._restart(receives, exported)
        elif self._receives:
            self._lend_receives()

    def disconnected(self, number: int, exported: ExportedQp) -> None:
        """Hide the queue pair from kernels. No kernel is running."""
        if self._open.get(number) is not exported:
            return
        del self._open[number]
        received = int(DEV_RDMA_QUEUE.at(self._row(number))["received"])
        self._restart(number, None)
        if self._srq is None:
            self._restart(len(self._queues) - 1, None)
            return
        if exported.receives is not None:
            lost = exported.receives.produced(exported.cqe_offset(receives=True), received) - received
            self._lend_receives(lost)

    def _lend_receives(self, lost: int = 0) -> None:
        """Let receives be posted through any open connection. `lost` is the number of messages left in a closed one."""
        image = self._row(len(self._queues) - 1)
        row = DEV_RDMA_QUEUE.at(image)
        row["qp"] = next((exported.device_address for exported in self._open.values()), 0)
        row["taken"] += lost
        self._memory.write(image, self._row_at(len(self._queues) - 1))


class _GpuChannel(Channel):
    """A queue pair that kernels use."""

    def __init__(self, path: GpuDataPath, number: int, exported: ExportedQp):
        self._path, self._number, self._exported, self.qp = path, number, exported, exported.qp

    def open(self) -> None:
        self._path.connected(self._number, self._exported)

    def last_error(self) -> QpError | None:
        return self._exported.last_error()

    def end_tasks(self) -> None:
        pass  # kernels have no tasks

    def close(self) -> None:
        with ExitStack() as steps:
            steps.callback(self._exported.close)
            if not self._exported.closed:
                self._path.disconnected(self._number, self._exported)
