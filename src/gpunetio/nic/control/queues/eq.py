"""Event queues: one per completion vector, numbered from 1. They contain nothing, as the NIC raises no interrupts."""

from __future__ import annotations

from ....formats.commands import CapClass, Status
from ...engine.hardware import Hardware
from ...state.cq import EQ_ROW
from ...state.tables import Table
from ..command import Capabilities
from ..objects import Objects, log_of
from ..syndromes import CommandError, CommandSyndrome

COMP_VECTORS = 8


class EventQueues(Objects):
    """The event queues of a NIC. They always exist."""

    def __init__(self, hardware: Hardware):
        super().__init__(Table("EQ", EQ_ROW, 2 * COMP_VECTORS), CommandSyndrome.NO_SUCH_EQ)
        self.table.rows["eqn"][1 : COMP_VECTORS + 1] = range(1, COMP_VECTORS + 1)
        hardware.record["eqs"] = self.table.address

    def capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {"log_max_eq": log_of(COMP_VECTORS), "max_num_eqs": COMP_VECTORS}}

    def need(self, number: int) -> int:
        if number not in self.table:
            raise CommandError(Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_EQ, f"there is no EQ {number}")
        return self.table.row_address(number)
