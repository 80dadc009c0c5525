"""Protection domains."""

from __future__ import annotations

from ....formats.commands import CapClass
from ...state.objects import PD_ROW
from ...state.tables import Table
from ..command import Capabilities
from ..objects import CountedObjects
from ..syndromes import CommandSyndrome

MAX_PD = 1024


class ProtectionDomains(CountedObjects):
    """The protection domains of a NIC."""

    def __init__(self, owner: str):
        super().__init__(owner, Table("PD", PD_ROW, MAX_PD), CommandSyndrome.NO_SUCH_PD)

    def capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {"log_max_pd": self.log_max}}

    def alloc(self) -> int:
        """Allocate a PD and return its number."""
        pdn = self.free_row()
        self.table.rows[pdn]["pdn"] = pdn
        return pdn

    def dealloc(self, pdn: int) -> None:
        """Free a PD. InUseError while a QP or a region belongs to it."""
        self.unused(pdn)["pdn"] = 0
