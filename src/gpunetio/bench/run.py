"""What one process of a benchmark has: a NIC, a place for kernels, queue pairs, buffers, and launches that end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from ..enums import NicHandler, QpSendDbrMode
from ..errors import InvalidValueError
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..verbs import MR, PD
from ..verbs import open as open_device
from . import kernels, launches
from .data import Data
from .launches import Launcher
from .options import Options
from .results import Check, Result

BUFFER_BYTES = 4 << 20  # of data at each end, which caches hold; messages beyond that use the slots again
PART_MESSAGES = 1 << 16  # of one launch at most
ENDLESS = 1 << 32  # messages: enough for any duration, and their bytes fit in 62 bits


class Run(Launcher):
    """One process's part of a benchmark, in a `with` statement. `role` says which, for people."""

    role = ""

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        try:
            self._file, self.payload_bytes = self._open_payload(options.payload)
            self.ctx = self._stack.enter_context(open_device(options.device, port=options.nic_port))
            self.gpu = self._stack.enter_context(Gpu(options.gpu))
            self.mtu = self.ctx.query_port().active_mtu
            self._open()
        except BaseException as error:
            self._leave(error)
            self._stack.close()
            raise

    @property
    def outcome(self) -> str:
        """What to say when all that arrived was right."""
        return "Data received correctly."

    @property
    def threads(self) -> int:
        """Kernel threads of a launch."""
        return self.options.kernel_threads(self.gpu.target)

    # --- what the kinds of runs do each in its own way ---------------------------------------------------------------

    def _open(self) -> None:
        """Make what the run needs."""
        raise NotImplementedError

    def _leave(self, error: BaseException | None) -> None:
        """The run ends, with an error or without: tell whoever must know."""

    def data(self, size: int, value: int) -> Data:
        """What messages of `size` bytes carry: the file, or a pattern of `value`."""
        raise NotImplementedError

    def lay_out(self, data: Data, first: int, count: int) -> None:
        """Prepare the ends for a launch."""
        data.lay_out(first, count)

    def send(self, size: int, data: Data, first: int, count: int) -> np.ndarray:
        """Launch the kernel for `count` messages, and wait for its end: its records."""
        raise NotImplementedError

    def collect(self, data: Data, first: int, count: int) -> None:
        """Look at what has arrived."""
        data.collect(first, count)

    def check(self, data: Data) -> Check:
        """How it all went."""
        return data.check()

    def tell(self, result: Result) -> None:
        """A size was measured."""

    def finish(self) -> None:
        """All sizes were measured."""

    # --- set-up ------------------------------------------------------------------------------------------------------

    def _open_payload(self, path: Path | None) -> tuple[BinaryIO | None, int | None]:
        if path is None:
            return None, None
        if path.exists() and not path.is_file():
            raise InvalidValueError(f"{path} is no regular file: a payload must be one")
        file = self._stack.enter_context(path.open("rb"))
        return file, path.stat().st_size

    def _open_memory(self) -> None:
        """What every launch needs."""
        latency = self.options.benchmark.latency
        self.qp_list = self.gpu.alloc(8 * self.options.qps)
        self._open_records(2 if latency else self.threads)
        self.times = self._alloc(8 * PART_MESSAGES if latency else 8)
        self.marks = self._alloc(PART_MESSAGES)

    def _buffer(self, pd: PD, nbytes: int) -> tuple[GpuMemory, MR]:
        memory = self._alloc(nbytes)
        return memory, pd.register(memory)

    def _create_qp(self, pd: PD) -> ExportedQp:
        options = self.options
        exported = self.gpu.create_qp(
            pd,
            options.depth,
            send_dbr_mode=QpSendDbrMode.NO_DBR_EXT if options.no_dbr else QpSendDbrMode.DBR_VALID,
            nic_handler=NicHandler(options.nic_handler),
            timeout=launches.WAIT_SECONDS,
        )
        self._stack.callback(exported.close)  # before the memory goes that its WQEs name
        self._qps.append(exported)
        return exported

    def _list_qps(self, qps: Sequence[ExportedQp]) -> None:
        """Give kernels these queue pairs."""
        self.qp_list.write(np.array([qp.device_address for qp in qps], np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leave(error)
        self._close()

    # --- data --------------------------------------------------------------------------------------------------------

    def messages(self, size: int) -> int:
        """Messages of one size: the iterations, as many of them as the file needs, or more than time allows."""
        if self.options.duration is not None:
            return ENDLESS
        if self.payload_bytes is None:
            return self.options.iterations
        return min(self.options.iterations, -(-self.payload_bytes // size))

    def slots(self, size: int) -> int:
        """Slots of the buffers. Counting in place takes one, and a launch of a file's bytes uses none twice."""
        if self.payload_bytes is None and self.options.benchmark.latency:
            return 1
        return max(1, min(self.messages(size), BUFFER_BYTES // size, PART_MESSAGES))

    @property
    def room(self) -> int:
        """Bytes of the buffers."""
        return max(self.slots(size) * size for size in self.options.sizes)

    # --- launches ----------------------------------------------------------------------------------------------------

    def bandwidth_kernel(
        self, far: int | GpuMemory, far_rkey: int, near: GpuMemory, near_lkey: int, *job: int
    ) -> np.ndarray:
        """Launch the benchmark's kernel on the listed queue pairs: `job` is size, total, slots, first, count."""
        options = self.options
        # Otherwise two blocks, so that queues are shared across blocks, unless the threads cannot be halved.
        grid = options.qps if options.benchmark.name == "write_bw" else 2 if self.threads % 2 == 0 else 1
        kernel = getattr(kernels, options.benchmark.name)
        keys = (far, far_rkey, near, near_lkey)
        return self.launch(kernel, grid, self.threads // grid, self.qp_list, options.qps, *keys, *job)
