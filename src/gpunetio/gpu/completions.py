"""What a ring of completions tells the host: how far the NIC has come, whether a WQE is complete, and what failed.

The NIC's count of CQEs goes on when a queue pair is reset, while WQEs are counted from 0 again. So `before`, the count
at that moment, is added to a WQE's index to find its CQE, as every WQE of an exported queue is signalled.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from ..formats.cqe import CQE64, CQE_SIZE, ERR_CQE64, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ..formats.doorbell import PI_MASK
from ..verbs import CQ

_INVALID = INIT_OP_OWN >> OPCODE_SHIFT
_ERRORS = (CqeOpcode.REQ_ERR, CqeOpcode.RESP_ERR)


class FailedWqe(NamedTuple):
    """An error completion: the WQE's index, and what the CQE says."""

    index: int
    syndrome: int
    vendor_syndrome: int


def _bytes(cq: CQ) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * (cq.entries * CQE_SIZE)).from_address(cq.ring_address))


def completions(cq: CQ) -> np.ndarray:
    """The ring."""
    return _bytes(cq).view(CQE64.dtype)


def _opcode(cqe: np.void) -> int:
    return int(cqe["op_own"]) >> OPCODE_SHIFT


def produced(cq: CQ, before: int, least: int) -> int:
    """CQEs that the NIC has written since its count was `before`. There are `least` of them, and no second ring more.

    Where the owner bits change is the count modulo two laps; of a collapsed CQ there is but the index of the last WQE.
    """
    ring = completions(cq)
    if cq.collapsed:
        if _opcode(ring[0]) == _INVALID:
            return 0
        return least + ((int(ring[0]["wqe_counter"]) + 1 - least) & PI_MASK)
    owners = ring["op_own"] & OWNER_MASK
    behind = np.flatnonzero(owners != owners[0])  # slots of the lap before
    if len(behind):
        count = int(owners[0]) * cq.entries + int(behind[0])
    else:
        count = 0 if owners[0] else cq.entries
    return least + (count - before - least) % (2 * cq.entries)


def forget(cq: CQ) -> None:
    """The queue pair is in RST: the one CQE of a collapsed CQ must not be taken for one of those that come."""
    if cq.collapsed:
        _bytes(cq)[CQE64.op_own] = INIT_OP_OWN


def is_complete(cq: CQ, before: int, index: int, named: bool = True) -> bool:
    """Whether the NIC has completed a WQE, and its CQE is still there, as it is not long in a collapsed CQ.

    Not `named`: of a shared receive queue.
    """
    at = before + index
    cqe = completions(cq)[at % cq.entries]
    if _opcode(cqe) == _INVALID or (named and int(cqe["wqe_counter"]) != index & PI_MASK):
        return False
    return int(cqe["op_own"]) & OWNER_MASK == at // cq.entries & 1


def first_error(cq: CQ, before: int, least: int, named: bool = True) -> FailedWqe | None:
    """The first error completion of a WQE from index `least` on; that of a collapsed CQ is the last."""
    if cq.collapsed:
        index = produced(cq, before, least) - 1
        return _failure(cq, 0, index) if index >= least else None
    for index in range(least, least + cq.entries):
        if not is_complete(cq, before, index, named):
            return None
        if failed := _failure(cq, (before + index) % cq.entries, index):
            return failed
    return None


def _failure(cq: CQ, slot: int, index: int) -> FailedWqe | None:
    cqe = ERR_CQE64.at(_bytes(cq), slot * CQE_SIZE)
    if int(cqe["op_own"]) >> OPCODE_SHIFT not in _ERRORS:
        return None
    return FailedWqe(index, int(cqe["syndrome"]), int(cqe["vendor_err_synd"]))


def last_cqe(cq: CQ, before: int, completed: int) -> str:
    """The newest of so many completions, in words."""
    if completed == 0:
        return "none yet"
    slot = 0 if cq.collapsed else (before + completed - 1) % cq.entries
    cqe = completions(cq)[slot]
    opcode = _opcode(cqe)
    name = CqeOpcode(opcode).name if opcode in list(CqeOpcode) else hex(opcode)
    return f"{name} with wqe_counter {int(cqe['wqe_counter'])} in slot {slot}"
