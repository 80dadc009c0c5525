"""The watchdog reports kernels that make no progress: queue, index, last CQE, and which side has to act.

It also repeats doorbells that a register may have lost (`ExportedQp.may_lose_rings`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..enums import NicHandler, QpState
from ..errors import DocaError, TimedOutError
from ..jit.launch import observers, running
from ..service import ServiceThread
from .export import ExportedQp

logger: logging.Logger = logging.getLogger("gpunetio.watchdog")

_LISTENING = (QpState.RTR, QpState.RTS)
_OF_TIMEOUT = 0.8  # of a queue's own timeout: the report must come before its kernels give up
_LOOKS = 10  # minimum number of looks in the time that a queue may stand still
_SHORTEST_PERIOD = 0.02
_RING_PERIOD = 0.005  # between looks while a kernel may be waiting for a lost doorbell
_SHARE = 20  # looks take at most this fraction (1/20) of a thread's time


@dataclass
class _Seen:
    """A queue at the last look: its indices, when they last changed, and what was already reported."""

    indices: dict[str, int]
    since: float
    told: frozenset[str] = frozenset()


class Watchdog:
    """Looks at the exported QPs of a GPU every `period` seconds and reports each stall once.

    `stalls` keeps the messages. A queue stalls when it is owed a completion and nothing has moved for `patience`
    seconds, or for most of its own timeout if that is shorter; then looks are more frequent. The NIC owes the
    completions of WQEs whose doorbell has been rung; the CPU proxy owes the doorbell. A receive stalls only while a
    kernel that was given the queue runs. A message that never comes is no failure, so it is logged as information; if
    the queue pair is in a state that receives nothing, it is a warning.

    The watchdog rings again for a queue whose register may lose doorbells, if the queue stands still from one look to
    the next and the NIC has not completed everything submitted. `rung_again` counts these doorbells. While kernels run,
    looks at such queues are milliseconds apart.

    `looking` is locked during a look.
    """

    patience: float
    period: float
    stalls: list[str]
    rung_again: int
    looking: threading.Lock

    def __init__(self, exports: Callable[[], list[ExportedQp]], patience: float = 5.0, period: float = 0.5):
        self.patience, self.period = patience, period
        self.stalls = []
        self.rung_again = 0
        self.looking = threading.Lock()
        self._exports = exports
        self._seen: dict[int, _Seen] = {}
        self._took = 0.0  # duration of the last look, seconds
        self._stop, self._wake = False, threading.Event()
        self._thread = ServiceThread("gpunetio watchdog", self._run)
        self._thread.start()
        observers.append(self._launched)

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(self._pause())
            self._wake.clear()
            if not self._stop:
                self.look()

    def _launched(self, change: int) -> None:
        """Wake the thread for a kernel that was launched (+1), whose doorbells may be lost. Ignore its end (-1)."""
        if change > 0 and self._may_lose_rings():
            self._wake.set()

    def _may_lose_rings(self) -> bool:
        return any(exported.may_lose_rings for exported in self._exports())

    def _pause(self) -> float:
        """Return the seconds until the next look."""
        patience = min(map(self._patience, self._exports()), default=self.patience)
        pause = min(self.period, max(patience / _LOOKS, _SHORTEST_PERIOD))
        if running() and self._may_lose_rings():
            pause = min(pause, max(_RING_PERIOD, _SHARE * self._took))
        return pause

    def _patience(self, exported: ExportedQp) -> float:
        """Return the seconds that this queue may stand still."""
        return min(self.patience, _OF_TIMEOUT * exported.timeout)

    def look(self) -> None:
        """Look once at every queue."""
        began = time.monotonic()
        with self.looking:
            exports = self._exports()
            for gone in self._seen.keys() - {id(exported) for exported in exports}:
                del self._seen[gone]
            for exported in exports:
                try:
                    self._look_at(exported)
                except DocaError:
                    self._seen.pop(id(exported), None)  # the queue pair is being closed, or the GPU has failed
                except Exception:  # the other queues must still be looked at
                    logger.exception("%s cannot be looked at", exported)
        self._took = time.monotonic() - began

    def _look_at(self, exported: ExportedQp) -> None:
        indices, now = exported.indices(), time.monotonic()
        indices["sent"] = _sent(exported, indices)
        seen = self._seen.get(id(exported))
        if seen and exported.may_lose_rings and _waits_for_a_ring(seen.indices, indices):
            exported.ring_again(indices["submitted"])
            self.rung_again += 1
        if seen is None or seen.indices != indices:
            self._seen[id(exported)] = _Seen(indices, now)
            return
        if now - seen.since < self._patience(exported):
            return
        for what, find in (("sends", _owed_send), ("receives", _owed_receive)):
            if what not in seen.told and (owed := find(exported, indices)):
                seen.told |= {what}
                level, text = owed
                self._report(exported, level, f"makes no progress for {now - seen.since:.1f} s: {text}")

    def _report(self, exported: ExportedQp, level: int, text: str) -> None:
        message = f"QP {exported.qpn:#x} of {exported.qp.ctx.name} {text}; the QP is in {exported.qp.state.name}"
        self.stalls.append(message)
        logger.log(level, message)

    def close(self) -> None:
        """Stop looking. TimedOutError if a look does not end."""
        if self._launched in observers:  # a fork empties the list
            observers.remove(self._launched)
        self._stop = True
        self._wake.set()
        if not self._thread.join():
            raise TimedOutError("the watchdog did not stop: a look at a queue hangs")


def _sent(exported: ExportedQp, i: dict[str, int]) -> int:
    """Return how many sends the NIC has completed, seen by a kernel or not. At most one ring of sends is incomplete."""
    least = max(i["completed"], i["submitted"] - exported.qp.sq_entries)
    if least >= i["submitted"]:
        return least  # avoids reading the ring, which may be a copy from the GPU
    return exported.sends.produced(exported.cqe_offset(), least)


def _waits_for_a_ring(before: dict[str, int], now: dict[str, int]) -> bool:
    """Return whether there are submitted WQEs, and none was submitted or completed since the last look.

    A newer doorbell also announces older WQEs.
    """
    stands = all(before[name] == now[name] for name in ("submitted", "sent"))
    return stands and now["submitted"] > now["sent"]


def _owed_send(exported: ExportedQp, i: dict[str, int]) -> tuple[int, str] | None:
    """Return the oldest send that is announced and not complete, as a level and a text, or None."""
    index = i["sent"]
    if i["submitted"] <= index:
        return None
    if exported.nic_handler is NicHandler.CPU_PROXY and i["forwarded"] <= index:
        who = f"the proxy has not forwarded WQE {index} (forwarded {i['forwarded']}, {_proxy_state(exported)})"
    else:
        who = f"the NIC has not completed WQE {index}"
    counts = f"reserved {i['reserved']}, ready {i['ready']}, submitted {i['submitted']}"
    return logging.WARNING, f"{who} ({counts}); last CQE: {exported.sends.last_cqe(exported.cqe_offset(), index)}"


def _proxy_state(exported: ExportedQp) -> str:
    service = exported.service
    if service is None:
        return "no service forwards it: call ExportedQp.progress()"
    return "its service is alive" if service.running else "the thread of its service has ended"


def _owed_receive(exported: ExportedQp, i: dict[str, int]) -> tuple[int, str] | None:
    """Return the oldest receive that is posted and not complete, if a kernel may wait for it."""
    completions, index = exported.receives, i.get("receives_completed", 0)
    if completions is None or i.get("receives_posted", 0) <= index or not exported.in_use:
        return None
    before = exported.cqe_offset(receives=True)
    if completions.is_complete(before, index, named=exported.qp.init_attr.srq is None):
        return None
    level = logging.INFO if exported.qp.state in _LISTENING else logging.WARNING
    return level, (
        f"no message has come for receive {index} (posted {i['receives_posted']}); "
        f"last CQE: {completions.last_cqe(before, index)}"
    )
