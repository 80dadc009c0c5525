"""Two ends of RDMA connections on one software NIC, with memory at both, and kernels that make calls for one of them.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from gpunetio import Access, Gpu, MemType, verbs
from gpunetio.core import BufArray, MemoryMap
from gpunetio.formats.core_device import DEV_BUF_ARR
from gpunetio.rdma import Rdma, RdmaConnection
from rdma_calls import CALL, NAMES, run_rdma_calls

Call = dict[str, object]
NBYTES = 1 << 16


class End:
    """One end: its `Rdma`, its connections, its memory, and that memory as a buf of each end."""

    def __init__(self, gpu: Gpu, pd: verbs.PD, undo: ExitStack, **options: object):
        options = {"permissions": Access.all(), **options}
        self.rdma = undo.enter_context(Rdma(pd, gpu=gpu, **options))  # type: ignore[arg-type]
        self.memory = gpu.alloc(NBYTES, MemType.CPU_GPU)
        undo.callback(self.memory.close)
        self.map = undo.enter_context(MemoryMap(pd, self.memory))
        self.array = undo.enter_context(BufArray(gpu, self.map, 1, NBYTES))
        self.connections: list[RdmaConnection] = []

    @property
    def buf(self) -> int:
        """The whole memory as a buf, for kernels of this process: it has both keys."""
        return self.array.device_address + DEV_BUF_ARR.size

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return self.memory.array


class Ends:
    """Two ends, `a` and `b`, with connections between them."""

    def __init__(self, gpu: Gpu, pd: verbs.PD, connections: int = 1, timeout: float = 10.0, **options: object):
        self.gpu, self._undo = gpu, ExitStack()
        with ExitStack() as undo:
            options = {"max_connections": connections or 1, "timeout": timeout, **options}
            self.a, self.b = End(gpu, pd, undo, **options), End(gpu, pd, undo, **options)
            for _ in range(connections):
                self.connect()
            self._undo = undo.pop_all()

    def connect(self) -> None:
        """Make one more connection."""
        (there, b), (here, a) = self.b.rdma.export(), self.a.rdma.export()
        a.connect(there)
        b.connect(here)
        self.a.connections.append(a)
        self.b.connections.append(b)

    def start(self, steps: Sequence[Sequence[Call]], grid: int = 1, end: End | None = None):
        """Launch a kernel: each step is a call of each thread. Returns a function that waits, and returns results."""
        end = end or self.a
        peer = self.b if end is self.a else self.a
        threads = len(steps[0])
        table = np.zeros((len(steps), threads), CALL.dtype)
        defaults = {"rbuf": peer.buf, "lbuf": end.buf, "nbytes": 8}
        for i, step in enumerate(steps):
            for t, call in enumerate(step):
                for name, value in {**defaults, **call}.items():
                    table[i, t][name] = NAMES.index(value) if name == "what" else value
        calls = self.gpu.alloc(table.nbytes, MemType.CPU_GPU)
        calls.write(table.view(np.uint8).ravel())
        out = self.gpu.alloc(8 * table.size, MemType.CPU_GPU)
        launch = run_rdma_calls[grid, threads // grid, self.gpu](end.rdma, calls, len(steps), out)

        def ended() -> list[list[int]]:
            assert launch.wait(60), "the kernel did not end"
            results = out.array.view(np.int64)[: table.size].reshape(table.shape).tolist()
            calls.close()
            out.close()
            return results

        return ended

    def run(self, steps: Sequence[Sequence[Call]], grid: int = 1, end: End | None = None) -> list[list[int]]:
        """Launch a kernel, and return what its calls have returned, by step and thread."""
        return self.start(steps, grid, end)()

    def alone(self, *calls: Call, end: End | None = None) -> list[int]:
        """Make calls in one thread."""
        return [row[0] for row in self.run([[call] for call in calls], end=end)]

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
