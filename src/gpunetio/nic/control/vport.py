"""The port as its Ethernet queues see it: QUERY_NIC_VPORT_CONTEXT."""

from __future__ import annotations

from collections.abc import Iterable

from ...formats import ethernet as eth
from ...formats.commands import Opcode, Status
from ...formats.ethernet import InlineMode
from ..hardware import Hardware
from ..transport.eth_frame import MAX_MTU
from .command import Call, Command, Handlers
from .hca import guid_of
from .port import Port
from .syndromes import CommandError, CommandSyndrome

_LARGEST = (1 << 16) - 1  # nic_vport_context.mtu


def mtu_of(port: Port) -> int:
    """Return the most bytes that a frame has behind its MAC header and VLAN tags."""
    return min(port.link_mtu, MAX_MTU)


class NicVport(Handlers):
    """The only vport of a NIC."""

    def __init__(self, hardware: Hardware):
        self._port = hardware.port

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.GENERAL, Opcode.QUERY_NIC_VPORT_CONTEXT, eth.QUERY_NIC_VPORT_CONTEXT_IN,
                    self._query, eth.QUERY_NIC_VPORT_CONTEXT_OUT.size),
        )  # fmt: skip

    def _query(self, mailbox: bytes) -> bytes:
        get = eth.QUERY_NIC_VPORT_CONTEXT_IN.get
        other, number = get(mailbox, "other_vport"), get(mailbox, "vport_number")
        if other or number:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER,
                f"other_vport {other}, vport {number}: there is one vport, 0",
            )  # fmt: skip
        port, guid = self._port, guid_of(self._port)
        every = int(port.config.promiscuous)
        return bytes(eth.QUERY_NIC_VPORT_CONTEXT_OUT.pack(nic_vport_context={
            "min_wqe_inline_mode": InlineMode.NONE, "roce_en": int(not port.infiniband),
            "mtu": min(mtu_of(port) + eth.VPORT_FRAMING, _LARGEST), "port_guid": guid, "node_guid": guid,
            "promisc_uc": every, "promisc_mc": every, "promisc_all": every,
            "permanent_address": int.from_bytes(port.mac, "big"),
        }))  # fmt: skip
