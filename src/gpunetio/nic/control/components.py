"""Assign queues to workers.

While a worker serves a QP, it writes the QP's completion queues, its SRQ, and its peer if the peer is a QP of this NIC.
Queues tied to each other in this way form a component (of a graph), which a single worker serves, without locks. When a
new tie joins two components, one of them moves to the other's worker. When a tie is removed, nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

import numpy as np

from ..engine.hardware import Engine
from ..state.cq import CQ_ROW
from ..turn.commands import EngineCommand

FIRST = 0  # in place of a row's address: whatever is tied to FIRST needs the first worker, which serves the wires
_LARGE = 32  # number of queues from which a component is not moved to balance the load


class Components:
    """The components of a NIC, by the addresses of their queues' rows. Callers hold the NIC's lock.

    `records` are the workers' records. Worker 0, the first, serves the wires and all QPs whose peers are on other NICs.
    """

    def __init__(self, engine: Engine, records: np.ndarray):
        self._engine, self._records = engine, records
        self._workers = engine.workers
        self._load = [0] * len(self._workers)  # queue pairs
        self._worker: dict[int, int] = {FIRST: 0}  # row → number of its worker; also for peers that do not exist yet
        self._qps: set[int] = set()
        self._cqs: set[int] = set()
        self._ties: dict[int, set[int]] = {}  # QP → its queues, and its peer
        self._tied: dict[int, set[int]] = {}  # queue, peer or FIRST → the QPs that are tied to it
        self._peers: dict[int, int] = {}  # QP → its peer, or FIRST
        self._movable: list[set[int]] = [set() for _ in self._workers]  # by worker: QPs that may move to another worker
        self._gathered = False

    def worker_of(self, row: int) -> int:
        """Return the number of the worker that serves a queue."""
        return self._worker.get(row, 0)

    # --- adding and removing queues --------------------------------------------------------------------------------

    def add_cq(self, row: int) -> None:
        """Add a completion queue. The first worker serves it until a QP uses it."""
        self._cqs.add(row)
        self._records[0]["cq_count"] += 1

    def add_qp(self, row: int, queues: Iterable[int]) -> int:
        """Add a QP that the engine does not serve yet, with its CQs and SRQ. Return the number of its worker."""
        queues = dict.fromkeys(queues)
        used = [queue for queue in (row, *queues) if self._tied.get(queue)]
        if used:
            worker = self.worker_of(used[0])
        else:
            worker = 0 if self._gathered else min(range(len(self._load)), key=self._load.__getitem__)
        self._worker[row] = worker
        self._move({queue for queue in queues if queue not in used}, worker)
        for queue in queues:
            self._tie(row, queue)
        self._qps.add(row)
        self._load[self.worker_of(row)] += 1
        self._update_movable(row)
        return self.worker_of(row)

    def add_ethernet(self, row: int, queues: Iterable[int]) -> None:
        """Add an SQ or RQ. Move its queues to the first worker, which serves the wires."""
        for queue in dict.fromkeys((FIRST, *queues)):
            self._tie(row, queue)

    def connect(self, row: int, peer: int) -> None:
        """Tie a QP to the row of its peer in this NIC, or to FIRST if its peer is reached over a wire."""
        if self._peers.get(row) != peer:
            self.disconnect(row)
            self._tie(row, peer)
            self._peers[row] = peer
            if peer == FIRST:
                self._update_movable(row)
                self._rebalance()

    def disconnect(self, row: int) -> None:
        """Untie a QP from its peer."""
        if (peer := self._peers.pop(row, None)) is not None:
            self._untie(row, peer)
            self._update_movable(row)

    def remove(self, row: int) -> None:
        """Remove a queue that the engine no longer serves."""
        if row in self._qps:
            self._qps.remove(row)
            self._movable[self.worker_of(row)].discard(row)
            self._load[self.worker_of(row)] -= 1
        self._peers.pop(row, None)
        for other in tuple(self._ties.get(row, ())):
            self._untie(row, other)
        if row in self._cqs:
            self._cqs.remove(row)
            self._records[self.worker_of(row)]["cq_count"] -= 1
        if row not in self._tied:
            self._remove_worker(row)

    def gather(self) -> None:
        """Move all queues to the first worker, and assign all future queues to it."""
        self._move(set(self._worker), 0)
        self._gathered = True

    # --- balancing the load ----------------------------------------------------------------------------------------

    def _update_movable(self, row: int) -> None:
        """Update the lists of movable QPs after a QP has moved, or has gained or lost its peer.

        A QP is movable unless its peer is on another NIC.
        """
        for number, movable in enumerate(self._movable):
            if number == self.worker_of(row) and self._peers.get(row) != FIRST:
                movable.add(row)
            else:
                movable.discard(row)

    def _rebalance(self) -> None:
        """Move components from the most loaded worker to the least loaded one until their loads are similar.

        QPs that use wires move to the first worker only when they are connected. If a program creates all its QPs
        before it connects any, the QPs are first distributed without regard to that.
        """
        while not self._gathered:
            loaded = [number for number, movable in enumerate(self._movable) if movable]
            if not loaded:
                break
            most = max(loaded, key=self._load.__getitem__)
            least = min(range(len(self._load)), key=self._load.__getitem__)
            rows = set(islice(self._component(next(iter(self._movable[most]))), _LARGE))
            qps = rows & self._qps
            if FIRST in rows or len(rows) == _LARGE:
                self._movable[most] -= rows
            elif self._load[least] + len(qps) < self._load[most]:
                self._move(rows, least)
            else:
                break

    # --- ties ------------------------------------------------------------------------------------------------------

    def _tie(self, row: int, other: int) -> None:
        """Tie a QP to another row, and move the smaller of the two components to the worker of the larger."""
        here, there = self.worker_of(row), self._worker.setdefault(other, self.worker_of(row))
        if here != there:
            smaller, rest = self._smaller_component(row, other)
            if FIRST in smaller:
                self._move(set(self._component(rest)), 0)
            else:
                self._move(set(smaller), self.worker_of(rest))
        self._ties.setdefault(row, set()).add(other)
        self._tied.setdefault(other, set()).add(row)

    def _untie(self, row: int, other: int) -> None:
        for ties, key, value in ((self._ties, row, other), (self._tied, other, row)):
            ties[key].discard(value)
            if not ties[key]:
                del ties[key]
        if other not in self._tied:
            self._remove_worker(other)

    def _remove_worker(self, row: int) -> None:
        """Remove a row's worker, unless the row is a QP or a CQ, which a worker serves even without ties."""
        if row != FIRST and row not in self._qps and row not in self._cqs:
            self._worker.pop(row, None)

    def _component(self, row: int) -> Iterator[int]:
        """Yield a row, and all rows that are tied to it directly or indirectly."""
        known, todo = {row}, [row]
        while todo:
            at = todo.pop()
            yield at
            new = (self._ties.get(at, set()) | self._tied.get(at, set())) - known
            known |= new
            todo.extend(new)

    def _smaller_component(self, a: int, b: int) -> tuple[list[int], int]:
        """Return the smaller of two components, and a row of the larger, which is not traversed to its end."""
        ours: list[int] = []
        theirs: list[int] = []
        for one, other in zip_longest(self._component(a), self._component(b)):
            if one is None:
                break
            if other is None:
                return theirs, a
            ours.append(one)
            theirs.append(other)
        return ours, b

    def _move(self, rows: set[int], to: int) -> None:
        """Move queues, from whatever workers serve them, to the worker `to`."""
        rows = {row for row in rows if self.worker_of(row) != to}
        address = np.array([self._workers[to]], np.int64)
        commands = [(EngineCommand.MOVE_QP, row, address) for row in rows & self._qps]
        commands += [(EngineCommand.WRITE_ROW, row + CQ_ROW.worker, address) for row in rows & self._cqs]
        if commands:
            self._engine.post_alone(*commands)
        for row in rows:
            if row in self._qps:
                self._load[self.worker_of(row)] -= 1
                self._load[to] += 1
            elif row in self._cqs:
                self._records[self.worker_of(row)]["cq_count"] -= 1
                self._records[to]["cq_count"] += 1
            self._worker[row] = to
            if row in self._qps:
                self._update_movable(row)
        self._engine.kick()  # a worker that had no queues sleeps until it is woken
