"""Both ends of a benchmark in one process."""

from __future__ import annotations

import numpy as np

from . import kernels
from .data import Data, Ends, Pattern, Payload
from .run import Run


class Loopback(Run):
    """The client sends from `near` to `far`, or gets from `far` into `near`.

    In a latency test the server writes `far` back to `back`.
    """

    role = "loopback"

    def _open(self) -> None:
        options, room = self.options, self.room
        near_pd, far_pd = self.ctx.create_pd(), self.ctx.create_pd()
        self.clients = [self._create_qp(near_pd) for _ in range(options.qps)]
        self.servers = [self._create_qp(far_pd) for _ in range(options.qps)]
        for client, server in zip(self.clients, self.servers):
            client.connect(server, sgid_index=options.gid_index)
        self.near, self.near_mr = self._buffer(near_pd, room)
        self.far, self.far_mr = self._buffer(far_pd, room)
        self.back, self.back_mr = self._buffer(near_pd, room if options.benchmark.latency else 1)
        self._open_memory()
        self._list_qps(self.clients)

    def data(self, size: int, value: int) -> Data:
        """See `Run`."""
        messages, slots, benchmark = self.messages(size), self.slots(size), self.options.benchmark
        near, far, back = self.near.array, self.far.array, self.back.array
        source, sinks = (far, [near]) if benchmark.reads else (near, [far, back] if benchmark.latency else [far])
        ends = Ends(source, sinks, self.marks.array)
        if self._file is None or self.payload_bytes is None:
            return Pattern(ends, size, messages, slots, value, benchmark.latency)
        return Payload(ends, size, messages, slots, self._file, min(self.payload_bytes, messages * size))

    def send(self, size: int, data: Data, first: int, count: int) -> np.ndarray:
        """See `Run`."""
        near, far, back, job = self.near, self.far, self.back, (size, data.total, data.slots, first, count)
        if not self.options.benchmark.latency:
            return self.bandwidth_kernel(far, self.far_mr.rkey, near, self.near_mr.lkey, *job)
        return self.launch(
            kernels.write_lat, 2, 1, self.clients[0], self.servers[0], near, self.near_mr.lkey, back,
            self.back_mr.rkey, far, self.far_mr.lkey, self.far_mr.rkey, *job, self.marks if self._file else 0,
            self.times,
        )  # fmt: skip
