"""Programs of device calls: a table of calls, which kernels carry out, with separate calls for each thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from device_calls import CALL, NAMES, run_calls
from gpunetio import Gpu, MemType, device

THREAD, WARP, BLOCK = device.THREAD, device.WARP, device.BLOCK
EXCLUSIVE, CTA, GPU = device.EXCLUSIVE, device.CTA, device.GPU
SCOPES = {THREAD: "thread", WARP: "warp", BLOCK: "block"}
GIB = 1 << 30
UNTOUCHED = -0x1111_1111_1111_1112  # a result that no call has stored
COMPILED_BY = 110  # seconds that a program may take: the first one compiles the whole device library

Call = dict[str, Any]  # fields of a CALL; `what` is a name


def table_of(program: Sequence[Sequence[Call]], **common: Any) -> tuple[np.ndarray, set[Any]]:
    """A table of calls, one row of `program` a step, of as many calls as there are threads; and what the calls use."""
    used: set[Any] = set()
    table = np.zeros((len(program), len(program[0])), CALL.dtype)
    table["ref"] = -1
    for i, step in enumerate(program):
        for t, call in enumerate(step):
            for name, value in {**common, **call}.items():
                if name == "what":
                    value = NAMES.index(value)
                if hasattr(value, "device_address"):
                    used.add(value)
                    value = value.device_address
                table[i, t][name] = int(value)
    return table, used


class Started:
    """A program under way."""

    def __init__(self, gpu: Gpu, table: np.ndarray, used: set[Any], grid: int, wanted: int):
        self._wanted = wanted
        steps, threads = table.shape
        self._shape, self._rooms = (steps, threads), ExitStack()
        calls = self._rooms.enter_context(gpu.alloc(max(table.nbytes, 64), MemType.CPU_GPU))
        self._out = self._rooms.enter_context(gpu.alloc(max(8 * table.size, 64), MemType.CPU_GPU))
        calls.array[: table.nbytes] = np.frombuffer(table.tobytes(), np.uint8)
        self._out.array.view(np.int64)[:] = UNTOUCHED
        self.launch = run_calls[grid, threads // grid, gpu](calls, steps, self._out)
        for part in used:
            part.used_by(self.launch)

    def end(self, timeout: float = COMPILED_BY) -> np.ndarray:
        """What each call has returned: a row a step."""
        assert self.launch.wait(timeout), f"the program did not end within {timeout:g} s"
        results = self._out.array.view(np.int64)[: self._shape[0] * self._shape[1]].reshape(self._shape).copy()
        self._rooms.close()
        return results[:, : self._wanted]


def start(gpu: Gpu, program: Sequence[Sequence[Call]], grid: int = 1, **common: Any) -> Started:
    """Launch a program; `common` is in all of its calls.

    A block of host threads has whole warps: threads that are too few for that get others that do nothing.
    """
    threads = len(program[0])
    if gpu.target == "cpu" and (surplus := -threads % gpu.warp):
        idle = {True: "barrier", False: "skip"}
        program = [[*step, *[{"what": idle[step[0]["what"] == "barrier"]}] * surplus] for step in program]
    return Started(gpu, *table_of(program, **common), grid, threads)


def run(gpu: Gpu, program: Sequence[Sequence[Call]], grid: int = 1, **common: Any) -> np.ndarray:
    """Launch a program and wait for its results."""
    return start(gpu, program, grid, **common).end()
