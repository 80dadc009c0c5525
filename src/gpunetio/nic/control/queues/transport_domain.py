"""Transport domains of TISs and TIRs: ALLOC_TRANSPORT_DOMAIN, DEALLOC_TRANSPORT_DOMAIN."""

from __future__ import annotations

from collections.abc import Iterable

from ....formats import ethernet_queues as eth
from ....formats.commands import CapClass, Opcode
from ...engine.hardware import Hardware
from ...state.ethernet_queues import TRANSPORT_DOMAIN_ROW
from ..command import Call, Capabilities, Command
from ..objects import Uses
from ..syndromes import CommandSyndrome
from .ethernet_objects import EthernetObjects

MAX_TRANSPORT_DOMAIN = 64


class TransportDomains(EthernetObjects):
    """The transport domains of a NIC."""

    def __init__(self, hardware: Hardware):
        super().__init__(
            hardware, "transport domain", TRANSPORT_DOMAIN_ROW, MAX_TRANSPORT_DOMAIN,
            CommandSyndrome.NO_SUCH_TRANSPORT_DOMAIN,
        )

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.ALLOC_TRANSPORT_DOMAIN,   eth.ALLOC_TRANSPORT_DOMAIN_IN,   self._alloc),
            Command(Call.DESTROY, Opcode.DEALLOC_TRANSPORT_DOMAIN, eth.DEALLOC_TRANSPORT_DOMAIN_IN, self.destroy),
        )

    def ethernet_capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {"log_max_transport_domain": self.log_max}}

    def _alloc(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        number = self.free_number()
        row = self.new_row()
        row["transport_domain"] = number
        return self.add(number, row, Uses(), mailbox)
