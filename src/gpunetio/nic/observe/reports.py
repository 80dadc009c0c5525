"""The report thread: turns the engine's error records into log messages that name object, value and cause."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import TimedOutError
from ...fabric.ring import RING, next_full, release
from ...formats.wqe import WqeOpcode
from ...memory import HostMemory
from ...service import ServiceThread
from ..queues.completion import RECEIVE_QUEUE, REQUESTER, RESPONDER, SEND_QUEUE
from ..state.nic import ERROR_RECORD
from ..state.reasons import EXPLAIN, Reason

logger: logging.Logger = logging.getLogger("gpunetio.nic")

CAPACITY = 256
KEPT = 1024
_WHO = {
    REQUESTER: "QP {:#x} (requester)", RESPONDER: "QP {:#x} (responder)", RECEIVE_QUEUE: "RQ {:#x}",
    SEND_QUEUE: "SQ {:#x}",
}
_SENDERS = REQUESTER, SEND_QUEUE


@dataclass(frozen=True)
class Report:
    """A request or packet that the NIC refused. `message` is the log message."""

    nic: str
    reason: Reason
    responder: bool
    qpn: int
    index: int
    opcode: int
    syndrome: int
    key: int
    address: int
    nbytes: int
    message: str


def _name_of(opcode: int, responder: bool) -> str:
    """Return the name of a record's operation. On a responder, opcode 0 is a receive, since no NOP reaches it."""
    if responder and opcode == WqeOpcode.NOP:
        return "receive"
    return WqeOpcode(opcode).name if opcode in list(WqeOpcode) else f"opcode {opcode:#04x}"


def _swapped(key: int) -> int:
    return int.from_bytes((key & 0xFFFF_FFFF).to_bytes(4, "little"), "big")


class ReportService:
    """The ring of error records, which the engine writes, and the thread that reads and reports them."""

    ring: int
    event: int

    def __init__(
        self, name: str, known_key: Callable[[int], bool], cuda_failure: Callable[[int, int], str],
        every_second: Callable[[], None] = lambda: None, why_not_ready: Callable[[int], str] | None = None,
    ):
        self._name, self._known_key, self._cuda_failure = name, known_key, cuda_failure
        self._why_not_ready = why_not_ready  # returns the cause of RNR NAKs, given the QPN
        self._every_second = every_second  # called when a second passes without a record
        self._memory = HostMemory(RING.size + CAPACITY * ERROR_RECORD.size)
        self.ring = self._memory.address
        ring = self._memory.view(RING.dtype)[0]
        ring["slots"], ring["slot_size"], ring["capacity"] = self.ring + RING.size, ERROR_RECORD.size, CAPACITY
        try:
            self.event = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            self._memory.close()
            raise
        self.reports: deque[Report] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._stop = self._closed = False
        self._thread = ServiceThread(f"gpunetio {name} reports", self._run)
        try:
            self._thread.start()
        except BaseException:
            os.close(self.event)
            self._memory.close()
            raise

    def _run(self) -> None:
        event = select.poll()
        event.register(self.event, select.POLLIN)
        while not self._stop:
            if event.poll(1000):
                os.eventfd_read(self.event)
            else:
                self._every_second()
            self.drain()

    def drain(self) -> None:
        """Report all errors that the engine has recorded so far."""
        with self._lock:
            while not self._closed and (slot := next_full(self.ring)):
                offset = slot - self.ring
                record = self._memory.view(ERROR_RECORD.dtype, offset)[0].copy()
                try:  # report at once: the program may exit because of the error
                    self._report({field: int(record[field]) for field in ERROR_RECORD.offsets})
                finally:
                    release(self.ring)

    def _report(self, record: dict[str, int]) -> None:
        reason = Reason(record["reason"])
        text = EXPLAIN[reason]
        cuda = self._cuda_failure(record["extra0"], record["extra1"]) if reason is Reason.COPY_FAILED else ""
        what, cause = text.what.format(**record, cuda=cuda), text.cause
        if reason in (Reason.LKEY_UNKNOWN, Reason.RKEY_UNKNOWN) and self._known_key(_swapped(record["key"])):
            cause = f"this is key {_swapped(record['key']):#x} with its bytes swapped: pass keys in host order"
        if reason is Reason.RNR and self._why_not_ready:
            cause = self._why_not_ready(record["qpn"])
        who = _WHO[record["side"]].format(record["qpn"])
        what_failed = _name_of(record["opcode"], record["side"] not in _SENDERS)
        message = (
            f"{self._name}: {who}, {what_failed} at index {record['index']}: {what} "
            f"[syndrome {record['syndrome']:#04x}, vendor {int(reason):#04x} {reason.name}]. Likely cause: {cause}."
        )
        report = Report(
            self._name, reason, record["side"] not in _SENDERS, record["qpn"], record["index"], record["opcode"],
            record["syndrome"], record["key"], record["addr"], record["nbytes"], message,
        )
        self.reports.append(report)
        # A flush follows an error that was already reported, or a requested transition to ERR.
        level = logging.DEBUG if reason is Reason.FLUSH else logging.ERROR
        logger.log(logging.WARNING if reason is Reason.QP_STATE else level, message)

    def close(self) -> None:
        """Report the remaining errors and stop. The engine must have stopped. TimedOutError if a log handler hangs."""
        self._stop = True
        os.eventfd_write(self.event, 1)
        if not self._thread.join():
            raise TimedOutError(f"the report thread of {self._name} did not stop: a log handler hangs")
        self.drain()
        with self._lock:
            self._closed = True
            os.close(self.event)
            self._memory.close()
