"""Which worker serves which queues.

A worker owns what it writes while it serves a QP: the QP's completion queues, its SRQ, and its peer if that is a QP of
this NIC. Queues that are tied in this way are a component, and one worker serves all of it, without a lock. What a new
tie joins is brought to one worker. What no longer is tied stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

import numpy as np

from ..engine.hardware import Engine
from ..state.cq import CQ_ROW
from ..turn.commands import EngineCommand

FIRST = 0  # in place of a row: what only the first worker serves, such as wires
_LARGE = 32  # queues of a component that stays where it is


class Components:
    """The components of a NIC, by the addresses of their queues' rows. Callers hold the NIC's lock.

    `records` are the workers' records. Worker 0 is the first. It serves the wires, and all QPs whose peers are on other
    NICs.
    """

    def __init__(self, engine: Engine, records: np.ndarray):
        self._engine, self._records = engine, records
        self._workers = engine.workers
        self._load = [0] * len(self._workers)  # queue pairs
        self._worker: dict[int, int] = {FIRST: 0}  # row → number of the worker; also of a peer that does not exist yet
        self._qps: set[int] = set()
        self._cqs: set[int] = set()
        self._ties: dict[int, set[int]] = {}  # QP → its queues, and its peer
        self._tied: dict[int, set[int]] = {}  # queue, peer or FIRST → the QPs that are tied to it
        self._peers: dict[int, int] = {}  # QP → its peer, or FIRST
        self._loose: list[set[int]] = [set() for _ in self._workers]  # QPs of each that another one may serve
        self._gathered = False

    def worker_of(self, row: int) -> int:
        """Return the number of the worker that serves a queue."""
        return self._worker.get(row, 0)

    # --- what comes and goes ---------------------------------------------------------------------------------------

    def add_cq(self, row: int) -> None:
        """Add a completion queue, which the first worker serves until a QP uses it."""
        self._cqs.add(row)
        self._records[0]["cq_count"] += 1

    def add_qp(self, row: int, queues: Iterable[int]) -> int:
        """Add a QP, which the engine does not serve yet, and its CQs and SRQ. Return the number of its worker."""
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
        self._note(row)
        return self.worker_of(row)

    def add_ethernet(self, row: int, queues: Iterable[int]) -> None:
        """Bring the queues of an SQ or RQ to the first worker, which serves wires."""
        for queue in dict.fromkeys((FIRST, *queues)):
            self._tie(row, queue)

    def connect(self, row: int, peer: int) -> None:
        """Tie a QP to the row of its peer in this NIC, or to FIRST if the way to its peer is a wire."""
        if self._peers.get(row) != peer:
            self.disconnect(row)
            self._tie(row, peer)
            self._peers[row] = peer
            if peer == FIRST:
                self._note(row)
                self._spread()

    def disconnect(self, row: int) -> None:
        """Untie a QP from its peer."""
        if (peer := self._peers.pop(row, None)) is not None:
            self._untie(row, peer)
            self._note(row)

    def remove(self, row: int) -> None:
        """Remove a queue that the engine no longer serves."""
        if row in self._qps:
            self._qps.remove(row)
            self._loose[self.worker_of(row)].discard(row)
            self._load[self.worker_of(row)] -= 1
        self._peers.pop(row, None)
        for other in tuple(self._ties.get(row, ())):
            self._untie(row, other)
        if row in self._cqs:
            self._cqs.remove(row)
            self._records[self.worker_of(row)]["cq_count"] -= 1
        if row not in self._tied:
            self._forget(row)

    def gather(self) -> None:
        """Bring all queues to the first worker, and those of the future, too."""
        self._move(set(self._worker), 0)
        self._gathered = True

    # --- what any worker may serve ---------------------------------------------------------------------------------

    def _note(self, row: int) -> None:
        """Note which worker serves a QP, if that may be another one: its peer is not on another NIC."""
        for number, loose in enumerate(self._loose):
            if number == self.worker_of(row) and self._peers.get(row) != FIRST:
                loose.add(row)
            else:
                loose.discard(row)

    def _spread(self) -> None:
        """Have workers that have less to do serve what others need not.

        QPs with wires go to the first worker when they are connected. A program that creates all its QPs before finds
        the others spread as if all were alike.
        """
        while not self._gathered:
            loaded = [number for number, loose in enumerate(self._loose) if loose]
            if not loaded:
                break
            most = max(loaded, key=self._load.__getitem__)
            least = min(range(len(self._load)), key=self._load.__getitem__)
            rows = set(islice(self._component(next(iter(self._loose[most]))), _LARGE))
            qps = rows & self._qps
            if FIRST in rows or len(rows) == _LARGE:
                self._loose[most] -= rows
            elif self._load[least] + len(qps) < self._load[most]:
                self._move(rows, least)
            else:
                break

    # --- ties ------------------------------------------------------------------------------------------------------

    def _tie(self, row: int, other: int) -> None:
        """Bring the components of a QP and of something else to one worker."""
        here, there = self.worker_of(row), self._worker.setdefault(other, self.worker_of(row))
        if here != there:
            lesser, rest = self._lesser(row, other)
            if FIRST in lesser:
                self._move(set(self._component(rest)), 0)
            else:
                self._move(set(lesser), self.worker_of(rest))
        self._ties.setdefault(row, set()).add(other)
        self._tied.setdefault(other, set()).add(row)

    def _untie(self, row: int, other: int) -> None:
        for ties, key, value in ((self._ties, row, other), (self._tied, other, row)):
            ties[key].discard(value)
            if not ties[key]:
                del ties[key]
        if other not in self._tied:
            self._forget(other)

    def _forget(self, row: int) -> None:
        """Forget which worker a row belongs to, unless the worker looks at the row without a QP that is tied to it."""
        if row != FIRST and row not in self._qps and row not in self._cqs:
            self._worker.pop(row, None)

    def _component(self, row: int) -> Iterator[int]:
        """Yield all that is tied to a row, and the row."""
        known, todo = {row}, [row]
        while todo:
            at = todo.pop()
            yield at
            new = (self._ties.get(at, set()) | self._tied.get(at, set())) - known
            known |= new
            todo.extend(new)

    def _lesser(self, a: int, b: int) -> tuple[list[int], int]:
        """Return the smaller of two components, and a row of the larger, which is not looked through."""
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
        """Have a worker serve these queues, which may be of several workers."""
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
                self._note(row)
        self._engine.kick()  # a worker without queues sleeps until it is woken
