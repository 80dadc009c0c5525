"""The watchdog: names the queue, the index and the last CQE of a kernel that makes no progress."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DocaError
from ..formats.cqe import CQE64, CQE_SIZE, OPCODE_SHIFT, OWNER_MASK, CqeOpcode

if TYPE_CHECKING:
    from .export import ExportedQp

logger = logging.getLogger("gpunetio.watchdog")


def _cqe(exported: ExportedQp, slot: int) -> np.ndarray:
    return CQE64.at((ctypes.c_uint8 * CQE_SIZE).from_address(exported.cq.ring_address + slot * CQE_SIZE))


def last_cqe(exported: ExportedQp, completed: int) -> str:
    """The newest completion that a kernel has consumed, in words."""
    if completed == 0:
        return "none yet"
    slot = 0 if exported.cq.collapsed else (completed - 1) % exported.cq.entries
    cqe = _cqe(exported, slot)
    opcode = int(cqe["op_own"]) >> OPCODE_SHIFT
    name = CqeOpcode(opcode).name if opcode in list(CqeOpcode) else hex(opcode)
    return f"{name} with wqe_counter {int(cqe['wqe_counter'])} in slot {slot}"


def _produced(exported: ExportedQp, index: int) -> bool:
    """Whether the NIC has completed WQE `index`, so that only the kernel has not looked yet."""
    slot = 0 if exported.cq.collapsed else index % exported.cq.entries
    cqe = _cqe(exported, slot)
    behind = (int(cqe["wqe_counter"]) - index) & 0xFFFF
    if exported.cq.collapsed:
        return int(cqe["op_own"]) >> OPCODE_SHIFT != CqeOpcode.INVALID and behind < exported.cq.entries
    return behind == 0 and int(cqe["op_own"]) & OWNER_MASK == (index // exported.cq.entries) & 1


class Watchdog:
    """Looks at the exported QPs of a GPU every `period` seconds and reports, once a stall, those that stand still.

    `stalls` keeps the messages. A queue stalls when the NIC owes it a completion and no index has moved for `patience`
    seconds.
    """

    def __init__(self, exports: Callable[[], list[ExportedQp]], patience: float = 5.0, period: float = 0.5):
        self.patience, self.period = patience, period
        self.stalls: list[str] = []
        self._exports = exports
        self._seen: dict[int, tuple[dict[str, int], float, bool]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpunetio watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.period):
            self.look()

    def look(self) -> None:
        """One look at every queue."""
        for exported in self._exports():
            try:
                self._look_at(exported)
            except DocaError:
                self._seen.pop(id(exported), None)  # closed meanwhile

    def _look_at(self, exported: ExportedQp) -> None:
        indices, now = exported.indices(), time.monotonic()
        before, since, told = self._seen.get(id(exported), (None, now, False))
        if indices != before:
            self._seen[id(exported)] = indices, now, False
        elif (
            indices["submitted"] > indices["completed"]
            and not told
            and now - since >= self.patience
            and not _produced(exported, indices["completed"])
        ):
            self._seen[id(exported)] = indices, since, True
            self._report(exported, indices, now - since)

    def _report(self, exported: ExportedQp, indices: dict[str, int], seconds: float) -> None:
        message = (
            f"QP {exported.qpn:#x} of {exported.qp.ctx.name} makes no progress for {seconds:.1f} s: WQE "
            f"{indices['completed']} is not complete (reserved {indices['reserved']}, ready {indices['ready']}, "
            f"submitted {indices['submitted']}); last CQE: {last_cqe(exported, indices['completed'])}; the QP is in "
            f"{exported.qp.state.name}"
        )
        self.stalls.append(message)
        logger.warning(message)

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()
