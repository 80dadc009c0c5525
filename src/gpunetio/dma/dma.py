"""The context of the DMA library (`doca_dma`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..arguments import within
from ..core import CoreContext
from ..errors import BadStateError
from ..formats.dma_device import DEV_DMA
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..gpu.gpu import DEFAULT_TIMEOUT
from ..verbs import PD, Sge
from .caps import DmaCaps, query_caps
from .copier import Copier
from .task import MemcpyTask

_MOST_SLOTS = 1 << 15  # kernels find a slot with a 16-bit index


class Dma(CoreContext):
    """Memory copies by the NIC (`doca_dma_create`), for kernels if there is a Gpu, and otherwise for tasks.

    `depth`    copies in flight, rounded up to a power of two; a list of buffers takes one copy per piece
    `gpu`      a Gpu whose kernels enqueue copies (`doca_ctx_set_datapath_on_gpu`)
    `timeout`  seconds after which a wait in a kernel ends with ETIMEDOUT

    Source and destination may each be host or GPU memory. Tasks take buffers, lists of buffers, memory maps, regions,
    and any memory that can be registered, such as a NumPy array or a tensor. Kernels take elements of a `BufArray`.

    Pass the `Dma` or its `device_address` to a kernel. NotSupportedError if the device has no DMA.
    """

    _has_gpu_datapath = True
    caps: DmaCaps

    def __init__(self, pd: PD, *, depth: int = 128, gpu: Gpu | None = None, timeout: float = DEFAULT_TIMEOUT):
        super().__init__(pd, gpu)
        self.caps = query_caps(self.ctx)
        most = min(self.ctx.query_device().max_qp_wr, _MOST_SLOTS)
        self._depth, self._timeout = within("depth", depth, 1, most), timeout
        self._copier: Copier | None = None
        self._queue: ExportedQp | None = None
        self._structure: GpuMemory | None = None
        self._created(f"DMA on {self.ctx.name}")

    def _start(self, undo: ExitStack) -> None:
        if self.gpu is not None:
            self._start_on_gpu(self.gpu, undo)
            return
        self._copier = Copier(self.pd, self._depth, undo)
        undo.callback(setattr, self, "_copier", None)

    def _start_on_gpu(self, gpu: Gpu, undo: ExitStack) -> None:
        """Create a queue for kernels. Its CQ is collapsed: only the last copy of a commit makes a completion."""
        queue = gpu.create_qp(self.pd, self._depth, cq_collapsed=True, memcpy=True, timeout=self._timeout)
        undo.callback(queue.close)
        queue.qp.connect(queue.qp)
        structure = gpu.alloc(DEV_DMA.size)
        undo.callback(structure.close)
        opaque = queue.qp.opaque
        assert opaque is not None
        structure.write(DEV_DMA.pack(
            qp=queue.device_address, max_nbytes=self.caps.max_buf_size, opaque_addr=opaque.address,
            opaque_lkey=opaque.lkey,
        ))
        self._queue, self._structure = queue, structure
        undo.callback(setattr, self, "_structure", None)
        undo.callback(setattr, self, "_queue", None)

    # --- kernels -----------------------------------------------------------------------------------------------------

    @property
    def queue(self) -> ExportedQp:
        """Return the queue that kernels fill. Its `last_error()` says why copies failed.

        BadStateError unless the context is running with its data path on a GPU.
        """
        self.check_open()
        if self._queue is None:
            raise BadStateError(
                f"{self} has no queue for kernels: it is {self.state.name}"
                + ("; give it a gpu before start()" if self.gpu is None else "; start() it first")
            )
        return self._queue

    @property
    def device_address(self) -> int:
        """Return the address that kernels take (`doca_dma_get_gpu_handle`)."""
        _ = self.queue
        assert self._structure is not None
        return self._structure.device_address

    # --- tasks -------------------------------------------------------------------------------------------------------

    def memcpy(self, source: object, destination: object, user_data: object = None) -> MemcpyTask:
        """Return a task that copies all bytes of `source` to the start of `destination`.

        `doca_dma_task_memcpy_alloc_init`. Each of the two is a `Buf`, the head of a list of them, a `MemoryMap` or
        another region, or plain memory, which is registered while the task is in flight. If the source is a `Buf`, its
        data is copied. If the destination is a `Buf`, its data is what was copied, once the task has succeeded. If the
        two overlap, the overlapping bytes of the destination are undefined afterwards.
        """
        return MemcpyTask(self, source, destination, user_data)

    def post(self, task: MemcpyTask, copies: Sequence[tuple[Sge, Sge]]) -> None:
        """Post pairs of source and target. FullError if there is no room for all of them. Called by the task."""
        assert self._copier is not None
        self._copier.post(task, copies)

    def _poll(self) -> None:
        if self._copier is not None:
            for task, error in self._copier.poll():
                self._finish(task, error)

    def _flush(self) -> None:
        if self._copier is not None:
            self._copier.fail()
