"""The CPU data path of DMA: a queue pair connected to itself, whose completions end tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from ..enums import SendFlags, WcStatus
from ..errors import DocaError, DocaErrorCode, FullError, error_of
from ..verbs import PD, Completion, Sge, memcpy
from ..verbs.syndromes import MEANINGS
from .task import MemcpyTask

_QUIET = SendFlags(0)
_BATCH = 64  # completions per poll
_MEANINGS = {meaning.status: meaning.text for meaning in MEANINGS.values()}


class Copier:
    """Copies for tasks. Only the last piece of a task makes a completion, unless a piece fails.

    A failed piece puts the queue pair into the error state, so all later tasks fail as well. When the last of them has
    ended, the queue pair is connected again.
    """

    size: int  # of the queues, in pieces

    def __init__(self, pd: PD, depth: int, undo: ExitStack):
        self._cq = pd.ctx.create_cq(depth)
        undo.callback(self._cq.close)
        self._qp = pd.create_qp(sq_wr=depth, send_cq=self._cq, memcpy=True)
        undo.callback(self._qp.close)
        self._qp.connect(self._qp)
        self.size = min(self._qp.sq_entries, self._cq.entries)
        self._tasks: deque[tuple[MemcpyTask, int]] = deque()  # in flight, with the number of their pieces
        self._used = 0
        self._error: DocaError | None = None  # the first error of the oldest task
        self._failed = False

    def post(self, task: MemcpyTask, copies: Sequence[tuple[Sge, Sge]]) -> None:
        """Post pairs of source and target. FullError, with nothing posted, if there is no room or after a failure."""
        if self._failed or self._used + len(copies) > self.size:
            raise FullError(
                f"{len(copies)} copies, and {self._used} of {self.size} are in flight: make progress, or give more "
                "depth"
            )
        last = len(copies) - 1
        self._qp.post_send(*(
            memcpy(target, source, wr_id=int(i == last), flags=SendFlags.SIGNALED if i == last else _QUIET)
            for i, (source, target) in enumerate(copies)
        ))
        self._tasks.append((task, len(copies)))
        self._used += len(copies)

    def poll(self) -> list[tuple[MemcpyTask, DocaError | None]]:
        """Poll for completions. Return the tasks that have ended, each with its error or None."""
        ended = []
        for done in self._cq.poll(_BATCH):
            if done.status is not WcStatus.SUCCESS:
                self._failed, self._error = True, self._error or self._error_of(done)
            if done.wr_id:  # the last piece
                task, count = self._tasks.popleft()
                ended.append((task, self._error))
                self._error = None
                self._used -= count
        if self._failed and not self._tasks:
            self._qp.reset()
            self._qp.connect(self._qp)
            self._failed = False
        return ended

    def fail(self) -> None:
        """Make everything in flight end with an error."""
        self._qp.to_error()
        self._failed = bool(self._tasks)

    def _error_of(self, done: Completion) -> DocaError:
        if done.status is WcStatus.WR_FLUSH_ERR:
            why = "not copied: an earlier copy has failed, or the context was stopped"
        else:
            cause = self._qp.ctx.provider.explain(done.qp_num, done.vendor_err) or _MEANINGS.get(done.status)
            why = f"a copy has failed ({done.status.name}): {cause or 'the device does not say why'}"
        return error_of(DocaErrorCode.IO_FAILED, why)
