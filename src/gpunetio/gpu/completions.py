"""The host's view of a ring of completions: how many CQEs the NIC has written, which WQEs are complete, what failed.

A reset of the queue pair restarts the count of WQEs at 0, but not the NIC's count of CQEs. Every WQE of an exported
queue is signalled, so the CQE of a WQE is found by adding `before`, the NIC's count at the reset, to the WQE's index.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..formats.cqe import CQE64, CQE_SIZE, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ..formats.doorbell import PI_MASK
from ..verbs import CQ
from .spans import Span

_INVALID = INIT_OP_OWN >> OPCODE_SHIFT
_ERRORS = (CqeOpcode.REQ_ERR, CqeOpcode.RESP_ERR)


class FailedWqe(NamedTuple):
    """An error completion: the WQE's index, and what the CQE says."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # it hides tuple.index
    syndrome: int
    vendor_syndrome: int


def _opcode(cqe: np.void) -> int:
    return int(cqe["op_own"]) >> OPCODE_SHIFT


class Completions:
    """The ring of a CQ. Each call reads the ring again."""

    cq: CQ

    def __init__(self, cq: CQ, ring: Span):
        self.cq, self._ring = cq, ring

    def cqes(self) -> np.ndarray:
        """Return the whole ring."""
        return self._ring.read().view(CQE64.dtype)

    def _cqe(self, slot: int) -> np.void:
        return self._ring.read(slot * CQE_SIZE, CQE_SIZE).view(CQE64.dtype)[0]

    def produced(self, before: int, least: int) -> int:
        """Return how many CQEs the NIC has written since its count was `before`.

        The result lies between `least` and one lap of the ring above it. The slot where the owner bits change gives the
        count modulo two laps. A collapsed CQ gives only the index of the last WQE.
        """
        entries = self.cq.entries
        if self.cq.collapsed:
            cqe = self._cqe(0)
            if _opcode(cqe) == _INVALID:
                return 0
            return least + ((int(cqe["wqe_counter"]) + 1 - least) & PI_MASK)
        owners = self.cqes()["op_own"] & OWNER_MASK
        behind = np.flatnonzero(owners != owners[0])  # slots of the previous lap
        if len(behind):
            count = int(owners[0]) * entries + int(behind[0])
        else:
            count = 0 if owners[0] else entries
        return least + (count - before - least) % (2 * entries)

    def forget(self) -> None:
        """Invalidate the one CQE of a collapsed CQ after a reset, so that it is not taken for a new one."""
        if self.cq.collapsed:
            self._ring.write(np.array([INIT_OP_OWN], np.uint8), CQE64.op_own)

    def is_complete(self, before: int, index: int, named: bool = True) -> bool:
        """Return whether the NIC has completed a WQE and its CQE is still in the ring.

        A collapsed CQ soon overwrites it. `named` is False for a shared receive queue, where `wqe_counter` does not
        name the WQE.
        """
        return self._completes(self._cqe((before + index) % self.cq.entries), before, index, named)

    def _completes(self, cqe: np.void, before: int, index: int, named: bool) -> bool:
        if _opcode(cqe) == _INVALID or (named and int(cqe["wqe_counter"]) != index & PI_MASK):
            return False
        return int(cqe["op_own"]) & OWNER_MASK == (before + index) // self.cq.entries & 1

    def first_error(self, before: int, least: int, named: bool = True) -> FailedWqe | None:
        """Return the first error completion from WQE `least` on. A collapsed CQ shows only its last completion."""
        if self.cq.collapsed:
            index = self.produced(before, least) - 1
            return _failure(self._cqe(0), index) if index >= least else None
        entries, cqes = self.cq.entries, self.cqes()
        for index in range(least, least + entries):
            cqe = cqes[(before + index) % entries]
            if not self._completes(cqe, before, index, named):
                return None
            if failed := _failure(cqe, index):
                return failed
        return None

    def last_cqe(self, before: int, completed: int) -> str:
        """Describe the newest of `completed` completions in words."""
        if completed == 0:
            return "none yet"
        slot = 0 if self.cq.collapsed else (before + completed - 1) % self.cq.entries
        cqe = self._cqe(slot)
        opcode = _opcode(cqe)
        name = CqeOpcode(opcode).name if opcode in list(CqeOpcode) else hex(opcode)
        return f"{name} with wqe_counter {int(cqe['wqe_counter'])} in slot {slot}"


def _failure(cqe: np.void, index: int) -> FailedWqe | None:
    if _opcode(cqe) not in _ERRORS:
        return None
    error = ERR_CQE64.at(np.frombuffer(cqe.tobytes(), np.uint8))
    return FailedWqe(index, int(error["syndrome"]), int(error["vendor_err_synd"]))
