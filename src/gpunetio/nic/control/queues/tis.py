"""Transport interfaces send (TIS), through which SQs send: CREATE_TIS, MODIFY_TIS, QUERY_TIS, DESTROY_TIS."""

from __future__ import annotations

from collections.abc import Iterable

from ....formats import ethernet_queues as eth
from ....formats.commands import CapClass, Opcode
from ....formats.ethernet_queues import ModifyTis
from ...engine.hardware import Hardware
from ...state.ethernet_queues import TIS_ROW
from ..command import DONE, Call, Capabilities, Command
from ..objects import Uses
from ..regions.pd import ProtectionDomains
from ..syndromes import CommandSyndrome
from .ethernet_objects import EthernetObjects, check_mask, refuse_fields
from .transport_domain import TransportDomains

MAX_TIS = 1024
_UNSUPPORTED = {
    "strict_lag_tx_port_affinity": "link aggregation", "lag_tx_port_affinity": "link aggregation", "tls_en": "TLS",
    "underlay_qpn": "IP over InfiniBand",
}


class SendInterfaces(EthernetObjects):
    """The TISs of a NIC."""

    def __init__(self, hardware: Hardware, tds: TransportDomains, pds: ProtectionDomains):
        super().__init__(hardware, "TIS", TIS_ROW, MAX_TIS, CommandSyndrome.NO_SUCH_TIS)
        self._tds, self._pds = tds, pds

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_TIS,  eth.CREATE_TIS_IN,  self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_TIS,  eth.MODIFY_TIS_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_TIS,   eth.QUERY_TIS_IN,   self.query, eth.QUERY_TIS_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_TIS, eth.DESTROY_TIS_IN, self.destroy),
        )

    def ethernet_capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {"log_max_tis": self.log_max}}

    def _create(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        context = eth.CREATE_TIS_IN.get(mailbox, "ctx")
        refuse_fields("tisc", context, _UNSUPPORTED)
        domain, pd = context["transport_domain"], context["pd"]
        self._tds.need(domain)
        if pd:
            self._pds.need(pd)
        number = self.free_number()
        row = self.new_row()
        row["tisn"], row["transport_domain"], row["prio"] = number, domain, context["prio"]
        return self.add(number, row, Uses([(self._pds, pd)] if pd else [], [(self._tds, domain)]), mailbox)

    def _modify(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        mask, context = (eth.MODIFY_TIS_IN.get(mailbox, field) for field in ("bitmask", "ctx"))
        check_mask(mask, ModifyTis.PRIO)
        if mask & ModifyTis.PRIO:
            row = self.table.copy(number)
            row["prio"] = context["prio"]
            self.replace(number, row)
            eth.TISC.update(self.contexts[number], prio=context["prio"])
        return DONE
