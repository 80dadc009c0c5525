"""One process of a benchmark: a NIC, a place for kernels, queue pairs, buffers, and launches that always end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import InvalidValueError
from ..gpu import ExportedQp, Gpu, GpuMemory
from ..verbs import Context
from ..verbs import open as open_device
from . import timestamps
from .data import Data
from .ends import End, table
from .kernels.catalog import KERNELS
from .launches import Launcher
from .options import Options
from .results import Check, Result
from .side import Side
from .trace import Trace
from .words import Order, Words

BUFFER_BYTES = 4 << 20  # of data at each end, so that they fit in caches; more messages reuse the slots
PART_MESSAGES = 1 << 16  # of one launch, at most
PART_BYTES = 1 << 30
ENDLESS = 1 << 32  # messages: enough for any duration, and their bytes fit in 62 bits


class Run(Launcher, ABC):
    """One process's part of a benchmark, for a `with` statement. `role` describes it to the user."""

    role = ""
    payload_bytes: int | None
    ctx: Context
    mtu: int
    notes: GpuMemory
    marks: GpuMemory

    def __init__(self, options: Options):
        super().__init__()
        options.check()
        self.options = options
        self.trace: Trace | None = None
        self.counts: list[Words | Order] = []
        self._held: list[Side] = []  # keeps the regions whose keys kernels use
        try:
            self._file, self.payload_bytes = self._open_payload(options.payload)
            self.ctx = self._stack.enter_context(open_device(options.device, port=options.nic_port))
            self.gpu: Gpu = self._stack.enter_context(
                Gpu(options.gpu, warp=options.warp("cpu"), queue_memory=options.queue_memory)
            )
            self.mtu = self.ctx.query_port().active_mtu
            self._open()
        except BaseException as error:
            self._leave(error)
            self._stack.close()
            raise

    @property
    def outcome(self) -> str:
        """Return the text for correct data."""
        return "Data received correctly."

    @property
    def threads(self) -> int:
        """Return the kernel threads of a launch at one end."""
        return self.options.kernel_threads(self.gpu.target)

    @property
    def queue(self) -> ExportedQp:
        """Return one of the queue pairs, which all have the same attributes."""
        return self._qps[0]

    @property
    def counters(self) -> int:
        """Return how many words count the messages of a launch in turn: one per thread, or one per queue."""
        return self.options.qps if self.options.benchmark.two_sided else self.threads

    # --- what the kinds of runs do each in its own way ---------------------------------------------------------------

    @abstractmethod
    def _open(self) -> None:
        """Open everything that the run needs."""

    def _leave(self, error: BaseException | None) -> None:
        """Tell the other end how the run ends, with `error` or without."""

    @abstractmethod
    def data(self, size: int, value: int) -> Data:
        """Return the data of messages of `size` bytes: the file, or a pattern of `value`."""

    def lay_out(self, data: Data, first: int, count: int) -> None:
        """Prepare the ends for a launch."""
        data.lay_out(first, count)
        for words in self.counts:
            words.lay_out(first)

    def send(self, data: Data, first: int, count: int) -> np.ndarray:
        """Launch the kernel for `count` messages, wait for its end and return its records."""
        return self.launch_for(data.size, data.total, data.slots, first, count)

    def collect(self, data: Data, first: int, count: int) -> None:
        """Read what has arrived."""
        data.collect(first, count)
        for words in self.counts:
            words.collect(count, self.counters)

    def check(self, data: Data) -> Check:
        """Return the verdict of all launches of a size."""
        check = data.check()
        flags = [words.total for words in self.counts if isinstance(words, Words) and words.told]
        problems = (f"message size {data.size}: {text}" for words in self.counts if (text := words.problem()))
        return replace(check, problem=check.problem or next(problems, None), flag=flags[0] if flags else None)

    def tell(self, result: Result) -> None:
        """Report the result of a size."""

    def finish(self) -> None:
        """Finish after the last size."""

    # --- set-up ------------------------------------------------------------------------------------------------------

    def _open_payload(self, path: Path | None) -> tuple[BufferedReader | None, int | None]:
        if path is None:
            return None, None
        if path.exists() and not path.is_file():
            raise InvalidValueError(f"{path} is not a regular file: a payload must be one")
        file = self._stack.enter_context(path.open("rb"))
        return file, path.stat().st_size

    def _open_side(self, client: bool) -> Side:
        """Open an end in this process."""
        side = Side(self.ctx, self.gpu, self.options, client, self.room, self._stack)
        self._qps += side.queues
        self._held.append(side)
        return side

    def _open_memory(self) -> None:
        """Allocate the memory that every launch needs."""
        self.options.check_threads(self.gpu.target)
        self.notes = self._alloc(8 * PART_MESSAGES if self.options.benchmark.answers else 8)
        self.marks = self._alloc(PART_MESSAGES)

    def _list_ends(self, rows: Sequence[End]) -> None:
        """List these ends for kernels. Each end has its own block if the server also has a kernel."""
        answers = self.options.benchmark.answers
        self._sides = len(rows) // self.options.qps if answers else 1
        self._begins_as_client = bool(rows[0].client)
        self._ends = self.gpu.alloc(8 * len(End._fields) * len(rows))
        self._ends.write(table(rows))
        self._open_records(self._sides * self.threads)
        if self.options.traced is not None:
            limit = self.options.traced_of(self.threads)
            self._noting = self.options.noting(self.threads)
            self.trace = Trace(self.options.benchmark, limit)
            self._parts = self._alloc(self._sides * len(self._noting) * timestamps.part_bytes(limit))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leave(error)
        self._close()

    # --- data --------------------------------------------------------------------------------------------------------

    def messages(self, size: int) -> int:
        """Return the messages of one size: the iterations, the file's number, or more than a duration allows."""
        if self.options.duration is not None:
            return ENDLESS
        if self.payload_bytes is None:
            return self.options.iterations
        return min(self.options.iterations, -(-self.payload_bytes // size))

    def slots(self, size: int) -> int:
        """Return the slots of the buffers.

        Counting in place needs one; a launch of a file's bytes uses each slot once.
        """
        if self.payload_bytes is None and self.options.benchmark.marked:
            return 1
        return max(1, min(self.messages(size), BUFFER_BYTES // size, PART_MESSAGES))

    @property
    def room(self) -> int:
        """Return the bytes of the buffers."""
        return max(self.slots(size) * size for size in self.options.sizes)

    def most(self, data: Data) -> int:
        """Return the most messages of one launch. For a file, or with any order of arrival, each slot is used once."""
        if self.payload_bytes is not None or self.options.benchmark.two_sided:
            return data.slots
        return max(1, min(PART_MESSAGES, PART_BYTES // data.size))

    @property
    def order(self) -> np.ndarray | None:
        """Return the order that a receiving kernel recorded (`Ends`)."""
        return self.notes.array.view(np.int64) if self.options.benchmark.two_sided else None

    # --- launches ----------------------------------------------------------------------------------------------------

    def launch_for(
        self, size: int, total: int, slots: int, first: int, count: int, launched: Callable[[], None] = lambda: None
    ) -> np.ndarray:
        """Launch the benchmark's kernel with the ends in this process, and return its records."""
        options, threads = self.options, self.threads
        blocks = options.blocks(threads)
        trace = self.trace if first == 0 and count > 0 else None
        if trace:
            self._parts.write(timestamps.prepared(self._sides * len(self._noting), trace.limit))
        records = self.launch(
            KERNELS[options.benchmark.name], self._sides * blocks, threads // blocks, self._ends, options.qps,
            int(options.scope), size, total, slots, first, count, self._parts if trace else 0, launched=launched,
        )
        if trace:
            parts = self._parts.array.view(np.int64).reshape(self._sides * len(self._noting), -1)
            for side, rows in enumerate(np.split(parts, self._sides)):
                trace.add(size, self._begins_as_client and side == 0, self._noting, timestamps.noted(rows))
        return records
