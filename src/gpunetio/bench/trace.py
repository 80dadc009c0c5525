"""Record when single operations began, were posted and were complete, and write them as a Chrome trace.

The file is JSON in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open. A size is a process there.
A kernel thread is two threads: one shows the posts, the other the time from one completion to the next. In that format,
events of a thread may nest but not overlap, and operations in flight do overlap. Therefore each completion has the full
time of its operation among its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InvalidValueError, NotFoundError
from .options import Benchmark

_US = 1000  # ns


@dataclass(frozen=True)
class TracedThread:
    """A kernel thread's first operations of a size. `rows`: message, begin, posted and complete, in ns."""

    name: str
    operation: str
    rows: np.ndarray


class Trace:
    """The operations of a run, at most `limit` per thread and size: by size, in the order of measurement."""

    benchmark: Benchmark
    limit: int

    def __init__(self, benchmark: Benchmark, limit: int):
        self.benchmark, self.limit = benchmark, limit
        self.sizes: dict[int, list[TracedThread]] = {}

    def add(self, size: int, client: bool, noting: list[tuple[int, int]], rows: list[np.ndarray]) -> None:
        """Add what threads of one end recorded, each with its block and number. The last launch of a size counts."""
        kept = [thread for thread in self.sizes.get(size, []) if thread.name.startswith("client") != client]
        end = "client" if client else "server"
        receives = self.benchmark.two_sided and not client
        operation = "receive" if receives else self.benchmark.operation
        added = [
            TracedThread(f"{end} block {block} thread {thread}", operation, each.copy())
            for (block, thread), each in zip(noting, rows)
            if len(each)
        ]
        self.sizes[size] = sorted(kept + added, key=lambda thread: not thread.name.startswith("client"))

    def write(self, path: Path, title: str) -> None:
        """Write the file."""
        document = {"traceEvents": list(self._events(title)), "displayTimeUnit": "ns"}
        path.write_text(json.dumps(document, separators=(",", ":")))

    def _events(self, title: str) -> Iterator[dict[str, object]]:
        starts = [int(thread.rows[0, 1]) for threads in self.sizes.values() for thread in threads]
        zero = min(starts, default=0)
        for pid, (size, threads) in enumerate(self.sizes.items(), 1):
            yield _metadata("process_name", pid, 0, f"{title}, {size} bytes")
            for index, thread in enumerate(threads):
                posts, completions = 2 * index + 1, 2 * index + 2
                yield _metadata("thread_name", pid, posts, f"{thread.name}: post")
                yield _metadata("thread_name", pid, completions, f"{thread.name}: completion")
                before = 0
                for message, begin, posted, done in (thread.rows - [0, zero, zero, zero]).tolist():
                    arguments = {"message": message, "bytes": size}
                    yield _span(thread.operation, pid, posts, begin, posted, arguments)
                    since = max(before, posted)
                    whole = {**arguments, "us from begin to completion": (done - begin) / _US}
                    yield _span(f"{thread.operation} complete", pid, completions, since, max(since, done), whole)
                    before = max(since, done)


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _span(name: str, pid: int, tid: int, begin: int, end: int, arguments: dict[str, object]) -> dict[str, object]:
    return {
        "ph": "X", "name": name, "cat": "gpunetio", "pid": pid, "tid": tid, "ts": begin / _US,
        "dur": (end - begin) / _US, "args": arguments,
    }


def check(path: Path) -> None:
    """Raise an error if the trace cannot be written there. Call this before measuring."""
    if not path.absolute().parent.is_dir():
        raise NotFoundError(f"--trace {path}: there is no directory {path.absolute().parent}")
    if path.is_dir():
        raise InvalidValueError(f"--trace {path} is a directory: name a file")
