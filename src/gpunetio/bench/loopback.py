"""Both ends of a benchmark in one process: queue pairs, buffers, and launches that have an end."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..device.status import EIO, ETIMEDOUT, NAMES
from ..enums import MemType, NicHandler, QpSendDbrMode
from ..errors import DriverError, InvalidValueError, TimedOutError
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..verbs import MR, PD
from ..verbs import open as open_device
from .data import Data, Ends, Pattern, Payload
from .kernels import RECORD_WORDS, STOPPED
from .options import Options

logger = logging.getLogger("gpunetio.bench")

BUFFER_BYTES = 16 << 20  # of data at each end; messages beyond that use the slots again
PART_MESSAGES = 1 << 16  # of one launch at most
ENDLESS = 1 << 32  # messages: enough for any duration, and their bytes fit in 62 bits
WAIT_SECONDS = 10.0  # of one wait in a kernel
LAUNCH_SECONDS = 120.0  # of one launch, which may have to compile first
GRACE_SECONDS = 2 * WAIT_SECONDS  # for a kernel that was told to stop


class Loopback:
    """What a benchmark needs while it runs, in a `with` statement.

    The client sends from `near` to `far`, or gets from `far` into `near`. In a latency test the server writes `far`
    back to `back`.
    """

    def __init__(self, options: Options):
        self.options = options
        self._running: Any = None
        self._stack = ExitStack()
        try:
            self._file, self.payload_bytes = self._open_payload(options.payload)
            self._open()
        except BaseException:
            self._stack.close()
            raise

    # --- set-up ----------------------------------------------------------------------------------------------------

    def _open_payload(self, path: Path | None) -> tuple[BinaryIO | None, int]:
        if path is None:
            return None, 0
        if path.exists() and not path.is_file():
            raise InvalidValueError(f"{path} is no regular file: a payload must be one")
        file = self._stack.enter_context(path.open("rb"))
        return file, path.stat().st_size

    def _open(self) -> None:
        options, latency = self.options, self.options.benchmark.latency
        ctx = self._stack.enter_context(open_device(options.device))
        self.gpu = self._stack.enter_context(Gpu(options.gpu))
        self.threads = options.kernel_threads(self.gpu.target)
        self.mtu = ctx.query_port().active_mtu
        near_pd, far_pd = ctx.create_pd(), ctx.create_pd()
        self.clients = [self._create_qp(near_pd) for _ in range(options.qps)]
        self.servers = [self._create_qp(far_pd) for _ in range(options.qps)]
        for client, server in zip(self.clients, self.servers):
            client.connect(server, sgid_index=options.gid_index)
        room = max(self._slots(size, self._messages(size)) * size for size in options.sizes)
        self.near, self.near_mr = self._buffer(near_pd, room)
        self.far, self.far_mr = self._buffer(far_pd, room)
        self.back, self.back_mr = self._buffer(near_pd, room if latency else 1)
        self.qp_list = self.gpu.alloc(8 * options.qps)
        self.qp_list.write(np.array([client.device_address for client in self.clients], np.int64))
        self._stop = self._alloc(8)
        self._out = self._alloc(8 * RECORD_WORDS * (2 if latency else self.threads))
        self.times = self._alloc(8 * PART_MESSAGES if latency else 8)
        self.marks = self._alloc(PART_MESSAGES)

    def _alloc(self, nbytes: int) -> GpuMemory:
        return self.gpu.alloc(nbytes, MemType.CPU_GPU)

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
            timeout=WAIT_SECONDS,
        )
        self._stack.callback(exported.close)  # before the memory goes that its WQEs name
        return exported

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._end_launch():
            logger.error("a kernel does not end: what it uses stays open")
            self._stack.pop_all()
        self._stack.close()

    # --- data ------------------------------------------------------------------------------------------------------

    def _messages(self, size: int) -> int:
        """Messages of one size: the iterations, as many of them as the file needs, or more than time allows."""
        if self.options.duration is not None:
            return ENDLESS
        if self._file is None:
            return self.options.iterations
        return min(self.options.iterations, -(-self.payload_bytes // size))

    def _slots(self, size: int, messages: int) -> int:
        """Slots of the buffers. Counting in place takes one, and a launch of a file's bytes uses none twice."""
        if self._file is None and self.options.benchmark.latency:
            return 1
        return max(1, min(messages, BUFFER_BYTES // size, PART_MESSAGES))

    def data(self, size: int, value: int) -> Data:
        """What messages of `size` bytes carry: the file, or a pattern of `value`."""
        messages, benchmark = self._messages(size), self.options.benchmark
        slots = self._slots(size, messages)
        near, far, back = self.near.array, self.far.array, self.back.array
        source, sinks = (far, [near]) if benchmark.reads else (near, [far, back] if benchmark.latency else [far])
        ends = Ends(source, sinks, self.marks.array)
        if self._file is None:
            return Pattern(ends, size, messages, slots, value, benchmark.latency)
        return Payload(ends, size, messages, slots, self._file, min(self.payload_bytes, messages * size))

    # --- launches --------------------------------------------------------------------------------------------------

    def launch(self, kernel: Any, grid: int, block: int, *args: Any) -> np.ndarray:
        """Run a kernel to its end. Its records: a row a thread, with the nanoseconds of begin and end, and a status."""
        records = self._out.array.view(np.int64).reshape(-1, RECORD_WORDS)
        records[:] = 0
        self._stop.array[:] = 0
        with self._interrupt_stops_the_kernel():
            self._running = kernel[grid, block, self.gpu](*args, self._stop, self._out)
            try:
                ended = self._running.wait(LAUNCH_SECONDS)
            except Exception:  # raised by the kernel's threads, which have ended
                self._running = None
                raise
            if not ended:
                stalls = " ".join(self.gpu.watchdog.stalls)
                raise TimedOutError(f"the kernel did not end within {LAUNCH_SECONDS:g} s. {stalls}".rstrip())
            self._running = None
        self._raise_for(records[:, 2])
        return records.copy()

    @contextmanager
    def _interrupt_stops_the_kernel(self) -> Iterator[None]:
        """Have Ctrl+C end the kernel first, and raise KeyboardInterrupt only then: its queues go with the stack."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
            yield  # not ours to change
            return
        interrupted = False

        def stop(signum: int, frame: Any) -> None:
            nonlocal interrupted
            interrupted = True
            self._tell_to_stop()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if interrupted:
            raise KeyboardInterrupt

    def _tell_to_stop(self) -> None:
        self._stop.array.view(np.int64)[0] = 1

    def _raise_for(self, statuses: np.ndarray) -> None:
        failures = [int(status) for status in statuses if status < 0]
        if not failures:
            return
        # One end's error stops the other, or leaves it waiting: the cause is the error completion, if there is one.
        cause = min(failures, key=lambda status: (status != EIO, status == STOPPED))
        errors = [str(error) for qp in (*self.clients, *self.servers) if (error := qp.last_error()) is not None]
        details = "; ".join([*errors, *self.gpu.watchdog.stalls]) or f"status {cause}"
        what = f"the kernel ended with '{NAMES.get(cause, 'stopped')}': {details}"
        raise TimedOutError(what) if cause == ETIMEDOUT else DriverError(what)

    def _end_launch(self) -> bool:
        """Tell a kernel that still runs to stop: whether none runs any more."""
        if self._running is None:
            return True
        self._tell_to_stop()
        return self._running.wait(GRACE_SECONDS)
