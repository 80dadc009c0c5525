"""The data path for CPU tasks: the queue pairs of connections, and the tasks in flight."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from ..core import Task
from ..enums import QpState, WcStatus
from ..errors import BadStateError, ConnectionEndedError, DocaError, DocaErrorCode, FullError, error_of
from ..gpu import QpError
from ..verbs import CQ, PD, QP, SRQ, BadWrError, Completion, RecvWr, SendWr, Sge
from .datapath import Channel, DataPath, Sizes

_SGES = 16  # scatter/gather entries of a source or destination
_AT_ONCE = 64  # completions per poll of a CQ

Finish = Callable[[Task, DocaError | None], None]
WhoLeft = Callable[[int], str | None]  # maps a QPN to which end has disconnected, as text


class RdmaTask(Task):
    """A task of an `Rdma`."""

    @abstractmethod
    def note(self, done: Completion) -> None:
        """Store the result of a request that completed successfully."""


class _Posted(NamedTuple):
    """A task in flight, its queue, and its queue pair, or None for a receive from a shared queue."""

    task: RdmaTask
    queue: QP | str
    qp: QP | None


_RECEIVES = "receives"  # stands for the receive queue of all connections


class CpuChannel(Channel):
    """A queue pair whose completions the CPU polls."""

    def __init__(self, path: CpuDataPath, qp: QP):
        self._path, self.qp = path, qp

    def open(self) -> None:
        pass

    def last_error(self) -> QpError | None:
        state = self.qp.state
        return QpError.of(self.qp, state, None) if state is QpState.ERR else None

    def end_tasks(self) -> None:
        self._path.forget(self.qp)

    def close(self) -> None:
        self.end_tasks()
        self.qp.close()


class CpuDataPath(DataPath):
    """Queue pairs for CPU tasks. All complete in two CQs, and receive from one SRQ if there may be several of them.

    `send_cq`, `receive_cq`    the CQs; `receive_cq` is None if there are no receives
    `srq`                      where receives are posted; if None, to the queue pair of the only connection
    """

    send_cq: CQ
    receive_cq: CQ | None
    srq: SRQ | None

    def __init__(self, pd: PD, sizes: Sizes, finish: Finish, who_left: WhoLeft, undo: ExitStack):
        self._pd, self._sizes, self._finish, self._who_left = pd, sizes, finish, who_left
        self._qps: list[QP] = []
        self._failures: dict[int, str] = {}  # the first failure of each queue pair, as text
        self._posted: dict[int, _Posted] = {}
        self._counts: Counter[QP | str] = Counter()  # tasks in flight, by queue
        self._numbers = itertools.count()
        self._stopping = False
        self.receive_cq = self.srq = None
        self.send_cq = pd.ctx.create_cq(sizes.sends * sizes.connections)
        undo.callback(self.send_cq.close)
        if sizes.receives:
            self.receive_cq = pd.ctx.create_cq(sizes.receives)
            undo.callback(self.receive_cq.close)
        if sizes.receives and sizes.connections > 1:
            self.srq = pd.create_srq(sizes.receives, receive_max_sges=_SGES)
            undo.callback(self.srq.close)

    def channel(self, number: int) -> Channel:
        own = 0 if self.srq else self._sizes.receives
        qp = self._pd.create_qp(
            sq_wr=self._sizes.sends, rq_wr=own, send_cq=self.send_cq, receive_cq=self.receive_cq, srq=self.srq,
            send_max_sges=_SGES, receive_max_sges=_SGES,
        )
        self._qps.append(qp)
        return CpuChannel(self, qp)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def send(self, task: RdmaTask, qp: QP, request: SendWr) -> None:
        """Post a task's request. FullError if `send_queue_size` requests are already in flight on the queue pair."""
        self._check_room(qp, self._sizes.sends, "send_queue_size")
        _post(lambda: qp.post_send(request))
        self._note(request.wr_id, _Posted(task, qp, qp))

    def receive(self, task: RdmaTask, sges: tuple[Sge, ...]) -> None:
        """Post a receive. FullError if `recv_queue_size` are in flight, BadStateError without a queue for receives."""
        request = RecvWr(sges=sges, wr_id=self.number())
        self._check_room(_RECEIVES, self._sizes.receives or 1, "recv_queue_size")
        if self.srq is not None:
            srq = self.srq
            _post(lambda: srq.post_recv(request))
        elif self.receive_cq is None:
            raise BadStateError(f"{task}: there is no receive queue; create the Rdma with recv_queue_size")
        elif not self._qps:
            raise BadStateError(f"{task}: there is no connection that could receive; make one first")
        else:
            _post(lambda: self._qps[0].post_recv(request))
        self._note(request.wr_id, _Posted(task, _RECEIVES, None if self.srq else self._qps[0]))

    def _check_room(self, queue: QP | str, most: int, option: str) -> None:
        """Raise FullError if a queue's CQ has no room for another task. The device's rings may have more room."""
        if self._counts[queue] >= most:
            raise FullError(f"{most} tasks are in flight there: make progress, or create the Rdma with more {option}")

    def _note(self, number: int, posted: _Posted) -> None:
        self._posted[number] = posted
        self._counts[posted.queue] += 1

    def _take(self, number: int) -> _Posted | None:
        """Remove and return what was posted with this number, or return None."""
        if (posted := self._posted.pop(number, None)) is not None:
            self._counts[posted.queue] -= 1
        return posted

    def number(self) -> int:
        """Return a new number for a request."""
        return next(self._numbers)

    def poll(self) -> None:
        for cq in (self.send_cq, self.receive_cq):
            for done in cq.poll(_AT_ONCE) if cq is not None else ():
                if (posted := self._take(done.wr_id)) is not None:
                    self._completed(posted.task, done)
        if self._stopping and all(posted.qp is None for posted in self._posted.values()):
            self._give_up(None)  # receives of the SRQ, which the device keeps for other queue pairs

    def _completed(self, task: RdmaTask, done: Completion) -> None:
        if done.status is WcStatus.SUCCESS:
            task.note(done)
            self._finish(task, None)
        else:
            self._finish(task, self._error(task, done))

    def _error(self, task: RdmaTask, done: Completion) -> DocaError:
        if done.status is WcStatus.WR_FLUSH_ERR and self._stopping:
            return _stopped(task)
        if done.status is WcStatus.WR_FLUSH_ERR:
            return ConnectionEndedError(f"{task}: {self._why_flushed(done.qp_num)}")
        why = self._pd.ctx.provider.explain(done.qp_num, done.vendor_err)
        words = f"{done.status.name}{f': {why}' if why else ''}"
        self._failures.setdefault(done.qp_num, words)
        return error_of(DocaErrorCode.IO_FAILED, f"{task}: {words}")

    def _why_flushed(self, qpn: int) -> str:
        """Return why the requests of a queue pair were flushed, as text."""
        failure = self._failures.get(qpn) or self._pd.ctx.provider.explain(qpn, None)
        if failure is None and (who := self._who_left(qpn)) is not None:
            return who
        return f"its connection had failed before{f': {failure}' if failure else ''}"

    def flush(self) -> None:
        self._stopping = True
        for qp in self._qps:
            if qp.asked_state not in (QpState.RST, QpState.ERR):
                qp.to_error()

    def forget(self, qp: QP) -> None:
        """End the tasks of a queue pair that is about to be closed."""
        if qp in self._qps:
            self.poll()
            self._qps.remove(qp)
            self._give_up(qp)
            self._failures.pop(qp.qpn, None)
            del self._counts[qp]

    def _give_up(self, qp: QP | None) -> None:
        for number, posted in list(self._posted.items()):
            if posted.qp is qp:
                self._take(number)
                self._finish(posted.task, _stopped(posted.task))


def _stopped(task: Task) -> DocaError:
    return error_of(DocaErrorCode.SHUTDOWN, f"{task} was stopped: its connection or its Rdma was closed")


def _post(post: Callable[[], None]) -> None:
    try:
        post()
    except BadWrError as error:
        raise error.__cause__ or error from None
