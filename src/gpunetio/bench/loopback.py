"""Both ends of a benchmark in one process."""

from __future__ import annotations

from ..gpu import ExportedQp, GpuMemory
from ..verbs import MR
from .data import Data, Ends, Pattern, Payload
from .run import Run
from .words import Order, Words


class Loopback(Run):
    """The client sends from `near` to `far`, or gets from `far` into `near`.

    In a latency test the server writes `far` back to `back`.
    """

    role = "loopback"
    clients: list[ExportedQp]
    servers: list[ExportedQp]
    near: GpuMemory
    near_mr: MR
    far: GpuMemory
    far_mr: MR
    back: GpuMemory

    def _open(self) -> None:
        client, server = self._open_side(True), self._open_side(False)
        for ours, theirs in zip(client.queues, server.queues):
            ours.connect(theirs, sgid_index=self.options.gid_index)
        self.clients, self.servers = client.qps, server.qps
        self.near, self.near_mr, self.far, self.far_mr = client.data, client.data_mr, server.data, server.data_mr
        self.back = client.back
        if self.options.benchmark.two_sided:
            self.options.check_receives(self.gpu.target, self.servers[0].qp.rq_entries)
        self._open_memory()
        marks = self.marks if self._file else None
        rows = client.rows(server.shown, marks, self.notes)
        if self.options.benchmark.answers:
            rows += server.rows(client.shown, marks, self.notes)
        self._list_ends(rows)
        notes = self.notes.array.view(int)
        self.counts: list[Words | Order] = [*client.counts(notes), *server.counts(notes)]

    def data(self, size: int, value: int) -> Data:
        messages, slots, benchmark = self.messages(size), self.slots(size), self.options.benchmark
        near, far, back = self.near, self.far, self.back
        if benchmark.reads:
            ends = Ends(far, [near], self.marks.array)
        else:
            ends = Ends(near, [far, back] if benchmark.latency else [far], self.marks.array, self.order)
        if self._file is None or self.payload_bytes is None:
            return Pattern(ends, size, messages, slots, value, benchmark.marked)
        return Payload(ends, size, messages, slots, self._file, min(self.payload_bytes, messages * size))
