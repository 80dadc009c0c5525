"""Read the completions of Ethernet queues on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ..arguments import deadline, within
from ..errors import BadStateError, InvalidValueError
from ..formats.cqe import CI_MASK, CQE64, CQE_SHIFT, INIT_OP_OWN
from ..formats.doorbell import CQ_ARM_SN_MASK, CQ_ARM_SN_SHIFT, CQ_DBREC, UAR_CQ_OFFSET
from ..verbs import CQ, CompChannel, Context
from ..verbs.devx.ring import doorbells

_Found = TypeVar("_Found")

_NAP = 50e-6  # seconds to sleep between two polls that find nothing


class CqReader:
    """The CQ of one Ethernet queue, whose ring this process reads. Nothing else may read `cq`.

    With a channel, the device reports a completion there, once per `request_event`.
    """

    cq: CQ

    def __init__(self, ctx: Context, entries: int, channel: CompChannel | None):
        self.cq = cq = ctx.create_cq(entries, channel=channel, external_datapath=True)
        memory = cq.ring.memory
        if memory is None:
            raise InvalidValueError(f"{cq} has no ring in memory of this process")
        self._cqes = memory.view(CQE64.dtype, 0, cq.entries)
        self._cqes["op_own"] = INIT_OP_OWN
        self._record = memory.view(CQ_DBREC.dtype, cq.ring.dbr_offset)
        self._doorbells, self._log = doorbells(), cq.entries.bit_length() - 1
        self._taken, self._arm_sn = 0, 0

    def take(self, most: int) -> np.ndarray:
        """Return up to `most` new CQEs, oldest first, and free their slots."""
        cq = self.cq
        count = self._doorbells.arrived(cq.ring_address, CQE_SHIFT, self._log, self._taken, min(most, cq.entries))
        places = np.arange(self._taken, self._taken + count) & cq.entries - 1
        found = self._cqes[places]
        if count:
            self._taken += count
            self._record["set_ci"] = self._taken & CI_MASK
        return found

    def wait(self, deadline: float) -> bool:
        """Wait for a new CQE. Return whether one arrived before `deadline`, a time of `time.monotonic()`."""
        cq = self.cq
        while not self._doorbells.arrived(cq.ring_address, CQE_SHIFT, self._log, self._taken, 1):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_NAP, left))
        return True

    def collect(self, take: Callable[[int], list[_Found]], most: int, least: int, timeout: float) -> list[_Found]:
        """Collect up to `most` results of `take`: at least `least`, or as many as came in `timeout` seconds."""
        most, end = within("most", most, 1, 1 << 31), deadline(timeout)
        least = within("least", least, 1, most)
        found: list[_Found] = []
        while True:
            found += take(most - len(found))
            if len(found) >= least or not self.wait(end):
                return found

    def request_event(self, queue: object) -> None:
        """Request one event on the channel for the queue's next completion that has not been taken."""
        cq = self.cq
        if cq.channel is None:
            raise BadStateError(f"{queue} has no completion channel: create it with channel=")
        self._arm_sn += 1
        word = (self._arm_sn & CQ_ARM_SN_MASK) << CQ_ARM_SN_SHIFT | self._taken & CI_MASK
        self._doorbells.ring_arm(cq.arm_address, word, cq.uar.page.base_addr + UAR_CQ_OFFSET, cq.cqn)
        cq.ctx.provider.doorbell_rung()


