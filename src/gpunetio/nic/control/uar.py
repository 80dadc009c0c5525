"""UAR pages: the doorbell registers that programs ring."""

from __future__ import annotations

import numpy as np

from ...enums import UarAllocationType
from ...formats.doorbell import UAR_PAGE
from ...memory import HostMemory
from ..engine.hardware import Hardware
from ..state.objects import UAR_ROW
from ..state.tables import Table
from .objects import CountedObjects
from .syndromes import CommandSyndrome

MAX_UAR = 512


class UarPages(CountedObjects):
    """The UAR pages of a NIC. The engine serves the registers of the pages that its record lists."""

    def __init__(self, hardware: Hardware):
        super().__init__(hardware.name, Table("UAR page", UAR_ROW, MAX_UAR), CommandSyndrome.NO_SUCH_UAR)
        self._pages, self._list = HostMemory(MAX_UAR * UAR_PAGE), HostMemory(8 * MAX_UAR)
        self._addresses = self._list.view(np.int64, 0, MAX_UAR)
        self._record = hardware.record
        self._record["uars"] = self._list.address

    def close(self) -> None:
        self._list.close()
        self._pages.close()
        super().close()

    def alloc(self, kind: UarAllocationType) -> tuple[int, int]:
        """Allocate a page. Return its id and its address."""
        page_id = self.free_row()
        address = self._pages.address + page_id * UAR_PAGE
        row = self.table.rows[page_id]
        row["page_id"], row["addr"], row["kind"] = page_id, address, int(kind)
        self._addresses[int(self._record["uar_count"])] = address
        self._record["uar_count"] += 1
        return page_id, address

    def free(self, page_id: int) -> None:
        """Free a page. InUseError while a queue uses it. The page stays mapped: a late doorbell does no harm."""
        row = self.unused(page_id)
        count = int(self._record["uar_count"])
        at = int(np.flatnonzero(self._addresses[:count] == int(row["addr"]))[0])
        self._addresses[at] = self._addresses[count - 1]
        self._record["uar_count"] = count - 1
        row["page_id"] = 0
